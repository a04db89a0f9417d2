"""`--gpu-check`, at tiny sizes on a CPU: its cases, what it calls wrong, and what it writes."""

import json

import jax
import numpy as np
import pytest

from mamba_jax.bench import gpu_cases, gpu_check, gpu_sections
from mamba_jax.bench.gpu_cases import Case
from pallas_kernels import compat

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter's part of the check")


def test_the_grid_has_40_cases_and_every_option_on_and_off():
    grid = gpu_cases.grid()
    assert len(grid) == 40
    assert {case.l for case in grid} == set(gpu_cases.GRID_LENGTHS)
    assert {case.dtype for case in grid} == set(gpu_cases.DTYPES)
    for option in gpu_cases.OPTIONS:
        assert 5 <= sum(option in case.options for case in grid) <= 35


@on_cpu
def test_a_case_is_right_and_a_wrong_gradient_is_named():
    case = Case(2, 9, 4, 3, "float32", ("D", "z", "delta_bias", "delta_softplus", "initial_state", "segment_ids"))
    inputs = gpu_cases.make_inputs(case)
    run = gpu_cases.with_gradients("pallas", True)
    (y, last_state), gradients = run(inputs.arguments, inputs.options["segment_ids"], inputs.dy, inputs.dlast)
    error, _ = gpu_cases.mistake(inputs, case.dtype, ((y, last_state), gradients))
    assert error < 0.1
    wrong = gradients | {"A": gradients["A"] * 1.01}
    assert gpu_cases.mistake(inputs, case.dtype, ((y, last_state), wrong))[1] == "dA"
    error, whose = gpu_cases.mistake(inputs, case.dtype, ((y * np.nan, last_state), gradients))
    assert np.isnan(error)
    assert whose == "y"


def test_only_the_portable_kernel(monkeypatch):
    monkeypatch.setattr(compat, "HAS_MOSAIC", True)
    with gpu_cases.only("portable"):
        assert not compat.HAS_MOSAIC
    assert compat.HAS_MOSAIC
    with gpu_cases.only("mosaic"):
        assert compat.HAS_MOSAIC


@on_cpu
def test_a_large_scan_is_compared_in_part():
    (record,) = gpu_sections.check_part("interpreted", Case(3, 7, 20, 4, "bfloat16", ("D",)))
    assert record["ok"]
    assert record["elements"] == 3 * 7 * 20


@on_cpu
def test_the_same_bits_ten_times():
    (record,) = gpu_sections.check_same_bits("interpreted", Case(1, 6, 4, 3, "float32"), deadline=float("inf"))
    assert record == {"case": record["case"], "ok": True, "calls": 10}


def test_an_exception_and_the_end_of_time_are_records(tmp_path):
    path = tmp_path / "check.json"
    check = gpu_check.Check(gpu_check.SMALL, 60, str(path))

    def fail(deadline):
        raise RuntimeError("no such instruction")

    check.section("first", fail)
    check.section("second", lambda deadline: [{"ok": True}])
    gpu_check.Check(gpu_check.SMALL, 0, None).section("third", fail)
    written = json.loads(path.read_text())
    assert written["sections"]["first"]["records"] == [{"ok": False, "note": "RuntimeError: no such instruction"}]
    assert written["sections"]["second"]["records"] == [{"ok": True}]
    assert written["failed"] == check.failed == 1


@on_cpu
def test_without_a_gpu_it_says_so(capsys):
    assert gpu_check.command(["--gpu-check"]) == 2
    assert capsys.readouterr().err.startswith("error: JAX sees no GPU")
