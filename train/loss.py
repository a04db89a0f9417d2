"""What a run is scored by: cross-entropy, in bits per byte, beside a bigram model's; and the share of right answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from train.data import Batch

# Added to every count of the bigram model. On the standard library's source 1, 0.1 and 0.01 score within 0.015 bits of
# one another.
_PSEUDO_COUNT = 0.1
NOT_ASKED = -1
"""The target where the model may say what it likes."""

LOGITS_BYTES = 2**27
"""Float32 logits of a chunk on one device; their gradient takes as much again. 667 tokens of a vocabulary of 50,277."""


def cross_entropy(logits: jax.Array, targets: ArrayLike) -> jax.Array:
    """Mean of -log p(target) in nats, over the places that have a target, computed in float32.

    Args:
        logits: (b, l, vocab), any floating dtype.
        targets: (b, l) int, or `NOT_ASKED`.
    """
    targets = jnp.asarray(targets)
    return jnp.mean(_nats(logits, targets), where=targets != NOT_ASKED)


def accuracy(logits: jax.Array, targets: ArrayLike) -> jax.Array:
    """Share of the places with a target at which it is the likeliest token; arguments as `cross_entropy`'s."""
    targets = jnp.asarray(targets)
    return jnp.mean(jnp.argmax(logits, axis=-1) == targets, where=targets != NOT_ASKED)


def chunked_cross_entropy(
    head: Callable[[jax.Array], jax.Array], hidden: jax.Array, targets: ArrayLike, *, chunks: int, parts: int = 1
) -> jax.Array:
    """`cross_entropy(head(hidden), targets)` without ever holding all logits: (b, l / chunks, vocab) at a time.

    The backward pass computes a chunk's logits again, for a third more arithmetic in the head.

    Args:
        head: (..., d_model) -> (..., vocab) logits.
        hidden: (b, l, d_model).
        targets: (b, l) int, or `NOT_ASKED`.
        chunks: how many, one after the other; with 1 the logits are kept, and nothing is computed twice.
        parts: over how many devices the length is split; each chunk holds as much of every part.
    """
    targets = jnp.asarray(targets)
    if chunks == 1:
        return cross_entropy(head(hidden), targets)
    b, l = targets.shape
    size = -(-l // (parts * chunks))

    def cut(x: jax.Array, padding: int) -> jax.Array:
        """(b, l, ...) -> (chunks, b, parts, size, ...), with `padding` behind each part."""
        x = x.reshape(b, parts, l // parts, *x.shape[2:])
        widths = [(0, 0), (0, 0), (0, chunks * size - l // parts), *[(0, 0)] * (x.ndim - 3)]
        x = jnp.pad(x, widths, constant_values=padding)
        return jnp.moveaxis(x.reshape(b, parts, chunks, size, *x.shape[3:]), 2, 0)

    @jax.checkpoint
    def add_chunk(total: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        hidden, targets = chunk
        return total + jnp.sum(_nats(head(hidden), targets), where=targets != NOT_ASKED), None

    total, _ = lax.scan(add_chunk, jnp.zeros((), jnp.float32), (cut(hidden, 0), cut(targets, NOT_ASKED)))
    return total / jnp.sum(targets != NOT_ASKED)


def chunks_for(batch_size: int, seq_len: int, vocab_size: int, *, devices: int = 1) -> int:
    """How many chunks of a batch's logits keep a device's share of each within `LOGITS_BYTES`.

    Args:
        batch_size, seq_len, vocab_size: of the whole batch's logits.
        devices: over how many devices rows and length are split.
    """
    return min(seq_len, math.ceil(4 * batch_size * seq_len * vocab_size / (devices * LOGITS_BYTES)))


def _nats(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """-log p(target) of each token, float32; of any token where none is asked for."""
    logits = logits.astype(jnp.float32)
    asked = jnp.where(targets == NOT_ASKED, 0, targets)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, asked[..., None], axis=-1)[..., 0]


def bits_per_byte(nats: float, bytes_per_token: float = 1.0) -> float:
    """Nats a token to bits a byte; to bits a token with the default."""
    return nats / math.log(2) / bytes_per_token


def bigram_bits_per_byte(text: np.ndarray, batches: Iterable[Batch]) -> float:
    """The score of p(next byte | this byte), counted on `text`, at the very places where the model is scored.

    Args:
        text: (bytes,) uint8, the training text.
        batches: the validation batches.
    """
    pairs = text[:-1].astype(np.int64) * 256 + text[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + _PSEUDO_COUNT
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    return float(np.mean([bits[batch.tokens, batch.targets].mean() for batch in batches]))
