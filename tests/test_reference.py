"""The references against each other and against what they are derived from: finite differences, autodiff, PyTorch."""

import dataclasses
import subprocess
import sys

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.reference import oracle
from mamba_jax.reference.plain_scan import plain_scan

SMALL = {"length": 5, "batch": 2, "dim": 4, "state": 3}
VARIANTS = {
    "everything": cases.Case(**SMALL, dtype="float64", segment_ids=True),
    "nothing": cases.Case(
        **SMALL, dtype="float64", skip=False, gate=False, delta_bias=False, delta_softplus=False, initial_state=False
    ),
    "groups": cases.Case(**SMALL, dtype="float64", grouped=True),
    "constant": cases.Case(**SMALL, dtype="float64", varying_B=False, varying_C=False),
    "constant_B_grouped_C": cases.Case(**SMALL, dtype="float64", varying_B=False, grouped=True, segment_ids=True),
    "complex": cases.Case(**SMALL, dtype="complex64", segment_ids=True),
    "complex_constant_C": cases.Case(**SMALL, dtype="complex64", varying_C=False, grouped=True),
}


@pytest.fixture(params=VARIANTS)
def problem(request):
    """A small problem in double precision."""
    return in_double(cases.make_problem(VARIANTS[request.param]))


def in_double(problem):
    def widen(value):
        return value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)

    arguments = {name: widen(value) for name, value in problem.arguments.items()}
    return dataclasses.replace(problem, arguments=arguments, dy=widen(problem.dy), dlast=widen(problem.dlast))


def loss_of(problem, arguments):
    y, last_state = oracle.selective_scan_oracle(**arguments, **problem.options)
    return np.sum(problem.dy * y) + np.sum(problem.dlast * last_state).real


def test_oracle_table():
    """a = exp(Delta A) = 0.5 and all else 1: y = 1, 1.5, 1.75, ..., each state half of the last plus 1."""
    ones = np.ones((1, 5, 1))
    y, last_state = oracle.selective_scan_oracle(ones, ones, np.full((1, 1), -np.log(2)), ones, ones)
    np.testing.assert_allclose(y[0, :, 0], [1, 1.5, 1.75, 1.875, 1.9375], rtol=1e-15)
    np.testing.assert_allclose(last_state, [[[1.9375]]], rtol=1e-15)


def test_oracle_gradients_are_finite_differences(problem):
    """Central differences along each entry of each argument, its real and its imaginary part."""
    _, gradients = cases.oracle_of(problem)
    step = 1e-6
    for name, value in problem.arguments.items():
        directions = (1, 1j) if np.iscomplexobj(value) else (1,)
        for index in np.ndindex(value.shape):
            for direction in directions:
                shift = np.zeros_like(value)
                shift[index] = step * direction
                above = loss_of(problem, problem.arguments | {name: value + shift})
                below = loss_of(problem, problem.arguments | {name: value - shift})
                want = (above - below) / (2 * step)
                got = (gradients[name][index] * direction).real
                assert abs(got - want) <= 1e-7 + 1e-7 * abs(want), (name, index, direction)


def test_oracle_equals_autodiff_of_plain_scan(problem):
    results, gradients = cases.oracle_of(problem)
    with jax.enable_x64(True):

        def call(arguments):
            return plain_scan(**arguments, **problem.options, return_last_state=True)

        got, pull_back = jax.vjp(call, problem.arguments)
        (got_gradients,) = pull_back((jnp.asarray(problem.dy), jnp.asarray(problem.dlast)))
    for value, want in zip(got, results):
        np.testing.assert_allclose(value, want, rtol=1e-11, atol=1e-12)
    for name, want in gradients.items():
        assert got_gradients[name].dtype == want.dtype
        np.testing.assert_allclose(got_gradients[name], want, rtol=1e-10, atol=1e-11, err_msg=name)


def test_plain_scan_in_bfloat16_keeps_dtypes():
    case = cases.Case(length=16, dtype="bfloat16")
    problem = cases.make_problem(case)
    y, last_state = plain_scan(**problem.arguments, **problem.options, return_last_state=True)
    assert y.dtype == jnp.bfloat16
    assert last_state.dtype == jnp.float32
    (y_want, last_state_want), _ = cases.expected(case)
    cases.assert_close("y", y, y_want, cases.TOLERANCES["bfloat16"])
    cases.assert_close("last_state", last_state, last_state_want, cases.TOLERANCES["float32"])


@pytest.mark.parametrize("size", ["batch", "length", "dim", "state"])
def test_oracle_takes_empty_sizes(size):
    problem = cases.make_problem(cases.Case(**(SMALL | {size: 0}), groups=1))
    (y, last_state), gradients = cases.oracle_of(problem)
    assert y.shape == problem.arguments["u"].shape
    assert last_state.shape == problem.arguments["initial_state"].shape
    assert {name: value.shape for name, value in gradients.items()} == {
        name: value.shape for name, value in problem.arguments.items()
    }
    if size == "length":
        np.testing.assert_array_equal(last_state, problem.arguments["initial_state"])
        np.testing.assert_array_equal(gradients["initial_state"], problem.dlast)


@pytest.mark.parametrize("kind", ["float64", "complex64"])
def test_state_update_oracle_equals_a_scan_of_one_step(kind):
    case = cases.Case(length=1, dtype=kind, dim=6, groups=3, grouped=True)
    problem = in_double(cases.make_problem(case))
    (y_want, state_want), _ = cases.oracle_of(problem)
    arguments = problem.arguments
    y, state = oracle.selective_state_update_oracle(
        arguments["initial_state"],
        arguments["u"][:, 0],
        arguments["delta"][:, 0],
        arguments["A"],
        arguments["B"][:, 0],
        arguments["C"][:, 0],
        arguments["D"],
        arguments["z"][:, 0],
        arguments["delta_bias"],
        dt_softplus=True,
    )
    np.testing.assert_allclose(y, y_want[:, 0], rtol=1e-14)
    np.testing.assert_allclose(state, state_want, rtol=1e-14)


@pytest.mark.parity
@pytest.mark.parametrize("name", [name for name, case in VARIANTS.items() if not case.segment_ids])
def test_torch_loop_and_autograd_equal_oracle(name):
    torch = pytest.importorskip("torch")
    from mamba_jax.reference.torch_forms import selective_scan_loop

    problem = in_double(cases.make_problem(VARIANTS[name]))
    (y_want, last_state_want), gradients = cases.oracle_of(problem)
    arguments = {name: torch.tensor(value, requires_grad=True) for name, value in problem.arguments.items()}
    y, last_state = selective_scan_loop(**arguments, **problem.options)
    np.testing.assert_allclose(y.detach(), y_want, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(last_state.detach(), last_state_want, rtol=1e-11, atol=1e-12)
    loss = (torch.tensor(problem.dy) * y).sum() + (torch.tensor(problem.dlast) * last_state).sum().real
    loss.backward()
    for name, want in gradients.items():
        # PyTorch's complex gradient is the conjugate of JAX's: the direction of steepest ascent.
        np.testing.assert_allclose(np.conj(arguments[name].grad.numpy()), want, rtol=1e-10, atol=1e-11, err_msg=name)


def test_importing_the_package_does_not_import_torch():
    code = "import sys, mamba_jax, mamba_jax.reference.oracle; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
