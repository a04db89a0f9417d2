"""What a Mamba remembers between two pieces of a sequence: one pytree."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MambaState:
    """State after a piece of each row's sequence; a language model's has its layers stacked in front of every array.

    A registered pytree: it passes through jit, vmap and scan, and can be saved, sliced and batched like any other.
    No function here changes a state that it is given. A constructed state may leave the last two fields out.

    Shapes: b batch, w width of the convolution, d inner channels, n state.
    """

    conv: jax.Array  # (b, w-1, d) float32 (float64 for float64 activations), the last inputs of the convolution
    ssm: jax.Array  # (b, d, n) of the same dtype, the state h of the scan
    segment_id: jax.Array | None = None  # (b,) int32, the document of the row's last token
    has_segment: jax.Array | None = None  # (b,) bool, False while no token of the row has come with a segment id

    @property
    def batch_size(self) -> int:
        """b."""
        return self.ssm.shape[-3]

    def take(self, rows: ArrayLike) -> MambaState:
        """The state of the given batch rows, in that order; a row may occur more than once.

        Args:
            rows: (k,) whole numbers in [0, b).

        Returns:
            A state with batch k, layers in front if they were.
        """
        rows = jnp.asarray(rows)
        # Every field has its batch axis where `ssm` has its third from the end.
        axis = self.ssm.ndim - 3
        return jax.tree.map(lambda leaf: jnp.take(leaf, rows, axis=axis), self)

    def segments(self) -> tuple[jax.Array, jax.Array]:
        """`segment_id` and `has_segment`, with what they stand for if they were left out: no document yet."""
        batch = self.ssm.shape[:-2]
        segment_id = jnp.zeros(batch, jnp.int32) if self.segment_id is None else self.segment_id
        has_segment = jnp.zeros(batch, bool) if self.has_segment is None else self.has_segment
        return segment_id, has_segment


def state_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Dtype of the states under activations of `dtype`: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def zero_state(batch: tuple[int, ...], d_inner: int, d_state: int, d_conv: int, dtype: DTypeLike) -> MambaState:
    """The state before the first token.

    Args:
        batch: (b,), or (layers, b).
        d_inner, d_state, d_conv: d, n, w.
        dtype: of the activations.
    """
    wide = state_dtype(dtype)
    return MambaState(
        conv=jnp.zeros((*batch, d_conv - 1, d_inner), wide),
        ssm=jnp.zeros((*batch, d_inner, d_state), wide),
        segment_id=jnp.zeros(batch, jnp.int32),
        has_segment=jnp.zeros(batch, bool),
    )
