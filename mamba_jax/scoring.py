"""How well a model predicts a text of any length: piece by piece in constant memory, the state carried along."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_jax.model import MambaLM
from mamba_jax.state import MambaState
from mamba_jax.text import Piece

PIECE = 512
"""Tokens that go through the model at once: at most as many rows of logits are in memory."""


@dataclasses.dataclass(frozen=True)
class Score:
    """How well a text was predicted, each token from all before it."""

    tokens: int  # that were predicted: all but the first
    n_bytes: int  # that these stand for
    nats: float  # sum of -ln p(token)

    @property
    def perplexity(self) -> float:
        """exp of the mean of -ln p(token)."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Sum of -log2 p(token) for each byte of text, which does not depend on the tokenizer."""
        return self.nats / math.log(2) / self.n_bytes


def score(lm: MambaLM, pieces: Iterable[Piece]) -> Score:
    """Predict each token of a text from all those before it.

    Args:
        lm: the model.
        pieces: the text's, as a tokenizer's `read` yields them; cut anywhere, that changes nothing.

    Raises:
        ValueError: fewer than two tokens, or one that is not in the model's vocabulary.
    """
    graphdef, params = nnx.split(lm)
    state = lm.init_state(1)
    waiting = np.zeros((0,), np.int32)
    nats, tokens, n_bytes = 0.0, 0, 0
    for piece in itertools.chain(pieces, [None]):  # None: the text ends
        if piece is not None:
            _check_tokens(piece.tokens, lm.config.vocab_size)
            waiting = np.concatenate([waiting, piece.tokens])
            n_bytes += piece.n_bytes
        # One token more than goes in, which the last of them predicts; it goes in with the next.
        while len(waiting) > PIECE or (piece is None and len(waiting) > 1):
            part, waiting = waiting[: PIECE + 1], waiting[PIECE:]
            length = len(part) - 1
            given, targets = (np.pad(row, (0, PIECE - length))[None] for row in (part[:-1], part[1:]))
            here, state = _predict(graphdef, params, given, targets, np.arange(PIECE)[None] < length, state)
            nats, tokens = nats + float(here), tokens + length
    if tokens == 0:
        raise ValueError("there is nothing to predict in a text of fewer than two tokens")
    return Score(tokens=tokens, n_bytes=n_bytes, nats=nats)


def _check_tokens(tokens: np.ndarray, vocab_size: int) -> None:
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ValueError(f"the text has tokens up to {tokens.max()}, the model's vocabulary ends at {vocab_size - 1}")


@functools.partial(jax.jit, static_argnames="graphdef")
def _predict(
    graphdef: nnx.GraphDef, params: Any, tokens: jax.Array, targets: jax.Array, mask: jax.Array, state: MambaState
) -> tuple[jax.Array, MambaState]:
    """Sum of -ln p(target) over the mask, and the state; tokens, targets, mask (1, l)."""
    lm = nnx.merge(graphdef, params)
    logits, state = lm(tokens, attention_mask=mask, state=state, return_state=True)
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(mask, log_p, 0)), state
