"""`python -m mamba_jax.bench --parity`: small errors pass, and an error that is not small does not."""

import importlib.util

import numpy as np
import pytest

from mamba_jax.bench import parity
from mamba_jax.bench.report import Screen
from mamba_jax.bench.settings import Settings


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, size in (("BATCH", 2), ("LENGTH", 11), ("CHANNELS", 6), ("STATE", 3)):
        monkeypatch.setattr(parity, name, size)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_form_passes(dtype):
    rows = parity.compare_forms(dtype, seed=0)
    has_torch = importlib.util.find_spec("torch") is not None
    assert [row["form"] for row in rows] == [*parity.FORMS, *([parity.PYTORCH] if has_torch else [])]
    for row in rows:
        assert row["within_tolerance"]
        assert len(row["against_oracle"]) == 11  # y, the last state, nine gradients
        assert max(row["against_oracle"].values()) < row["tolerance"]


def test_a_wrong_form_ends_with_1(monkeypatch, capsys):
    right = parity.oracle(parity.make_inputs("float32", 0))

    def of_form(form, inputs):
        results = parity.oracle(inputs)
        return results | {"dB": results["dB"] * 1.1} if form == "pallas" else results

    monkeypatch.setattr(parity, "of_form", of_form)
    monkeypatch.setattr(parity, "DTYPES", ("float32",))
    content, code = parity.run_parity(Settings(), Screen())
    assert code == 1
    assert [row["form"] for row in content["parity"] if not row["within_tolerance"]] == ["pallas"]
    assert "NO" in capsys.readouterr().out
    assert np.isfinite(right["y"]).all()
