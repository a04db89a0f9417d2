"""train.dry_run: what a run would need is said, and nothing is read, written or run."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from train.__main__ import main

ROOT = Path(__file__).parent.parent
SMALL = ["--scan", "sequential", "--d-model", "16", "--n-layer", "2", "--d-state", "4", "--seq-len", "32"]
PAPER = [
    "--d-model", "768", "--n-layer", "24", "--vocab-size", "50277", "--seq-len", "2048", "--batch-size", "1",
    "--dtype", "bfloat16", "--remat", "--compile-for", "h200",
]  # fmt: skip


def test_budget_of_each_device(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*SMALL, "--data", "nowhere", "--dry-run", "--mesh", "data=2,fsdp=2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"devices +4 x cpu", out)
    assert re.search(r"parameters +8,560, of float32: 0\.0 MiB on each device", out)
    assert re.search(r"temporaries +\d+ MiB on each device", out)
    assert re.search(r"seq_len +32\n", out)
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_are_not_read(capsys):
    assert main([*SMALL, "--dry-run", "--init-from", "nowhere"]) == 2
    assert "--dry-run reads no checkpoint: --init-from None, and flags for" in capsys.readouterr().err


def test_mistakes_are_found_without_compiling(capsys):
    assert main([*SMALL, "--dry-run", "--mesh", "data=3"]) == 2
    assert "--batch-size 4: a multiple of 3, data times fsdp of --mesh data=3, is wanted" in capsys.readouterr().err


def _can_compile() -> bool:
    plugins = importlib.util.find_spec("jax_plugins")
    names = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    return plugins is not None and any(importlib.util.find_spec(name) for name in names)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2) or not _can_compile(), reason="needs the extra gpu-compile")
def test_paper_model_for_a_gpu_that_is_not_there():
    """mamba-130m at 2048 tokens and batch 1 takes less than the 4.8 GB of the paper's table 15, parameters included."""
    command = [sys.executable, "-m", "train", "--dry-run", *PAPER]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=os.environ)
    in_all = re.search(r"in all +([\d,]+) MiB on each device", done.stdout)
    assert in_all is not None, done.stdout
    assert 1000 < int(in_all[1].replace(",", "")) < 4.8e9 / 2**20
