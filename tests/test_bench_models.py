"""The whole models that the benchmark times: checked against each other, transformers' among them."""

import numpy as np
import pytest

from mamba_jax.bench import models
from mamba_jax.bench.models import ModelProblem, implementations, make_model
from mamba_jax.config import MambaConfig

TINY = MambaConfig(vocab_size=40, d_model=16, n_layer=2, d_state=4)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(models.MODELS, "tiny", TINY)


@pytest.fixture
def all_of_them(tmp_path):
    def folder_of(name):
        make_model(name, "sequential", 0).save_pretrained(str(tmp_path))
        return str(tmp_path)

    return implementations(folder_of)


def problem(length):
    return ModelProblem("tiny", batch=2, length=length, seed=0)


@pytest.mark.parametrize(
    ("form", "which"), [("associative", "forward"), ("pallas", "forward"), ("pallas", "training step")]
)
def test_every_form_is_right(all_of_them, form, which):
    call = all_of_them[form].prepare(problem(6), which)
    assert problem(6).mistake(call.checked_results()) is None
    call.run()
    assert call.compile_s > 0
    assert call.temp_mib > 0


def test_decoding_is_right(all_of_them):
    call = all_of_them["sequential"].prepare(problem(5), "decoding")
    results = call.checked_results()
    assert results["tokens"].shape == (2, models.PROMPT + 5)
    assert problem(5).mistake(results) is None


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("which", ["forward", "training step", "decoding"])
def test_transformers_is_right(all_of_them, which):
    pytest.importorskip("transformers")
    call = all_of_them[models.TRANSFORMERS].prepare(problem(6), which)
    assert problem(6).mistake(call.checked_results()) is None
    call.run()


def test_wrong_logits_losses_and_tokens_are_seen():
    logits = models._expected_logits(problem(6)).copy()
    logits[1, 2, 3] += 0.01 * np.abs(logits).max()
    assert "logits are off by 1.0e-02" in str(problem(6).mistake({"logits": logits}))
    losses = models._expected_losses(problem(6)) * [1, 1.01]
    assert "losses are off by" in str(problem(6).mistake({"losses": losses}))
    tokens = np.tile(np.arange(models.PROMPT + 4, dtype=np.int32), (2, 1))
    assert "a chosen token's logit is" in str(problem(4).mistake({"tokens": tokens}))
