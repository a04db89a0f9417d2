"""Generation against the plain way: the whole text through the model for each new token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from language_models import CONFIGS, SMALL, assert_states_close, forward, language_model, random_tokens

from mamba_jax import generation
from mamba_jax.decoding import BLOCK, decode_block, first_token, read_piece
from mamba_jax.generation import generate, generate_stream, pieces, split_model, stop_tokens
from mamba_jax.sampling import make_sampling

KEY = jax.random.key(0)
LONG = 40


def greedy_without_cache(lm, prompt, count):
    """(b, l + count), and for each new token how far its logit is above the next best."""
    tokens, margins = prompt, []
    for _ in range(count):
        padded = np.zeros((len(tokens), LONG), np.int32)
        padded[:, : tokens.shape[1]] = tokens
        logits = np.asarray(forward(lm, padded)[0])[:, tokens.shape[1] - 1]
        best = np.sort(logits, axis=1)
        margins.append(best[:, -1] - best[:, -2])
        tokens = np.concatenate([tokens, logits.argmax(axis=1)[:, None]], axis=1)
    return tokens, np.stack(margins, axis=1)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=[name.replace(" ", "-") for name in CONFIGS])
@pytest.mark.parametrize("length", [1, 3, 17])
def test_greedy_is_that_of_the_full_pass(config, length):
    lm, prompt, count = language_model(config), random_tokens(3, length), 2 * BLOCK + 3
    expected, margins = greedy_without_cache(lm, prompt, count)
    got = generate(lm, prompt, count, temperature=0)
    assert got.shape == expected.shape and got.dtype == jnp.int32
    for row in range(3):
        # Where two logits are as good as equal either may be taken, and the texts part.
        close = np.flatnonzero(margins[row] <= 1e-4)
        end = length + (close[0] if close.size else count)
        np.testing.assert_array_equal(got[row, :end], expected[row, :end])
    assert len(np.unique(got[:, length:])) > 3  # texts of one token would agree whatever happens


def test_states_and_logits_of_decoding_are_those_of_the_full_pass():
    lm, tokens = language_model(), random_tokens(2, 16)
    model, sampling = split_model(lm), make_sampling(0)
    mask = np.ones(tokens.shape, bool)
    state, hidden = read_piece(model, tokens, mask, lm.init_state(2), jnp.zeros((2, lm.config.d_model)))
    logits, expected = forward(lm, tokens)
    np.testing.assert_allclose(lm.head(hidden), logits[:, -1], atol=1e-5, rtol=1e-5)
    assert_states_close(state, expected)

    progress = first_token(model, hidden, state, None, sampling, None)
    text = [tokens, np.asarray(progress.token)[:, None]]
    for count in (BLOCK, 3):
        progress, new = decode_block(model, progress, sampling, None, np.int32(1), np.int32(count), stop_tokens(None))
        text.append(np.asarray(new)[:, :count])
    # The last token is not read yet.
    _, expected = forward(lm, np.concatenate(text, axis=1)[:, :-1])
    assert_states_close(jax.tree.map(lambda *leaves: jnp.stack(leaves), *progress.states), expected)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=3, max_size=3),
    before=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    filler=st.sampled_from([0, -7, 10**6]),
)
def test_unequal_prompts_are_continued_as_if_alone(lengths, before, filler):
    lm, width = language_model(CONFIGS["biases, untied"]), 26
    prompt, mask = np.full((3, width), filler), np.zeros((3, width), int)
    for row, (length, start) in enumerate(zip(lengths, before)):
        prompt[row, start : start + length] = random_tokens(1, length, seed=row)
        mask[row, start : start + length] = 1
    got = generate(split(lm), prompt, 9, temperature=0, attention_mask=mask)
    np.testing.assert_array_equal(got[:, :width], prompt)
    for row, length in enumerate(lengths):
        alone = generate(split(lm), random_tokens(1, length, seed=row), 9, temperature=0)
        np.testing.assert_array_equal(got[row, width:], alone[0, length:])


SPLIT = {}


def split(lm):
    return SPLIT.setdefault(id(lm), split_model(lm))


def test_few_programs_serve_all_lengths(monkeypatch):
    """flax 29410 (transformers): a compilation for each prompt length."""
    monkeypatch.setattr(generation, "LONGEST_PIECE", 32)
    lm = language_model(SMALL.replace(n_layer=1, d_state=3))
    model = split_model(lm)
    before = read_piece._cache_size(), decode_block._cache_size()
    for length in (*range(1, 20), 31, 32, 33, 47, 65, 100):
        generate(model, random_tokens(1, length), 2 + length % 11, temperature=0)
    assert read_piece._cache_size() - before[0] == 2
    assert decode_block._cache_size() - before[1] == 1


def test_long_prompts_in_pieces(monkeypatch):
    lm, prompt = language_model(), random_tokens(2, 39)
    expected = generate(lm, prompt, 6, temperature=0)
    monkeypatch.setattr(generation, "LONGEST_PIECE", 16)
    assert pieces(39) == [(0, 16, 16), (16, 32, 16), (32, 39, 16)]
    np.testing.assert_array_equal(generate(lm, prompt, 6, temperature=0), expected)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 24, 25, 300, 511, 512, 513, 5000])
def test_pieces_cover_the_prompt(length):
    cut = pieces(length)
    assert [start for start, _, _ in cut] == [0, *(end for _, end, _ in cut)][: len(cut)]
    assert (cut[-1][1] if cut else 0) == length
    for start, end, size in cut:
        assert size in (16, 32, 64, 128, 256, 512)
        assert size == 16 or 3 / 4 * size < end - start <= size


def test_padded_vocabulary_rows_are_never_sampled():
    config = SMALL.replace(pad_vocab_size_multiple=64)
    lm = nnx.clone(language_model(config))
    assert config.padded_vocab_size == 64
    rows = np.array(lm.embedding[...])
    # With their opposites among them, some are far better than any token whatever the activations.
    rows[37:50] = 100 * rows[:13]
    rows[50:63] = -100 * rows[:13]
    lm.embedding[...] = jnp.asarray(rows)
    for temperature in (0, 5.0):
        tokens = generate(lm, random_tokens(8, 4), 20, temperature=temperature, key=KEY)
        assert tokens.min() >= 0 and tokens.max() < 37


def test_after_a_stop_token_that_token_again():
    lm, prompt = language_model(), random_tokens(2, 5)
    free = np.asarray(generate(split(lm), prompt, 20, temperature=0))[:, 5:]
    stop = [int(free[0, 3]), int(free[1, 11])]
    got = np.asarray(generate(split(lm), prompt, 20, temperature=0, eos_token_id=stop))[:, 5:]
    ends = []
    for row in range(2):
        end = np.flatnonzero(np.isin(free[row], stop))[0]
        np.testing.assert_array_equal(got[row, : end + 1], free[row, : end + 1])
        assert (got[row, end:] == free[row, end]).all()
        ends.append(end)
    one = generate(split(lm), prompt, 20, temperature=0, eos_token_id=stop[0])
    np.testing.assert_array_equal(one, generate(split(lm), prompt, 20, temperature=0, eos_token_id=[stop[0]]))
    streamed = list(generate_stream(split(lm), prompt, 1000, make_sampling(0), eos_token_id=stop))
    assert sum(part.shape[1] for part in streamed) <= max(ends) + 1 + BLOCK  # and not a thousand


def test_seeds():
    lm, prompt = language_model(), random_tokens(2, 5)
    numbers = {"temperature": 1.5, "top_k": 30, "top_p": 0.99, "min_p": 0.001, "repetition_penalty": 1.1}
    text = generate(split(lm), prompt, 21, key=KEY, **numbers)
    np.testing.assert_array_equal(generate(split(lm), prompt, 21, key=KEY, **numbers), text)
    # How many are wanted, and hence how they fall into blocks, does not matter.
    np.testing.assert_array_equal(generate(split(lm), prompt, 6, key=KEY, **numbers), text[:, :11])
    assert not np.array_equal(generate(split(lm), prompt, 21, key=jax.random.key(1), **numbers), text)
    assert not np.array_equal(text[0, 5:], text[1, 5:])


def test_repetition_penalty_counts_prompt_and_text():
    """A penalty that nothing survives: no token comes twice while there are others with positive logits."""
    lm = language_model()
    prompt = np.array([[1, 2, 4, 6]])
    text = np.asarray(generate(split(lm), prompt, 20, temperature=0, repetition_penalty=1e30))[0].tolist()
    fresh = next((i for i in range(4, 24) if text[i] in text[:i]), 24) - 4
    assert fresh > 8, text

    # What stands in the padding is not in the text: here it is the token that comes next.
    padded, mask = [[1, 2, 4, 6, text[4], text[4]]], [[1, 1, 1, 1, 0, 0]]
    again = generate(split(lm), padded, 20, temperature=0, repetition_penalty=1e30, attention_mask=mask)
    assert again[0, 6:].tolist() == text[4:]


def test_zero_new_tokens():
    prompt = random_tokens(2, 5)
    np.testing.assert_array_equal(generate(language_model(), prompt, 0, temperature=0), prompt)


def test_stream_comes_in_blocks():
    lm, prompt = language_model(), random_tokens(2, 5)
    parts = list(generate_stream(split(lm), prompt, 2 + 2 * BLOCK, make_sampling(0)))
    assert [part.shape for part in parts] == [(2, 1), (2, BLOCK), (2, BLOCK), (2, 1)]
    whole = generate(split(lm), prompt, 2 + 2 * BLOCK, temperature=0)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole[:, 5:])


def test_bfloat16_keeps_float32_states():
    lm = language_model(SMALL.replace(dtype="bfloat16"))
    model = split_model(lm)
    state, hidden = read_piece(
        model, random_tokens(1, 16), np.ones((1, 16), bool), lm.init_state(1), jnp.zeros((1, 20), jnp.bfloat16)
    )
    progress = first_token(model, hidden, state, None, make_sampling(0), None)
    progress, _ = decode_block(model, progress, make_sampling(0), None, np.int32(1), np.int32(3), stop_tokens(None))
    assert hidden.dtype == jnp.bfloat16
    assert {leaf.dtype for s in progress.states for leaf in (s.conv, s.ssm)} == {jnp.dtype("float32")}


def test_weights_are_arguments_of_the_programs():
    lm = language_model()
    model, sampling = split_model(lm), make_sampling(0)
    state, hidden = lm.init_state(1), jnp.zeros((1, 20))
    tokens = np.zeros((1, 16), np.int32)
    progress = first_token(model, hidden, state, None, sampling, None)
    traced = (
        read_piece.trace(model, tokens, tokens > 0, state, hidden),
        decode_block.trace(model, progress, sampling, None, np.int32(1), np.int32(1), stop_tokens(None)),
    )
    for program in traced:
        assert all(np.size(constant) <= 16 for constant in program.jaxpr.consts)


def test_split_model_leaves_the_model_alone():
    lm = language_model()
    before = jax.tree.map(np.array, nnx.state(lm))
    generate(lm, random_tokens(1, 3), 3, temperature=0)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(lm), before)


PROMPT = np.ones((2, 3), np.int32)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"prompt": PROMPT[0]}, r"`prompt` must be integers of shape \(batch, length\), got int32 of shape \(3,\)"),
        ({"prompt": PROMPT * 1.0}, "`prompt` must be integers"),
        ({"prompt": PROMPT[:, :0]}, "`prompt` must hold at least one token in each row; row 0 has none"),
        ({"prompt": PROMPT * 37}, "`prompt` must hold tokens from 0 to 36, got 37 to 37"),
        ({"attention_mask": [[1, 1, 1], [0, 0, 0]]}, "row 1 has none"),
        ({"attention_mask": [[1, 1, 1]]}, r"`attention_mask` must have the prompt's shape \(2, 3\), got \(1, 3\)"),
        ({"max_new_tokens": -1}, "`max_new_tokens` must be 0 or more, got -1"),
        ({"temperature": 1.0}, "`key` must be a jax.random key unless `temperature` is 0"),
        ({"top_p": 3.0}, "`top_p`"),
    ],
)
def test_errors(arguments, message):
    arguments = {"prompt": PROMPT, "temperature": 0} | arguments
    with pytest.raises(ValueError, match=message):
        generate(language_model(), **arguments)
