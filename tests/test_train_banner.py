"""train.banner: what a run says of itself, and which scan it names on which platform."""

from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_kernels.device import Gpu
from train import banner as module
from train.banner import banner, scan_reason
from train.config import TrainConfig
from train.corpus import Corpus
from train.devices import make_mesh
from train.tokens import Part, Tokens


def test_banner_says_what_runs():
    learned, held_out = (Tokens([Part(np.zeros(length, np.uint8))]) for length in (1000, 100))
    corpus = Corpus("words", "bytes", learned, held_out, n_train_files=3, n_validation_files=1, n_left_out=2)
    config = TrainConfig(steps=5, decay_steps=5, batch_size=2, seq_len=50, mesh="data=2,seq=2")
    rows = banner(config, make_mesh(config.mesh), corpus, Path("runs/x"), 1234567)
    assert jax.__version__ in rows["versions"]
    assert rows["device"].startswith("4 of 8 x cpu")
    assert rows["device"].endswith("; data 2, seq 2")
    assert "1,234,567 parameters" in rows["model"]
    assert rows["text"] == (
        "words: 1,000 bytes from 3 files to learn, 100 from 1 held out; 2 files left out, not UTF-8"
    )
    assert rows["batch"].startswith("100 tokens a step")
    assert rows["steps"] == "5: 500 tokens, 50.0% of the text"
    assert rows["run"] == "runs/x"


@pytest.mark.parametrize(
    ("scan", "platform", "gpu", "start"),
    [
        ("auto", "cpu", None, "sequential: auto's choice on a CPU"),
        ("pallas", "cpu", None, "pallas, as asked for; on a CPU Pallas' interpreter"),
        ("sequential", "gpu", None, "sequential, as asked for"),
        ("auto", "tpu", None, "associative: auto's choice on tpu"),
        ("auto", "gpu", Gpu("NVIDIA H100", 90, 132), "pallas: auto's choice on GPUs with compute capability 9.0"),
        ("auto", "gpu", Gpu("Tesla T4", 75, 40), "associative: auto's choice, as compute capability 7.5 is too old"),
    ],
)
def test_the_scan_is_named_with_the_reason(monkeypatch, scan, platform, gpu, start):
    monkeypatch.setattr(module, "target_gpu", lambda: gpu)
    assert scan_reason(scan, platform).startswith(start)
