"""`selective_state_update`: one step against the oracle, and many steps against the scan."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax import selective_scan, selective_state_update
from mamba_jax.reference.oracle import selective_state_update_oracle


def make_step(batch, dim, state, groups=None, dtype="float32", gate=True, options=True):
    """Arguments of one step, drawn as mamba_ssm's test draws them; B and C are (b, n) without groups."""
    rng = np.random.default_rng(0)
    matrix = (batch, state) if groups is None else (batch, groups, state)
    shapes = {"x": (batch, dim), "dt": (batch, dim), "B": matrix, "C": matrix}
    arguments = {"state": rng.standard_normal((batch, dim, state)).astype("float32")}
    arguments |= {name: rng.standard_normal(shape).astype(jnp.dtype(dtype)) for name, shape in shapes.items()}
    arguments["A"] = (-rng.random((dim, state)) - 1).astype("float32")
    if gate:
        arguments["z"] = rng.standard_normal((batch, dim)).astype(jnp.dtype(dtype))
    if options:
        arguments["D"] = rng.standard_normal(dim).astype("float32")
        arguments["dt_bias"] = (rng.random(dim) - 4).astype("float32")
    return arguments


def check_step(arguments, **options):
    y, state = jax.jit(lambda a: selective_state_update(**a, **options))(arguments)
    y_want, state_want = selective_state_update_oracle(**arguments, **options)
    assert y.dtype == arguments["x"].dtype
    assert state.dtype == arguments["state"].dtype
    cases.assert_close("y", y, y_want, cases.TOLERANCES[jnp.dtype(y.dtype).name])
    cases.assert_close("state", state, state_want, cases.TOLERANCES["float32"])


@pytest.mark.parametrize("state", [16, 32, 64])
@pytest.mark.parametrize("dim", [2048, 4096])
@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("dtype", cases.REAL_DTYPES)
def test_official_sizes(dtype, gate, dim, state):
    check_step(make_step(2, dim, state, dtype=dtype, gate=gate), dt_softplus=True)


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_groups(groups):
    check_step(make_step(3, 6, 5, groups=groups), dt_softplus=True)


@pytest.mark.parametrize("dt_softplus", [False, True])
def test_only_the_needed_arguments(dt_softplus):
    arguments = make_step(2, 5, 3, gate=False, options=False)
    arguments["dt"] = np.abs(arguments["dt"])
    check_step(arguments, dt_softplus=dt_softplus)


@pytest.mark.parametrize("empty", ["batch", "dim", "state"])
def test_empty_sizes(empty):
    check_step(make_step(**({"batch": 2, "dim": 4, "state": 3} | {empty: 0})))


def test_complex():
    arguments = make_step(2, 4, 3)
    for name in ("state", "A", "B", "C"):
        arguments[name] = (arguments[name] + 0.5j * np.roll(arguments[name], 1)).astype("complex64")
    y, state = selective_state_update(**arguments, dt_softplus=True)
    y_want, state_want = selective_state_update_oracle(**arguments, dt_softplus=True)
    cases.assert_close("y", y, y_want, cases.TOLERANCES["float32"])
    cases.assert_close("state", state, state_want, cases.TOLERANCES["complex64"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_equal_the_scan(dtype):
    """state-spaces/mamba 500, 187: token by token the outputs and states of the whole sequence."""
    problem = cases.make_problem(cases.Case(length=20, dtype=dtype, dim=6, groups=3, grouped=True))
    a = problem.arguments
    y_want, state_want = selective_scan(**a, delta_softplus=True, return_last_state=True, scan="sequential")
    step = jax.jit(selective_state_update, static_argnames="dt_softplus")
    state, outputs = jnp.asarray(a["initial_state"]), []
    for t in range(20):
        now = {"x": a["u"][:, t], "dt": a["delta"][:, t], "B": a["B"][:, t], "C": a["C"][:, t], "z": a["z"][:, t]}
        y, state = step(state, **now, A=a["A"], D=a["D"], dt_bias=a["delta_bias"], dt_softplus=True)
        outputs.append(y)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 8e-3, "atol": 1e-5}
    np.testing.assert_allclose(np.float32(jnp.stack(outputs, 1)), np.float32(y_want), **tolerance)
    np.testing.assert_allclose(state, state_want, rtol=1e-5, atol=1e-5)


def test_the_given_state_is_left_as_it_was():
    arguments = make_step(2, 4, 3)
    before = jnp.asarray(arguments.pop("state"))
    first = jax.jit(selective_state_update)(before, **arguments)
    again = jax.jit(selective_state_update)(before, **arguments)
    for got, want in zip(again, first):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("state", np.zeros((2, 4), "float32")),
        ("x", np.zeros((2, 4, 1), "float32")),
        ("dt", np.zeros((2, 5), "float32")),
        ("A", np.zeros((4, 9), "float32")),
        ("B", np.zeros((3, 3), "float32")),
        ("C", np.zeros((2, 3, 3), "float32")),
        ("D", np.zeros((4, 1), "float32")),
        ("z", np.zeros((2, 1), "float32")),
        ("dt_bias", np.zeros(3, "float32")),
        ("x", np.zeros((2, 4), "int32")),
    ],
)
def test_errors_name_the_argument(name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        selective_state_update(**(make_step(2, 4, 3) | {name: value}))
