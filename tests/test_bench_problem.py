"""The benchmark's check against the oracle: what is right passes, whatever is wrong does not."""

import numpy as np
import pytest

from mamba_jax.bench.implementations import IMPLEMENTATIONS
from mamba_jax.bench.problem import Problem, relative_error

PROBLEM = Problem(batch=2, length=13, channels=24, state=4, dtype="float32", seed=0)


@pytest.fixture(scope="module")
def right():
    """What the sequential form returns, forward and gradient, with the masked dy."""
    return IMPLEMENTATIONS["sequential"].prepare(PROBLEM, "gradient").checked_results()


def test_right_results_pass(right):
    assert PROBLEM.mistake(right) is None
    assert set(right) == {"y", "du", "ddelta", "dA", "dB", "dC", "dD"}


@pytest.mark.parametrize("name", ["y", "du", "ddelta", "dA", "dB", "dC", "dD"])
def test_each_wrong_result_is_named(right, name):
    wrong = np.array(right[name])
    wrong[..., PROBLEM.checked[3] if wrong.shape[-1] == PROBLEM.channels else 0] *= 1.01
    message = PROBLEM.mistake(right | {name: wrong})
    assert message is not None
    assert message.startswith(f"{name} is off by ")


def test_nan_is_wrong(right):
    y = np.array(right["y"])
    y[0, 0, 0] = np.nan
    assert "y is off" in str(PROBLEM.mistake(right | {"y": y}))


def test_a_wrong_shape_is_wrong(right):
    assert "dB has shape (2, 12, 4)" in str(PROBLEM.mistake(right | {"dB": right["dB"][:, 1:]}))


def test_masked_dy_leaves_only_the_checked_channels():
    others = np.delete(PROBLEM.masked_dy, PROBLEM.checked, axis=-1)
    assert not others.any()
    np.testing.assert_array_equal(PROBLEM.masked_dy[..., PROBLEM.checked], PROBLEM.dy[..., PROBLEM.checked])


def test_inputs_are_a_function_of_the_seed():
    again = Problem(batch=2, length=13, channels=24, state=4, dtype="float32", seed=0)
    other = Problem(batch=2, length=13, channels=24, state=4, dtype="float32", seed=1)
    np.testing.assert_array_equal(PROBLEM.arguments["u"], again.arguments["u"])
    assert np.any(PROBLEM.arguments["u"] != other.arguments["u"])


def test_relative_error():
    assert relative_error(np.array([1.0, 2.5]), np.array([1.0, 2.0])) == 0.25
    assert relative_error(np.array([]), np.array([])) == 0.0
