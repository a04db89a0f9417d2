"""The Mosaic backward kernel in its interpreter: every gradient against the float64 oracle, and no races."""

import jax
import numpy as np
import pytest

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("the interpreter of Mosaic kernels can be relied on from jax 0.11.2", allow_module_level=True)

import mosaic_interpreter as interpreter
from mosaic_interpreter import Case

BF16, F16, F32 = "bfloat16", "float16", "float32"

CASES = {
    "whole tiles, 16 states": Case(l=32, d=128, n=16),
    "ragged length and channels": Case(l=19, d=140, n=4),
    "three tiles, three stages": Case(l=40, d=128, n=4, backward_stages=3),
    "one step": Case(l=1, d=4, n=1),
    "two batch rows, 8 states": Case(l=17, d=8, n=7, b=2),
    "no gate, no softplus": Case(l=20, d=128, n=4, gate=False, softplus=False),
    "groups": Case(l=17, d=24, n=4, g=3),
    "constant B": Case(l=17, d=128, n=4, constant_B=True),
    "constant C": Case(l=17, d=128, n=4, constant_C=True),
    "constant B and C": Case(l=17, d=128, n=4, constant_B=True, constant_C=True),
    "documents": Case(l=20, d=128, n=16, reset=True),
    "padded steps": Case(l=20, d=128, n=4, padded=7),
    "bfloat16": Case(l=17, d=128, n=4, dtypes=(BF16,) * 4, backward_stages=3),
    "float16": Case(l=17, d=128, n=4, dtypes=(F16,) * 4),
    "mixture": Case(l=17, d=132, n=4, dtypes=(F32, BF16, F16, F32)),
    "two groups of states": Case(l=16, d=128, n=20, g=2),
    "split": Case(l=40, d=128, n=4, pieces=3),
    "split with documents": Case(l=37, d=128, n=4, pieces=2, reset=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_backward(case):
    problem = interpreter.make(case)
    gradients = interpreter.run_backward(case, problem, interpreter.oracle_kept(case, problem))
    want = interpreter.oracle_backward(problem)
    for name, argument in problem.arguments._asdict().items():
        if name == "reset" or argument is None:
            continue
        gradient = getattr(gradients, name)
        assert gradient.dtype == argument.dtype and gradient.shape == argument.shape, name
        interpreter.assert_close(name, gradient, want[name], case)
    if case.padded:
        assert np.all(np.asarray(gradients.delta)[:, case.l - case.padded :] == 0)


def test_gradients_have_the_same_bits_every_run():
    case = Case(l=16, d=256, n=1)
    problem = interpreter.make(case)
    kept = interpreter.oracle_kept(case, problem)
    first, second = (interpreter.run_backward(case, problem, kept) for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.array_equal(a, b)
