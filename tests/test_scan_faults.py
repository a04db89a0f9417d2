"""Faults reported in other implementations, each with the place of the report: every scan form is right about them.

The table used in several: exp(Delta A) = 0.5 and all else 1, so that y = 1, 1.5, 1.75, 1.875, 1.9375.
"""

import dataclasses
import itertools
import math

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax import selective_scan

every_form = pytest.mark.parametrize("scan", cases.FORMS)


def table(length):
    """Arguments of the table, b = d = n = 1."""
    ones = jnp.ones((1, length, 1))
    return {"u": ones, "delta": ones, "A": jnp.full((1, 1), -math.log(2)), "B": ones, "C": ones}


@every_form
def test_rows_beyond_the_end_do_not_decay_the_state(scan):
    """state-spaces/mamba 368: five steps fill no block, and softplus(0 + bias) of a row beyond them is not 0."""
    y, last_state = selective_scan(**table(5), return_last_state=True, scan=scan)
    np.testing.assert_allclose(y[0, :, 0], [1, 1.5, 1.75, 1.875, 1.9375], rtol=1e-6)
    np.testing.assert_allclose(last_state, [[[1.9375]]], rtol=1e-6)


@every_form
def test_gradients_of_a_ragged_length_with_a_large_bias(scan):
    """state-spaces/mamba 368, jax 22370: rows beyond the end reach neither dA, nor dD, nor the bias."""
    problem = cases.make_problem(cases.Case(length=5, dim=3, state=2, groups=1))
    problem = problem.replace(delta_bias=np.full(3, 3, "float32"))
    cases.check(problem, cases.run(problem, scan), cases.oracle_of(problem))


@every_form
def test_gradients_reach_the_initial_state(scan):
    """state-spaces/mamba 258, 285, 233: d last / d initial = 0.5^3, d sum(y) / d initial = 0.5 + 0.25 + 0.125."""

    def call(initial_state):
        return selective_scan(**table(3), initial_state=initial_state, return_last_state=True, scan=scan)

    zero = jnp.zeros((1, 1, 1))
    np.testing.assert_allclose(jax.grad(lambda h: call(h)[1].sum())(zero), [[[0.125]]], rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda h: call(h)[0].sum())(zero), [[[0.875]]], rtol=1e-6)


@every_form
def test_same_bits_every_run(scan):
    """state-spaces/mamba 493, 573, 137: sums in a fixed order, no atomics."""
    problem = cases.make_problem(cases.Case(length=200, dim=260, state=16))
    first = jax.tree.leaves(cases.run(problem, scan))
    for _ in range(3):
        for again, before in zip(jax.tree.leaves(cases.run(problem, scan)), first):
            assert np.asarray(again).tobytes() == np.asarray(before).tobytes()


@every_form
def test_memory_full_of_nan_does_not_show(scan):
    """jax 19399: what a kernel does not write holds whatever was there before."""
    problem = cases.make_problem(cases.Case(length=131, dim=131, state=5, groups=1))
    cases.run(problem, scan)
    sizes = [leaf.size for leaf in jax.tree.leaves(problem.arguments)]
    buffers = [jnp.full(size, jnp.nan, jnp.float32) for size in sizes for _ in range(3)]
    jax.block_until_ready(buffers)
    del buffers
    cases.check(problem, cases.run(problem, scan), cases.oracle_of(problem))


@every_form
def test_more_rows_than_a_grid_axis_holds(scan):
    """state-spaces/mamba 884, 1015; jax 18361: grid axes of a GPU end at 65535."""
    problem = cases.make_problem(cases.Case(length=2, batch=66_000, dim=1, state=1, groups=1))
    cases.check(problem, cases.run(problem, scan), cases.oracle_of(problem))


@every_form
def test_long_sequence(scan):
    """state-spaces/mamba 884: right, far beyond the lengths of the grid."""
    problem = cases.make_problem(cases.Case(length=70_001, batch=1, dim=1, state=2, groups=1, skip=False))
    got, want = cases.run(problem, scan), cases.oracle_of(problem)
    (y, last_state), gradients = got
    cases.assert_close("y", y, want[0][0], cases.TOLERANCES["float32"])
    cases.assert_close("last_state", last_state, want[0][1], cases.TOLERANCES["float32"])
    for name in ("u", "delta", "B", "C", "z", "initial_state"):
        cases.assert_close(name, gradients[name], want[1][name], cases.gradient_tolerance(name, problem))
    for name in ("A", "delta_bias"):  # sums of 70,001 terms
        np.testing.assert_allclose(gradients[name], want[1][name], rtol=1e-3, atol=1e-2)


@every_form
def test_strong_decay(scan):
    """No division by cumulative decay: exp(-1e3 Delta) underflows, and everything stays right."""
    problem = cases.make_problem(cases.Case(length=150))
    problem = problem.replace(A=np.full_like(problem.arguments["A"], -1e3))
    cases.check(problem, cases.run(problem, scan), cases.oracle_of(problem))


def test_cancelling_decay_is_not_divided_by():
    """Strong and weak decay in turn: a form that divides by running products loses the weak steps."""
    problem = cases.make_problem(cases.Case(length=150, delta_bias=False, delta_softplus=False))
    delta = problem.arguments["delta"] * np.where(np.arange(150) % 3 == 0, 1, 1e-4)[None, :, None].astype("float32")
    problem = problem.replace(delta=delta, A=problem.arguments["A"] * 500)
    for scan in cases.FORMS:
        cases.check(problem, cases.run(problem, scan), cases.oracle_of(problem))


@every_form
@pytest.mark.parametrize("where", ["left", "middle", "right"])
@pytest.mark.parametrize("dtype", cases.REAL_DTYPES)
def test_padding_leaves_the_state_alone(scan, where, dtype):
    """transformers 31540, state-spaces/mamba 66: delta = -1e4 under softplus makes Delta 0, whatever the bias.

    The padded call equals the call without the padded steps, and at these steps all gradients are exactly 0.
    """
    case = cases.Case(length=30, dtype=dtype)
    padding = {"left": slice(0, 11), "middle": slice(9, 20), "right": slice(19, 30)}[where]
    is_padding = np.zeros(30, bool)
    is_padding[padding] = True
    padded = cases.make_problem(case)
    padded.arguments["delta"][:, padding] = -1e4
    padded.dy[:, padding] = 0

    def without_padding(arguments):
        return {
            name: value[:, ~is_padding] if name in ("u", "delta", "B", "C", "z") else value
            for name, value in arguments.items()
        }

    short = dataclasses.replace(padded, arguments=without_padding(padded.arguments), dy=padded.dy[:, ~is_padding])
    (y, last_state), gradients = cases.run(padded, scan)
    for name in ("u", "delta", "B", "C", "z"):
        np.testing.assert_array_equal(np.asarray(gradients[name], "float32")[:, padding], 0, err_msg=name)
    cases.check(short, ((y[:, ~is_padding], last_state), without_padding(gradients)), cases.oracle_of(short))


@every_form
@pytest.mark.parametrize("delta_softplus", [False, True])
def test_nothing_but_padding_keeps_the_state_to_the_bit(scan, delta_softplus):
    case = cases.Case(length=30, delta_bias=delta_softplus, delta_softplus=delta_softplus)
    problem = cases.make_problem(case)
    padding = np.full_like(problem.arguments["delta"], -1e4 if delta_softplus else 0)
    got = cases.run(problem.replace(delta=padding), scan)
    np.testing.assert_array_equal(got[0][1], problem.arguments["initial_state"])
    cases.check(problem, got, cases.oracle_of(problem.replace(delta=padding)))


@every_form
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_documents_equal_separate_ones(scan, dtype):
    """state-spaces/mamba 180, 244: ids of any value, documents of one step, borders in and between chunks."""
    bounds = [0, 37, 64, 65, 66, 128, 131]
    ids = np.repeat([5, 0, -3, 5, 7, 0], np.diff(bounds))
    whole = cases.make_problem(cases.Case(length=131, batch=2, dtype=dtype))
    packed = dataclasses.replace(whole, options=whole.options | {"segment_ids": np.stack([ids, ids])})
    (y, last_state), gradients = cases.run(packed, scan)
    parts = []
    for start, stop in itertools.pairwise(bounds):
        arguments = {
            name: value[:, start:stop] if name in ("u", "delta", "B", "C", "z") else value
            for name, value in whole.arguments.items()
        }
        if start > 0:
            arguments["initial_state"] = np.zeros_like(arguments["initial_state"])
        dlast = whole.dlast if stop == 131 else np.zeros_like(whole.dlast)
        parts.append(cases.oracle_of(cases.Problem(arguments, whole.options, whole.dy[:, start:stop], dlast)))
    in_time = {name: np.concatenate([p[1][name] for p in parts], axis=1) for name in ("u", "delta", "B", "C", "z")}
    summed = {name: sum(p[1][name] for p in parts) for name in ("A", "D", "delta_bias")}
    results = np.concatenate([p[0][0] for p in parts], axis=1), parts[-1][0][1]
    want = in_time | summed | {"initial_state": parts[0][1]["initial_state"]}
    cases.check(packed, ((y, last_state), gradients), (results, want))


@every_form
def test_no_gradient_crosses_a_border_of_documents(scan):
    """state-spaces/mamba 180, 244: exactly zero, not just small."""
    problem = cases.make_problem(cases.Case(length=60))
    ids = np.repeat([[0], [1]], 30, axis=0).reshape(1, 60).repeat(2, axis=0)
    problem = dataclasses.replace(problem, options=problem.options | {"segment_ids": ids})
    problem.dy[:, :30] = 0
    _, gradients = cases.run(problem, scan)
    for name in ("u", "delta", "B", "C", "z"):
        np.testing.assert_array_equal(gradients[name][:, :30], 0, err_msg=name)
        assert np.all(np.any(np.asarray(gradients[name][:, 30:]) != 0, axis=(0, 2))), name
    np.testing.assert_array_equal(gradients["initial_state"], 0)
