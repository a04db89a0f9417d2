"""The arguments of a scan as callers of this package have them, bundled."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.tiling import Sizes


class Arguments(NamedTuple):
    """Arrays of one scan, or their gradients. Where B or C is constant over time, its shape is (1, 1, d, n)."""

    u: jax.Array  # (b, l, d)
    delta: jax.Array  # (b, l, d)
    A: jax.Array  # (d, n), wide: float32 or float64
    B: jax.Array  # (b, l, g, n) or (1, 1, d, n)
    C: jax.Array  # (b, l, g, n) or (1, 1, d, n)
    D: jax.Array  # (d,), wide
    z: jax.Array | None  # (b, l, d)
    delta_bias: jax.Array  # (d,), wide
    initial_state: jax.Array  # (b, d, n), wide
    reset: jax.Array | None  # (b, l) bool

    @property
    def constant_B(self) -> bool:
        """Whether B is one matrix for all steps."""
        return self._constant(self.B)

    @property
    def constant_C(self) -> bool:
        """Whether C is one matrix for all steps."""
        return self._constant(self.C)

    @property
    def sizes(self) -> Sizes:
        """The sizes of the scan; one group if neither B nor C varies."""
        b, l, d = self.u.shape
        g = 1 if self.constant_B and self.constant_C else (self.C if self.constant_B else self.B).shape[2]
        return Sizes(b, l, d, self.A.shape[1], g)

    def _constant(self, projection: jax.Array) -> bool:
        # where b = l = 1 and g = d both readings are the same scan
        return projection.shape[:3] == (1, 1, self.u.shape[2])
