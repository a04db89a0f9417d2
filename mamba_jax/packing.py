"""Ragged rows and packed documents, brought into the one form that a block works on.

A row's padding may stand anywhere. Its tokens are moved to the front, in order, so that a causal operation over a row's
tokens never meets padding; what is behind them is set to zero, and is put back, as zeros, afterwards.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from mamba_jax.state import MambaState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """What a block must know of its rows beside the activations. Shapes: b batch, l length."""

    mask: jax.Array | None = None  # (b, l) bool, the caller's; None if every position is a token
    lengths: jax.Array | None = None  # (b,) int32, tokens of each row; None if all l
    document: jax.Array | None = None  # (b, l) int32 of the packed row, grows by one where a document begins
    afresh: jax.Array | None = None  # (b,) bool, rows that begin with another document than their state's
    segment_id: jax.Array | None = None  # (b,) int32, for the state after this piece; None if it stays
    has_segment: jax.Array | None = None  # (b,) bool, likewise

    def pack(self, x: jax.Array) -> jax.Array:
        """(b, l, ...) -> same: each row's tokens at the front, zeros (whatever stood in the padding) behind them."""
        if self.mask is None or self.lengths is None:
            return x
        order = jnp.argsort(~self.mask, axis=1, stable=True)
        return self.where_token(jnp.take_along_axis(x, _expand(order, x), axis=1), 0)

    def unpack(self, x: jax.Array) -> jax.Array:
        """(b, l, ...) -> same: `pack` undone, zeros at the padding."""
        if self.mask is None:
            return x
        position = jnp.maximum(jnp.cumsum(self.mask, axis=1) - 1, 0)
        return jnp.where(_expand(self.mask, x), jnp.take_along_axis(x, _expand(position, x), axis=1), 0)

    def where_token(self, x: jax.Array, otherwise: float) -> jax.Array:
        """(b, l, ...) of a packed row -> same, with `otherwise` behind the row's tokens."""
        if self.lengths is None:
            return x
        token = jnp.arange(x.shape[1]) < self.lengths[:, None]
        # `where`, not a product: a NaN in the padding must not come through.
        return jnp.where(_expand(token, x), x, jnp.asarray(otherwise, x.dtype))


def arrange(
    shape: tuple[int, ...],
    attention_mask: ArrayLike | None,
    segment_ids: ArrayLike | None,
    state: MambaState | None,
) -> Rows:
    """Read the caller's mask and segment ids.

    Args:
        shape: (b, l) of the tokens.
        attention_mask: (b, l), nonzero for tokens and 0 for padding; None for tokens only.
        segment_ids: (b, l) int, the document of each token; a new document begins wherever the id changes. Ids at
            padding are not read. None: the row goes on with the document it is in.
        state: of one layer, the one before these tokens; None for the beginning.

    Raises:
        ValueError: a shape or dtype is wrong.
    """
    mask = lengths = None
    if attention_mask is not None:
        mask = jnp.asarray(attention_mask) != 0
        _check_shape("attention_mask", mask, shape)
        lengths = jnp.sum(mask, axis=1, dtype=jnp.int32)
    rows = Rows(mask=mask, lengths=lengths)
    if segment_ids is None:
        return rows
    ids = jnp.asarray(segment_ids)
    _check_shape("segment_ids", ids, shape)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(f"`segment_ids` must be of an integer dtype, got {ids.dtype}")
    if shape[1] == 0:  # no token, hence no document
        return rows
    return _arrange_documents(rows, ids.astype(jnp.int32), state)


def _arrange_documents(rows: Rows, segment_ids: jax.Array, state: MambaState | None) -> Rows:
    """`rows` with its documents; l is at least 1."""
    ids = rows.pack(segment_ids)
    some = jnp.full(ids.shape[:1], True)
    last_id = ids[:, -1]
    if rows.lengths is not None:
        some = rows.lengths > 0
        last_id = jnp.take_along_axis(ids, jnp.maximum(rows.lengths - 1, 0)[:, None], axis=1)[:, 0]
        # Padding belongs to the last document, so that none begins there and resets the state.
        token = jnp.arange(ids.shape[1]) < rows.lengths[:, None]
        ids = jnp.where(token, ids, last_id[:, None])
    changes = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))
    document = jnp.cumsum(changes, axis=1, dtype=jnp.int32)
    if state is None:
        return dataclasses.replace(rows, document=document, segment_id=last_id, has_segment=some)
    previous_id, had_segment = state.segments()
    return dataclasses.replace(
        rows,
        document=document,
        afresh=some & had_segment & (ids[:, 0] != previous_id),
        segment_id=jnp.where(some, last_id, previous_id),
        has_segment=had_segment | some,
    )


def _check_shape(name: str, value: jax.Array, shape: tuple[int, ...]) -> None:
    if value.shape != shape:
        raise ValueError(f"`{name}` must have shape (batch, length) = {shape}, got {value.shape}")


def _expand(index: jax.Array, x: jax.Array) -> jax.Array:
    """(b, l) -> (b, l, 1, ...), with as many axes as x."""
    return index.reshape(index.shape + (1,) * (x.ndim - 2))
