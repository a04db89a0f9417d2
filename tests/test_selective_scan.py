"""Every scan form against the float64 oracle: outputs, last states and all gradients, each in its argument's dtype."""

import dataclasses
import itertools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax import selective_scan

every_form = pytest.mark.parametrize("scan", cases.FORMS)
every_xla_form = pytest.mark.parametrize("scan", cases.XLA_FORMS)

SEQUENCES = ("u", "delta", "B", "C", "z")


def check_form(scan, problem, want=None):
    """Check all results of one form against the oracle's, and return them."""
    got = cases.run(problem, scan, optimise=False)
    cases.check(problem, got, want or cases.oracle_of(problem))
    return got


def forms_of(case):
    """The kernels take no complex numbers."""
    return cases.XLA_FORMS if case.dtype == "complex64" else cases.FORMS


@pytest.mark.parametrize(
    ("case", "scan"),
    [pytest.param(case, scan, id=f"{scan}-{case}") for case in cases.grid() for scan in forms_of(case)],
)
def test_official_grid(case, scan):
    problem = cases.with_neutral_values(cases.make_problem(case), case)
    check_form(scan, problem)


@pytest.mark.slow
@pytest.mark.parametrize("length", [8, 16])
@pytest.mark.parametrize("dtype", [*cases.REAL_DTYPES, "complex64"])
@pytest.mark.parametrize("scan", cases.FORMS)
def test_official_grid_in_full(scan, dtype, length):
    """Every setting of all flags, arguments left out where a flag is off: an hour of compilations."""
    for flags in cases.flag_settings():
        case = cases.Case(length=length, dtype=dtype, **flags)
        if scan in forms_of(case):
            problem = cases.make_problem(case)
            if not case.return_last_state:
                problem = dataclasses.replace(problem, dlast=np.zeros_like(problem.dlast))
            check_form(scan, problem)


def test_grid_covers_all_pairs():
    """Every length with every dtype, and with each flag on and off; all pairs of flags within each dtype."""
    grid = cases.grid()
    dtypes = (*cases.REAL_DTYPES, "complex64")
    assert {(case.length, case.dtype) for case in grid} == set(itertools.product(cases.LENGTHS, dtypes))
    for length, flag in itertools.product(cases.LENGTHS, cases.FLAGS):
        assert {getattr(c, flag) for c in grid if c.length == length and c.dtype != "complex64"} == {False, True}
    for dtype, (first, second) in itertools.product(dtypes, itertools.combinations(cases.FLAGS, 2)):
        assert len({(getattr(c, first), getattr(c, second)) for c in grid if c.dtype == dtype}) == 4


@every_form
@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 8, 9, 127, 129, 1000])
def test_ragged_lengths(scan, length):
    """accelerated-scan 13: lengths that no block size divides, forward and backward."""
    case = cases.Case(length=length, dim=6, state=5, groups=3, grouped=True, segment_ids=length % 2 == 0)
    problem = cases.make_problem(case)
    check_form(scan, problem, cases.expected(case))


@every_form
@pytest.mark.parametrize("state", [1, 3, 8, 12, 16, 64, 256])
def test_state_sizes(scan, state):
    """state-spaces/mamba 120: no limit on n, and no need for a power of two."""
    case = cases.Case(length=9, state=state)
    problem = cases.make_problem(case)
    check_form(scan, problem, cases.expected(case))


@every_form
@pytest.mark.parametrize(("dim", "groups"), [(1, 1), (3, 3), (130, 1), (130, 5), (257, 1), (258, 2), (390, 130)])
def test_channels_and_groups(scan, dim, groups):
    """Channels on both sides of the block of 128, groups smaller and larger than it."""
    case = cases.Case(length=10, batch=1, dim=dim, state=3, groups=groups, grouped=True)
    problem = cases.make_problem(case)
    check_form(scan, problem, cases.expected(case))


@every_form
@pytest.mark.parametrize(
    ("dim", "varying_B", "varying_C", "grouped"),
    [
        (6, True, False, True),
        (130, False, True, True),
        (130, True, False, False),
    ],
)
def test_one_of_B_and_C_constant(scan, dim, varying_B, varying_C, grouped):
    """A constant (d, n) matrix beside one that varies in groups."""
    case = cases.Case(length=10, dim=dim, varying_B=varying_B, varying_C=varying_C, grouped=grouped)
    problem = cases.make_problem(case)
    check_form(scan, problem, cases.expected(case))


@every_form
@pytest.mark.parametrize(("B_groups", "C_groups"), [(1, 3), (2, 3)])
def test_different_groups_of_B_and_C(scan, B_groups, C_groups):
    case = cases.Case(length=10, dim=6, groups=B_groups, grouped=True)
    other = cases.make_problem(dataclasses.replace(case, groups=C_groups))
    problem = cases.make_problem(case).replace(C=other.arguments["C"])
    check_form(scan, problem)


@every_form
@pytest.mark.parametrize("narrow", ["u", "delta B", "C z", "u B C", "u delta z", "B z", "delta C"])
def test_mixtures_of_bfloat16_and_float32(scan, narrow):
    """state-spaces/mamba 854: bfloat16 u with float32 B and C, and mixtures in which every pair differs and agrees."""
    narrow = narrow.split()
    problem = cases.cast(cases.make_problem(cases.Case(length=17)), dict.fromkeys(narrow, "bfloat16"))
    check_form(scan, problem)


@every_form
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("varying", [True, False])
def test_narrow_weights(scan, dtype, varying):
    """Everything narrow, weights and initial state too: arithmetic stays float32, and so does the last state."""
    problem = cases.make_problem(cases.Case(length=17, varying_B=varying, varying_C=varying))
    problem = cases.cast(problem, dict.fromkeys(problem.arguments, dtype))
    (_, last_state), _ = check_form(scan, problem)
    assert last_state.dtype == jnp.float32


@every_form
def test_float16_beside_bfloat16(scan):
    problem = cases.make_problem(cases.Case(length=17))
    problem = cases.cast(problem, {"u": "float16", "delta": "bfloat16", "z": "bfloat16"})
    check_form(scan, problem)


@every_form
@pytest.mark.parametrize("wide", ["u delta A B C D z delta_bias initial_state", "delta", "C", "initial_state"])
def test_float64(scan, wide):
    """Under x64 one float64 input makes the state and all the arithmetic float64."""
    wide = wide.split()
    problem = cases.make_problem(cases.Case(length=70, segment_ids=True))
    problem = cases.cast(problem, dict.fromkeys(wide, "float64"))
    problem = dataclasses.replace(problem, dlast=problem.dlast.astype("float64"))
    with jax.enable_x64(True):
        (_, last_state), _ = check_form(scan, problem)
        assert last_state.dtype == jnp.float64


@every_xla_form
def test_complex128(scan):
    case = cases.Case(length=70, dtype="complex64", segment_ids=True)
    problem = cases.make_problem(case)
    dtypes = {name: "complex128" if np.iscomplexobj(v) else "float64" for name, v in problem.arguments.items()}
    problem = dataclasses.replace(cases.cast(problem, dtypes), dlast=problem.dlast.astype("complex128"))
    with jax.enable_x64(True):
        check_form(scan, problem)


@every_xla_form
@pytest.mark.parametrize("real", ["B", "C initial_state"])
def test_complex_A_with_real_matrices(scan, real):
    """A real argument beside a complex A has a real gradient."""
    problem = cases.make_problem(cases.Case(length=20, dtype="complex64"))
    problem = problem.replace(**{name: np.real(problem.arguments[name]) for name in real.split()})
    check_form(scan, problem)


@every_form
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    "empty", [("batch",), ("length",), ("dim",), ("state",), ("batch", "length"), ("dim", "state")], ids="-".join
)
def test_empty_sizes(scan, empty, grouped):
    case = cases.Case(**({"length": 5} | dict.fromkeys(empty, 0)), grouped=grouped, segment_ids=True)
    problem = cases.make_problem(case)
    (_, last_state), _ = check_form(scan, problem, cases.expected(case))
    if "length" in empty:
        np.testing.assert_array_equal(last_state, problem.arguments["initial_state"])


@every_form
@pytest.mark.parametrize("empty", ["dim", "state"])
def test_empty_constant_matrices(scan, empty):
    case = cases.Case(**({"length": 5} | {empty: 0}), varying_B=False, varying_C=False)
    problem = cases.make_problem(case)
    check_form(scan, problem, cases.expected(case))


@every_form
@pytest.mark.parametrize("varying", [True, False])
def test_narrow_gradients_are_rounded_once(scan, varying):
    """Sums over channels, chunks and rows are taken in float32: half a unit of bfloat16 is 2^-8."""
    problem = cases.make_problem(cases.Case(length=150, dim=390, state=3, varying_B=varying, varying_C=varying))
    problem = cases.cast(problem, dict.fromkeys(problem.arguments, "bfloat16"))
    (y, _), gradients = cases.run(problem, scan, optimise=False)
    (y_want, _), gradients_want = cases.oracle_of(problem)
    for name, want in ({"y": y_want} | gradients_want).items():
        scale = float(np.sqrt(np.mean(want**2)))
        cases.assert_close(name, ({"y": y} | gradients)[name], want, (1.02 * 2**-8, 1e-4 * scale))


@every_form
def test_last_state_alone_is_a_loss(scan):
    """state-spaces/mamba 258, 285, 233: the gradient of the last state reaches u, delta, A and B."""
    problem = cases.make_problem(cases.Case(length=20))
    problem = dataclasses.replace(problem, dy=np.zeros_like(problem.dy))
    _, gradients = check_form(scan, problem)
    assert all(np.any(gradients[name]) for name in ("u", "delta", "A", "B", "delta_bias", "initial_state"))
    assert not any(np.any(gradients[name]) for name in ("C", "D", "z"))


@every_form
def test_defaults_are_zeros(scan):
    """Leaving an argument out is giving its default: zeros, or one document whatever its id."""
    problem = cases.make_problem(cases.Case(length=20, skip=False, gate=False, delta_bias=False, initial_state=False))
    filled = cases.with_neutral_values(problem, cases.Case(length=20))
    filled = dataclasses.replace(filled, options=filled.options | {"segment_ids": np.full((2, 20), -7)})
    plain_results, plain_gradients = cases.run(problem, scan, optimise=False)
    results, gradients = cases.run(filled, scan, optimise=False)
    plain = (plain_results, plain_gradients)
    same = (results, {name: gradients[name] for name in plain_gradients})
    for got, want in zip(jax.tree.leaves(same), jax.tree.leaves(plain)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)  # another program may round in another order


def test_auto_is_sequential_on_a_cpu():
    problem = cases.make_problem(cases.Case(length=70))
    with jax.default_device(jax.devices("cpu")[0]):
        auto, sequential = (jax.tree.leaves(cases.run(problem, scan)) for scan in ("auto", "sequential"))
    for got, want in zip(auto, sequential):
        np.testing.assert_array_equal(got, want)


@every_form
def test_default_call_returns_only_y(scan):
    problem = cases.make_problem(cases.Case(length=5))
    y = selective_scan(**problem.arguments, **problem.options, scan=scan)
    (y_want, _), _ = cases.oracle_of(problem)
    cases.assert_close("y", y, y_want, cases.TOLERANCES["float32"])
