import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.state import MambaState, zero_state


def filled(batch):
    """A state whose every number says which batch row it is in."""
    state = zero_state(batch, 3, 2, 4, jnp.float32)
    row = jnp.arange(batch[-1])

    def fill(leaf):
        shape = (1,) * (len(batch) - 1) + (batch[-1],) + (1,) * (leaf.ndim - len(batch))
        return jnp.broadcast_to(row.reshape(shape), leaf.shape).astype(leaf.dtype)

    return jax.tree.map(fill, state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_zero_state_is_float32(dtype):
    state = zero_state((2,), 3, 5, 4, dtype)
    assert (state.conv.shape, state.ssm.shape) == ((2, 3, 3), (2, 3, 5))
    assert state.conv.dtype == state.ssm.dtype == jnp.float32
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("layers", [(), (5,)])
def test_take(layers):
    state = filled((*layers, 4))
    before = jax.tree.map(jnp.copy, state)
    taken = jax.jit(MambaState.take)(state, jnp.asarray([3, 0, 3]))
    assert (state.batch_size, taken.batch_size) == (4, 3)
    expected = filled((*layers, 4))
    for got, leaf, old in zip(jax.tree.leaves(taken), jax.tree.leaves(expected), jax.tree.leaves(before)):
        np.testing.assert_array_equal(got, np.take(leaf, [3, 0, 3], axis=len(layers)))
        np.testing.assert_array_equal(leaf, old)


def test_take_without_segments():
    whole = filled((4,))
    taken = MambaState(whole.conv, whole.ssm).take([1])
    assert taken.segment_id is None
    np.testing.assert_array_equal(taken.ssm, 1)


def test_segments_left_out_are_no_document():
    whole = zero_state((3, 2), 3, 2, 4, jnp.float32)
    segment_id, has_segment = MambaState(whole.conv, whole.ssm).segments()
    assert segment_id.shape == has_segment.shape == (3, 2)
    assert not has_segment.any()


def test_is_a_pytree():
    state = zero_state((2,), 3, 5, 4, jnp.float32)
    doubled = jax.jit(jax.vmap(lambda s: jax.tree.map(lambda leaf: leaf + 1, s)))(MambaState(state.conv, state.ssm))
    assert isinstance(doubled, MambaState)
    assert doubled.ssm.shape == state.ssm.shape
