"""The frozen record that every form of the scan takes: canonical arguments, nothing left to default or to check.

Axis legend, used everywhere: b batch, l length, d channels, n state, g groups of channels, r channels in a group,
w width of the convolution.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScanInputs:
    """Canonical arguments of the selective scan.

    "Wide" is the dtype of the arithmetic: float32, or float64 if any real input is float64.
    `A`, and with it `initial_state`, may be complex of that width; `B` and `C` may be too.
    A `B` or `C` that is constant over time has shape (1, 1, d, n): batch and length 1, and a group for each channel.
    One that varies has shape (b, l, g, n); if both vary they have the same g.
    """

    u: jax.Array  # (b, l, d), its own dtype; y is returned in it
    delta: jax.Array  # (b, l, d), its own dtype
    A: jax.Array  # (d, n), wide
    B: jax.Array  # (b, l, g, n) or (1, 1, d, n), its own dtype
    C: jax.Array  # (b, l, g, n) or (1, 1, d, n), its own dtype
    D: jax.Array  # (d,), wide; zeros if there is no skip
    z: jax.Array | None  # (b, l, d), its own dtype; None if there is no gate
    delta_bias: jax.Array  # (d,), wide; zeros if there is none
    initial_state: jax.Array  # (b, d, n), wide; zeros if there is none
    reset: jax.Array | None  # (b, l) bool, True where a document begins; None if there are no documents
    delta_softplus: bool = dataclasses.field(metadata={"static": True})

    def is_constant(self, m: jax.Array) -> bool:
        """Whether `m`, a B or a C, is constant over time (at b = l = 1 with a group a channel it is all the same)."""
        return m.shape[:3] == (1, 1, self.u.shape[2])

    @property
    def groups(self) -> int:
        """Groups of channels that share the B and the C of a time step: 1 if both are constant."""
        return max(m.shape[2] if not self.is_constant(m) else 1 for m in (self.B, self.C))


def wide_dtype(*arrays: jax.Array | None) -> jnp.dtype:
    """The real dtype of the arithmetic: float64 if any input is, else float32."""
    return jnp.finfo(jnp.result_type(jnp.float32, *(v.dtype for v in arrays if v is not None))).dtype
