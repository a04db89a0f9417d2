"""The streaming state of the language model: any split, any padding, and the state as a value of its own."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import CONFIGS, SMALL, assert_states_close, forward, language_model, random_tokens

BATCH, LENGTH = 3, 9
BIASES = CONFIGS["biases, untied"]


@pytest.fixture(params=CONFIGS, ids=lambda name: name.replace(" ", "-"))
def lm(request):
    return language_model(CONFIGS[request.param])


CUTS = st.lists(st.integers(0, LENGTH), max_size=4).map(lambda cuts: [0, *sorted(cuts), LENGTH])
MASKS = st.lists(
    st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH), min_size=BATCH, max_size=BATCH
).map(np.array)  # fmt: skip


def in_pieces(lm, tokens, cuts, mask=None):
    """Logits and last state of a sequence that is cut; a cut that occurs twice makes a piece of no tokens."""
    state, logits = lm.init_state(len(tokens)), []
    for start, end in itertools.pairwise(cuts):
        piece = None if mask is None else mask[:, start:end]
        new, state = forward(lm, tokens[:, start:end], state, piece)
        logits.append(new)
    return jnp.concatenate(logits, axis=1), state


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cuts=CUTS)
def test_any_split(cuts):
    lm, tokens = language_model(BIASES), random_tokens(BATCH, LENGTH)
    expected, last = forward(lm, tokens)
    got, state = in_pieces(lm, tokens, cuts)
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)
    assert_states_close(state, last)


def test_token_by_token(lm):
    """state-spaces/mamba 500, 187: the cached logits are those of the full pass, from the first token on."""
    tokens = random_tokens(BATCH, LENGTH)
    expected, last = forward(lm, tokens)
    got, state = in_pieces(lm, tokens, range(LENGTH + 1))
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)
    assert_states_close(state, last)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(mask=MASKS, cuts=CUTS, seed=st.integers(0, 100))
def test_any_padding_in_any_split(mask, cuts, seed):
    """transformers 31540, state-spaces/mamba 66: each row is as if it were alone, whatever stands in the padding."""
    lm, tokens = language_model(BIASES), random_tokens(BATCH, LENGTH)
    got, state = in_pieces(lm, tokens, cuts, mask)
    for row in range(BATCH):
        own = tokens[row : row + 1, mask[row]]
        if own.size == 0:
            assert_states_close(state.take([row]), lm.init_state(1), atol=0)
            continue
        # Padded once more, but only behind: one program for all lengths.
        aligned = np.zeros((1, LENGTH), np.int32)
        aligned[:, : own.size] = own
        expected, _ = forward(lm, aligned)
        _, last = forward(lm, aligned, None, np.arange(LENGTH)[None] < own.size)
        np.testing.assert_allclose(got[row, mask[row]], expected[0, : own.size], atol=1e-5, rtol=1e-5)
        assert_states_close(state.take([row]), last)
    other = np.where(mask, tokens, random_tokens(BATCH, LENGTH, seed=seed + 1))
    again, state_again = in_pieces(lm, other, cuts, mask)
    np.testing.assert_array_equal(got, again)
    jax.tree.map(np.testing.assert_array_equal, state, state_again)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_unpadded_ones(lm, side):
    """On one side, as tokenizers pad; against calls without any mask, and for what follows."""
    lengths = (LENGTH, 5, 1)
    positions = np.arange(LENGTH)[None]
    mask = np.stack([positions[0] < n if side == "right" else positions[0] >= LENGTH - n for n in lengths])
    tokens, more = random_tokens(BATCH, LENGTH), random_tokens(BATCH, 3, seed=1)
    got, state = forward(lm, tokens, None, mask)
    got_more, _ = forward(lm, more, state)
    for row in range(BATCH):
        expected, last = forward(lm, tokens[row : row + 1, mask[row]])
        np.testing.assert_allclose(got[row, mask[row]], expected[0], atol=1e-5, rtol=1e-5)
        assert_states_close(state.take([row]), last)
        np.testing.assert_allclose(got_more[row], forward(lm, more[row : row + 1], last)[0][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("token", [-1, 36, 10**6])
def test_tokens_at_padding_may_be_anything(token):
    lm, tokens = language_model(BIASES), random_tokens(BATCH, LENGTH)
    mask = np.arange(LENGTH) >= np.array([0, 4, 8])[:, None]
    expected = forward(lm, np.where(mask, tokens, 0), None, mask)
    got = forward(lm, np.where(mask, tokens, token), None, mask)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_the_callers_state_can_be_used_again(lm):
    tokens = random_tokens(BATCH, LENGTH)
    _, state = forward(lm, tokens)
    before = jax.tree.map(np.array, state)
    first, _ = forward(lm, tokens[:, :4], state)
    jax.tree.map(np.testing.assert_array_equal, state, before)
    second, _ = forward(lm, tokens[:, :4], state)
    np.testing.assert_array_equal(first, second)


def test_the_state_is_one_pytree():
    """Rows are taken, repeated, reordered and put together, and the arrays are saved and read back."""
    lm, tokens = language_model(), random_tokens(BATCH, LENGTH)
    more = random_tokens(BATCH, 4, seed=1)
    _, state = forward(lm, tokens)
    expected, _ = forward(lm, more, state)

    rows = np.array([2, 0, 2])
    reordered, _ = forward(lm, more[rows], state.take(rows))
    np.testing.assert_allclose(reordered, expected[rows], atol=1e-5)

    alone = [forward(lm, tokens[i : i + 1])[1] for i in range(BATCH)]
    together = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *alone)  # layers stand in front
    np.testing.assert_allclose(forward(lm, more, together)[0], expected, atol=1e-5)

    leaves, structure = jax.tree.flatten(state)
    read_back = jax.tree.unflatten(structure, [np.asarray(leaf).copy() for leaf in leaves])
    np.testing.assert_array_equal(forward(lm, more, read_back)[0], expected)


def test_states_are_float32_under_bfloat16():
    """state-spaces/mamba 6, vllm 13466: what is carried along does not drift with the activations' dtype."""
    lm, tokens = language_model(SMALL.replace(dtype="bfloat16")), random_tokens(BATCH, LENGTH)
    logits, state = forward(lm, tokens)
    assert (state.ssm.dtype, state.conv.dtype, logits.dtype) == (jnp.float32,) * 3
    _, after = forward(lm, tokens[:, :1], state)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), after) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), lm.init_state(BATCH)
    )
    _, in_parts = in_pieces(lm, tokens, [0, 1, 5, LENGTH])
    np.testing.assert_allclose(in_parts.ssm, state.ssm, atol=0.05 * np.abs(state.ssm).max())


def test_a_state_of_other_sizes_is_refused():
    lm, tokens = language_model(), random_tokens(BATCH, LENGTH)
    with pytest.raises(ValueError, match=r"`state.conv` must have shape \(3, 3, 40\), got \(2, 3, 40\)"):
        lm(tokens, state=lm.init_state(2))
    with pytest.raises(ValueError, match="`state` must be of 2 layers"):
        lm(tokens, state=language_model(SMALL.replace(n_layer=1)).init_state(BATCH))
