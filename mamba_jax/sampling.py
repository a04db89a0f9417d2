"""From logits to tokens: repetition penalty, temperature, top-k, top-p, min-p; free functions of arrays.

A filter keeps every token from a threshold on, so that equal logits fare alike. The threshold is found by halving the
range of float32 in 32 counting passes, which on a CPU is many times faster than sorting a vocabulary of 50,000.

Shapes: b batch, v vocabulary. Logits are float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which methods choose a token, and how strongly. A None is a method that takes no part in the compiled program;
    the numbers are its inputs, so that changing one compiles nothing.
    """

    temperature: jax.Array | None  # () float32; None: greedy
    top_k: jax.Array | None  # () int32
    top_p: jax.Array | None  # () float32
    min_p: jax.Array | None  # () float32
    repetition_penalty: jax.Array | None  # () float32


def make_sampling(
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
) -> Sampling:
    """Check a user's numbers, as `generate` describes them, and leave out what changes nothing.

    Raises:
        ValueError: one is out of its range; the message names it.
    """
    _check("temperature", temperature, 0 <= temperature < math.inf, "0 (greedy) or more")
    _check("top_k", top_k, top_k is None or (top_k >= 1 and top_k == int(top_k)), "a whole number of at least 1")
    _check("top_p", top_p, top_p is None or 0 < top_p <= 1, "above 0 and at most 1")
    _check("min_p", min_p, min_p is None or 0 <= min_p <= 1, "from 0 to 1")
    _check("repetition_penalty", repetition_penalty, 0 < repetition_penalty < math.inf, "above 0")
    greedy = temperature == 0

    def unless(neutral: bool, value: float | None, dtype: type = np.float32) -> jax.Array | None:
        return None if neutral or value is None else jnp.asarray(value, dtype)

    if top_k is not None:
        top_k = min(top_k, np.iinfo(np.int32).max)

    return Sampling(
        temperature=unless(greedy, temperature),
        # No filter removes the best token, which is all that greedy choice looks at.
        top_k=unless(greedy, top_k, np.int32),
        top_p=unless(greedy or top_p == 1, top_p),
        min_p=unless(greedy or min_p == 0, min_p),
        repetition_penalty=unless(repetition_penalty == 1, repetition_penalty),
    )


def choose(logits: jax.Array, sampling: Sampling, key: jax.Array | None, seen: jax.Array | None) -> jax.Array:
    """The next token of each row: penalty, temperature, top-k, top-p and min-p in `transformers`' order, then a draw.

    Args:
        logits: (b, v) float32.
        sampling: the methods.
        key: of the draw; not used if greedy.
        seen: (b, v) bool, the tokens that a row has had; used by the penalty alone.

    Returns:
        (b,) int32.
    """
    if sampling.repetition_penalty is not None and seen is not None:
        logits = penalize_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.temperature is None or key is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # From the best logit down: a tiny temperature then gives -inf, and not inf - inf.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature
    for keep, value in ((keep_top_k, sampling.top_k), (keep_top_p, sampling.top_p), (keep_min_p, sampling.min_p)):
        if value is not None:
            logits = keep(logits, value)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def penalize_repetition(logits: jax.Array, seen: jax.Array, penalty: jax.Array) -> jax.Array:
    """Logits (b, v) with those of seen tokens (b, v) bool divided by the penalty if positive, else multiplied by it.

    Source: CTRL (arXiv 1909.05858, section 4.1), in the form of `transformers.RepetitionPenaltyLogitsProcessor`.
    """
    return jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)


def keep_top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """Logits (b, v) with all but the k largest at -inf; those equal to the k-th stay."""
    return _keep_from(logits, lambda kept: jnp.sum(kept, axis=-1) >= k)


def keep_top_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Logits (b, v) with all at -inf but the fewest, most probable ones that together have probability p or more.

    Source: nucleus sampling, arXiv 1904.09751, section 3.1.
    """
    probability = jax.nn.softmax(logits, axis=-1)
    # A sum of float32 may stay below a p of 1: what is asked for is then every token, which is where it ends.
    return _keep_from(logits, lambda kept: jnp.sum(jnp.where(kept, probability, 0), axis=-1) >= p)


def keep_min_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """Logits (b, v) with those less than p times as probable as the best at -inf (arXiv 2407.01082, section 3)."""
    return jnp.where(logits - jnp.max(logits, axis=-1, keepdims=True) >= jnp.log(p), logits, -jnp.inf)


def _keep_from(logits: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Logits (b, v) from the highest threshold on at which `enough`, of the mask of what is kept, says yes.

    `enough` maps (b, v) bool to (b,) bool, and never turns from yes to no as more is kept.
    """
    rank = _rank(logits)
    shape = (*logits.shape[:-1], 1)
    # All of `low` or more is enough (or everything there is); all of `high` or more is not.
    low, high = jnp.full(shape, jnp.iinfo(jnp.int32).min), jnp.full(shape, jnp.iinfo(jnp.int32).max)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # their mean without overflow
        yes = enough(rank >= middle)[..., None]
        return jnp.where(yes, middle, low), jnp.where(yes, high, middle)

    low, _ = lax.fori_loop(0, 32, halve, (low, high))
    return jnp.where(rank >= low, logits, -jnp.inf)


def _rank(x: jax.Array) -> jax.Array:
    """float32 -> int32 in the same order: the bits as they are, those of negative numbers turned round."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def _check(name: str, value: float | None, holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"`{name}` must be {wanted}, got {value!r}")
