"""train.guard: a bad step changes nothing but a count, and what is one follows from the state alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.guard import guarded

PARAMS = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2))}
GOOD = jax.tree.map(jnp.ones_like, PARAMS)
BAD = {"a": jnp.ones(3), "b": jnp.array([[1.0, jnp.nan], [1.0, 1.0]])}


def take(optimizer, losses, gradients=GOOD):
    """Parameters and state after a step for each loss."""

    @jax.jit
    def step(params, state, loss):
        updates, state = optimizer.update(gradients, state, params, loss=loss)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, optimizer.init(PARAMS)
    for loss in losses:
        params, state = step(params, state, jnp.float32(loss))
    return params, state


def assert_same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_good_steps_are_the_optimizers_own():
    adam = optax.adam(0.1)
    params, state = take(guarded(adam, 2.0), [3.0, 2.0, 1.0])
    # Two programs: how multiplications and additions are fused is up to the compiler.
    wanted = take(optax.with_extra_args_support(adam), [3.0, 2.0, 1.0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), (params, state.inner), wanted)
    assert (int(state.taken), int(state.skipped)) == (3, 0)


@pytest.mark.parametrize(("loss", "gradients"), [(np.nan, GOOD), (np.inf, GOOD), (1.0, BAD)])
def test_what_is_not_finite_is_left_out(loss, gradients):
    optimizer = guarded(optax.adam(0.1), None)
    before = optimizer.init(PARAMS)
    params, state = take(optimizer, [loss], gradients)
    assert_same(params, PARAMS)
    assert_same(state, before._replace(skipped=jnp.int32(1)))


def test_a_spike_is_left_out_once_the_mean_is_known():
    optimizer = guarded(optax.sgd(0.1), 2.0)
    assert int(take(optimizer, [1.0, 100.0])[1].skipped) == 0
    assert int(take(optimizer, [1.0] * 20 + [1.9])[1].skipped) == 0
    calm, after_spike = take(optimizer, [1.0] * 20), take(optimizer, [1.0] * 20 + [2.1, 50.0])
    assert int(after_spike[1].skipped) == 2
    assert_same(after_spike[0], calm[0])
    assert int(take(guarded(optax.sgd(0.1), None), [1.0] * 20 + [1e9])[1].skipped) == 0
