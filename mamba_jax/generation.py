"""Text from a model: the prompt in pieces of a few sizes, then new tokens in compiled blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mamba_jax.decoding import BLOCK, SplitModel, decode_block, first_token, read_piece
from mamba_jax.decoding import split_model as split_model
from mamba_jax.model import MambaLM
from mamba_jax.sampling import Sampling, make_sampling
from mamba_jax.state import MambaState

LONGEST_PIECE = 512
"""Tokens of a prompt that go through the model at once, which bounds the memory. Products of so many rows keep the
cores busy: 512 tokens of mamba-130m take 0.83 s on 2 cores (AMD EPYC, 2026-12-02)."""
SHORTEST_PIECE = 16
"""Below this a piece takes hardly less time: the weights are read all the same."""


def generate(
    lm: MambaLM | SplitModel,
    prompt: ArrayLike,
    max_new_tokens: int = 64,
    *,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    key: jax.Array | None = None,
    attention_mask: ArrayLike | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> jax.Array:
    """Continue a batch of prompts.

    The order of the methods is `transformers`': repetition penalty, temperature, top-k, top-p, min-p.

    Args:
        lm: the model; or what `split_model` made of it, which saves doing that again in every call.
        prompt: (b, l) int, at least one token in each row. Prompts of different lengths share compiled programs.
        max_new_tokens: how many to add, 0 or more.
        temperature: the logits are divided by it; 0 is greedy.
        top_k: sample from the k most probable tokens.
        top_p: sample from the fewest tokens that together are at least this probable, in (0, 1].
        min_p: sample from tokens at least this times as probable as the best one, in [0, 1].
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that the row has had.
        key: `jax.random` key; the same key gives the same tokens. Not needed if greedy.
        attention_mask: (b, l), 1 for tokens and 0 for padding, anywhere; padding changes nothing.
        eos_token_id: one token, or several, after which a row has only that token again.

    Returns:
        (b, l + max_new_tokens) int32: the prompt as given, then its continuation.

    Raises:
        ValueError: an argument has a wrong shape or is out of its range; the message names it in backticks.
    """
    sampling = make_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    tokens = generate_stream(
        lm, prompt, max_new_tokens, sampling, key=key, attention_mask=attention_mask, eos_token_id=eos_token_id
    )
    parts = [np.asarray(prompt, np.int32), *tokens]
    # The stream ends once every row has stopped; from there on each repeats its last token.
    missing = max_new_tokens - sum(part.shape[1] for part in parts[1:])
    parts.append(np.repeat(parts[-1][:, -1:], missing, axis=1))
    return jnp.asarray(np.concatenate(parts, axis=1))


def generate_stream(
    lm: MambaLM | SplitModel,
    prompt: ArrayLike,
    max_new_tokens: int,
    sampling: Sampling,
    *,
    key: jax.Array | None = None,
    attention_mask: ArrayLike | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> Iterator[np.ndarray]:
    """The continuation alone, as it comes.

    Args:
        sampling: what `make_sampling` made of the numbers that `generate` takes.
        lm, prompt, max_new_tokens, key, attention_mask, eos_token_id: as in `generate`.

    Returns:
        An iterator over (b, 1) int32, then (b, k) with k up to `BLOCK`, until all rows have stopped.

    Raises:
        ValueError: as `generate`, before this returns.
    """
    if max_new_tokens < 0:
        raise ValueError(f"`max_new_tokens` must be 0 or more, got {max_new_tokens}")
    if sampling.temperature is None:
        key = None
    elif key is None:
        raise ValueError("`key` must be a jax.random key unless `temperature` is 0")
    tokens, mask = _pack(prompt, attention_mask, lm)
    stop = stop_tokens(eos_token_id)
    model = lm if isinstance(lm, SplitModel) else split_model(lm)
    return _stream(model, tokens, mask, max_new_tokens, sampling, key, stop)


def warm_up(model: SplitModel, batch: int, length: int, sampling: Sampling, key: jax.Array | None = None) -> None:
    """Compile what `generate_stream` runs for a prompt of this batch and length, with one stop token or none."""
    if sampling.temperature is None:
        key = None
    state, hidden, seen = _start(model, np.zeros((batch, 0), np.int32), np.zeros((batch, 0), bool), sampling)
    for size in {size for _, _, size in pieces(length)}:
        # All padding: whatever it is, the state stays as it was.
        state, hidden = read_piece(
            model, np.zeros((batch, size), np.int32), np.zeros((batch, size), bool), state, hidden
        )
    progress = first_token(model, hidden, state, seen, sampling, key)
    jax.block_until_ready(decode_block(model, progress, sampling, key, np.int32(1), np.int32(0), stop_tokens(None)))


def stop_tokens(eos_token_id: int | Sequence[int] | None) -> np.ndarray:
    """(k,) int32, k at least 1: none at all is a token that never occurs, so that the same program serves."""
    tokens = np.atleast_1d(np.asarray([] if eos_token_id is None else eos_token_id, np.int32))
    return tokens if tokens.size else np.full((1,), -1, np.int32)


def pieces(length: int) -> list[tuple[int, int, int]]:
    """How a prompt is cut: (start, end, size) of each piece, the size being the end - start tokens and their padding.

    Sizes are powers of 2 from `SHORTEST_PIECE` to `LONGEST_PIECE`, so that a few programs serve every length. Pieces
    that would be a quarter padding or more are cut in two.
    """
    cut, start = [], 0
    while start < length:
        rest = length - start
        size = SHORTEST_PIECE
        while size < min(rest, LONGEST_PIECE):
            size *= 2
        if rest <= size * 3 // 4 and size > SHORTEST_PIECE:
            size //= 2
        end = min(start + size, length)
        cut.append((start, end, size))
        start = end
    return cut


def _stream(
    model: SplitModel,
    tokens: np.ndarray,
    mask: np.ndarray,
    max_new_tokens: int,
    sampling: Sampling,
    key: jax.Array | None,
    stop: np.ndarray,
) -> Iterator[np.ndarray]:
    """`generate_stream` for checked arguments and packed rows."""
    if max_new_tokens == 0:
        return
    state, hidden, seen = _start(model, tokens, mask, sampling)
    for start, end, size in pieces(tokens.shape[1]):
        padding = ((0, 0), (0, size - (end - start)))
        piece, piece_mask = np.pad(tokens[:, start:end], padding), np.pad(mask[:, start:end], padding)
        state, hidden = read_piece(model, piece, piece_mask, state, hidden)
    progress = first_token(model, hidden, state, seen, sampling, key)
    del state
    yield np.asarray(progress.token)[:, None]
    for start in range(1, max_new_tokens, BLOCK):
        if np.isin(np.asarray(progress.token), stop).all():
            return
        count = min(BLOCK, max_new_tokens - start)
        progress, new = decode_block(model, progress, sampling, key, np.int32(start), np.int32(count), stop)
        yield np.asarray(new)[:, :count]


def _start(
    model: SplitModel, tokens: np.ndarray, mask: np.ndarray, sampling: Sampling
) -> tuple[MambaState, jax.Array, jax.Array | None]:
    """State, activations and seen tokens before the prompt is read."""
    lm = model.merged()
    batch = len(tokens)
    hidden = jnp.zeros((batch, lm.config.d_model), lm.config.dtype)
    if sampling.repetition_penalty is None:
        return lm.init_state(batch), hidden, None
    seen = np.zeros((batch, lm.config.vocab_size), bool)
    seen[np.nonzero(mask)[0], tokens[mask]] = True
    return lm.init_state(batch), hidden, jnp.asarray(seen)


def _pack(
    prompt: ArrayLike, attention_mask: ArrayLike | None, lm: MambaLM | SplitModel
) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and mask, checked, each row's tokens moved to the front, and no longer than the longest row."""
    vocab_size = (lm.merged() if isinstance(lm, SplitModel) else lm).config.vocab_size
    tokens = np.asarray(prompt)
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            f"`prompt` must be integers of shape (batch, length), got {tokens.dtype} of shape {tokens.shape}"
        )
    mask = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask) != 0
    if mask.shape != tokens.shape:
        raise ValueError(f"`attention_mask` must have the prompt's shape {tokens.shape}, got {mask.shape}")
    lengths = mask.sum(axis=1)
    if not lengths.all():
        row = int(np.argmin(lengths))
        raise ValueError(f"`prompt` must hold at least one token in each row; row {row} has none")
    if np.any(mask & ((tokens < 0) | (tokens >= vocab_size))):
        raise ValueError(
            f"`prompt` must hold tokens from 0 to {vocab_size - 1}, got {tokens[mask].min()} to {tokens[mask].max()}"
        )
    order = np.argsort(~mask, axis=1, kind="stable")[:, : max(lengths, default=0)]
    mask = np.take_along_axis(mask, order, axis=1)
    return np.where(mask, np.take_along_axis(tokens, order, axis=1), 0).astype(np.int32), mask
