"""The Mosaic forward kernel in its interpreter: every feature against the float64 oracle, and no races."""

import jax
import numpy as np
import pytest

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("the interpreter of Mosaic kernels can be relied on from jax 0.11.2", allow_module_level=True)

import mosaic_interpreter as interpreter
from mosaic_interpreter import Case

BF16, F16, F32 = "bfloat16", "float16", "float32"

CASES = {
    "whole tiles": Case(l=48, d=128, n=16),
    "ragged length and channels": Case(l=37, d=140, n=4),
    "one step": Case(l=1, d=4, n=1),
    "two batch rows, odd n": Case(l=19, d=8, n=3, b=2),
    "no gate, no softplus": Case(l=20, d=128, n=4, gate=False, softplus=False),
    "groups": Case(l=18, d=24, n=8, g=3),
    "constant B": Case(l=18, d=128, n=4, constant_B=True),
    "constant C": Case(l=18, d=128, n=4, constant_C=True),
    "constant B and C": Case(l=18, d=128, n=4, constant_B=True, constant_C=True),
    "documents": Case(l=40, d=128, n=4, reset=True),
    "padded steps": Case(l=24, d=128, n=4, padded=7),
    "bfloat16": Case(l=20, d=128, n=4, dtypes=(BF16,) * 4),
    "float16": Case(l=20, d=128, n=4, dtypes=(F16,) * 4),
    "mixture": Case(l=20, d=132, n=4, dtypes=(F32, BF16, F16, F32)),
    "two groups of states": Case(l=17, d=128, n=20, g=2),
    "split": Case(l=75, d=128, n=4, pieces=3),
    "split with documents": Case(l=60, d=128, n=4, pieces=2, reset=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_forward(case):
    problem = interpreter.make(case)
    y, last_state, kept = interpreter.run_forward(case, problem)
    want_y, want_last = interpreter.oracle_forward(problem)
    assert y.dtype == problem.arguments.u.dtype
    interpreter.assert_close("y", y, want_y, case)
    interpreter.assert_close("last state", last_state, want_last, case)
    want_kept = np.asarray(interpreter.oracle_kept(case, problem), np.float64)
    interpreter.assert_close("kept states", kept, want_kept, case)


def test_small_delta_keeps_its_bits():
    """softplus(-12) is 6e-6, of which log(1 + e) would get a tenth of the bits: each state is right by itself."""
    case = Case(l=16, d=128, n=4, gate=False)
    problem = interpreter.make(case)
    problem.oracle["delta"] = np.full((1, 16, 128), -12, np.float32)
    problem.oracle["initial_state"] = np.zeros((1, 128, 4), np.float32)
    arguments = problem.arguments._replace(
        delta=jax.numpy.asarray(problem.oracle["delta"]), initial_state=jax.numpy.zeros((1, 128, 4))
    )
    problem = interpreter.Problem(arguments, problem.oracle, problem.dy, problem.dlast)
    last_state = np.asarray(interpreter.run_forward(case, problem)[1], np.float64)
    np.testing.assert_allclose(last_state, interpreter.oracle_forward(problem)[1], rtol=1e-4, atol=1e-9)


def test_a_missing_wait_is_a_race(monkeypatch):
    """The interpreter's verdict means something: without the waits for copies out it finds a race."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda n, wait_read_only=False: None)
    case = Case(l=64, d=128, n=1, gate=False)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        interpreter.run_forward(case, interpreter.make(case))
