"""Every scan form under JAX's transformations, and what the compiler makes of it: program size and temporary memory."""

import time

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax import selective_scan
from mamba_jax.reference.plain_scan import plain_scan

every_form = pytest.mark.parametrize("scan", cases.FORMS)
every_xla_form = pytest.mark.parametrize("scan", cases.XLA_FORMS)
TINY = cases.Case(length=5, batch=1, dim=2, state=2, groups=1, segment_ids=True)


def call(problem, scan):
    """The form as a function of its differentiable arguments."""
    return lambda arguments: selective_scan(**arguments, **problem.options, return_last_state=True, scan=scan)


def loss_of(problem, scan):
    def loss(arguments):
        y, last_state = call(problem, scan)(arguments)
        return jnp.sum(y * problem.dy) + jnp.sum(last_state * problem.dlast) + jnp.sum(y**2)

    return loss


def assert_trees_close(got, want, rtol=1e-4, atol=1e-4):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), got, want)


@every_form
def test_jit_changes_nothing(scan):
    problem = cases.make_problem(cases.Case(length=20))
    assert_trees_close(
        call(problem, scan)(problem.arguments), jax.jit(call(problem, scan))(problem.arguments), atol=1e-6
    )


@every_form
@pytest.mark.parametrize("shared", [(), ("A", "D", "delta_bias"), ("u", "delta")], ids="-".join)
def test_vmap_equals_one_by_one(scan, shared):
    """Values and gradients, with some arguments common to all."""
    problem = cases.make_problem(cases.Case(length=9, state=3))
    scales = np.float32([1, 0.5, 0.25])
    axes = {name: None if name in shared else 0 for name in problem.arguments}
    each = [{k: v if k in shared else v * scale for k, v in problem.arguments.items()} for scale in scales]
    stacked = {k: v if k in shared else np.stack([a[k] for a in each]) for k, v in problem.arguments.items()}
    function = jax.value_and_grad(loss_of(problem, scan))
    got = jax.jit(jax.vmap(function, in_axes=(axes,)))(stacked)
    want = jax.tree.map(lambda *values: np.stack(values), *map(jax.jit(function), each))
    assert_trees_close(got, want)


@every_form
def test_remat_changes_no_gradient(scan):
    problem = cases.make_problem(cases.Case(length=20))
    loss = loss_of(problem, scan)
    remat, plain = (jax.jit(jax.grad(function))(problem.arguments) for function in (jax.checkpoint(loss), loss))
    assert_trees_close(remat, plain)


@every_xla_form
def test_forward_mode_is_the_transpose_of_reverse_mode(scan):
    """<cotangent, J tangent> = <J^T cotangent, tangent>."""
    problem = cases.make_problem(cases.Case(length=40, segment_ids=True))
    tangent = {name: np.flip(value) for name, value in problem.arguments.items()}
    function = call(problem, scan)
    _, (dy, dlast) = jax.jit(lambda a, t: jax.jvp(function, (a,), (t,)))(problem.arguments, tangent)
    _, gradients = cases.run(problem, scan)
    forward = np.vdot(problem.dy, dy) + np.vdot(problem.dlast, dlast)
    reverse = sum(np.vdot(gradients[name], tangent[name]) for name in tangent)
    np.testing.assert_allclose(forward, reverse, rtol=1e-4, atol=1e-3)


@every_xla_form
def test_hessian(scan):
    """Second derivatives, against those of the plain scan."""
    problem = cases.make_problem(TINY)

    def plain_loss(arguments):
        y, last_state = plain_scan(**arguments, **problem.options, return_last_state=True)
        return jnp.sum(y * problem.dy) + jnp.sum(last_state * problem.dlast) + jnp.sum(y**2)

    got = jax.jit(jax.hessian(loss_of(problem, scan)))(problem.arguments)
    assert_trees_close(got, jax.jit(jax.hessian(plain_loss))(problem.arguments))


@pytest.mark.parametrize("second", [jax.jacrev, jax.jacfwd])
def test_second_derivative_of_pallas_is_one_clear_error(second):
    """jax 16049: the message names the forms to use."""
    problem = cases.make_problem(TINY)
    with pytest.raises(NotImplementedError, match=r"sequential.*associative"):
        jax.jit(second(jax.grad(loss_of(problem, "pallas"))))(problem.arguments)


def test_forward_mode_of_pallas_is_jax_own_error():
    problem = cases.make_problem(TINY)
    function = call(problem, "pallas")
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(function, (problem.arguments,), (problem.arguments,))


def shapes(b, l, d, n):
    sequence, matrix = (b, l, d), (b, l, n)
    sizes = {"u": sequence, "delta": sequence, "A": (d, n), "B": matrix, "C": matrix, "D": (d,), "z": sequence}
    sizes |= {"delta_bias": (d,), "initial_state": (b, d, n)}
    return {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}


def compile_gradient(scan, b, l, d, n):
    """The compiled gradient of a loss on y and the last state, all options on, in every argument."""

    def loss(arguments):
        y, last_state = selective_scan(**arguments, delta_softplus=True, return_last_state=True, scan=scan)
        return jnp.sum(y**2) + jnp.sum(last_state**2)

    return jax.jit(jax.grad(loss)).lower(shapes(b, l, d, n)).compile()


@every_form
def test_program_does_not_grow_with_length(scan):
    """jax 5354, 14190: an associative_scan over the whole length compiles for tens of seconds at 262,144 steps."""
    lines, compile_s = {}, {}
    for l in (1024, 262_144):
        begun = time.perf_counter()
        lines[l] = compile_gradient(scan, 1, l, 4, 4).as_text().count("\n")
        compile_s[l] = time.perf_counter() - begun
    assert lines[262_144] <= 1.2 * lines[1024]
    assert compile_s[262_144] <= 3 * compile_s[1024] + 3, compile_s  # seconds of slack: other programs may be running


@every_form
def test_gradient_takes_at_most_100_mib_of_temporaries(scan):
    """transformers 30024, mamba.py 80: one (b, l, d, n) tensor alone is 192 MiB at this size."""
    memory = compile_gradient(scan, 2, 1024, 1536, 16).memory_analysis()
    temp_mib = memory.temp_size_in_bytes / 2**20
    assert temp_mib <= 100, f"{temp_mib:.0f} MiB"
