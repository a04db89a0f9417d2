"""What the backward kernel derives from a tile's inputs before it looks at any state, and where in shared memory that
lies.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic import arithmetic, stages
from pallas_kernels.mosaic.launch import Refs, zero_row
from pallas_kernels.mosaic.operands import Operands

_REPLACES = {"dy": "dy", "gate": "z", "rate": "delta"}


@dataclasses.dataclass(frozen=True)
class Derived:
    """Which rows are derived, and which of them have tiles of their own: a float32 input is replaced in place by what
    is made of it.
    """

    tile: int
    own: tuple[str, ...]
    in_place: tuple[str, ...]
    ragged: bool  # the last tile reaches past the end

    @staticmethod
    def of(x: Operands, dy: jax.Array, tile: int) -> Derived:
        """For these inputs."""
        ragged = x.sizes.l % tile != 0
        sources = {"dy": dy, "gate": x.z, "rate": x.delta if x.softplus or ragged else None}
        wide = [name for name, source in sources.items() if source is not None and source.dtype == jnp.float32]
        narrow = [name for name, source in sources.items() if source is not None and source.dtype != jnp.float32]
        return Derived(tile, ("Delta", "Delta_u", *narrow), tuple(wide), ragged)

    @property
    def rows(self) -> int:
        """Of the scratch for derived rows."""
        return len(self.own) * self.tile


@dataclasses.dataclass(frozen=True)
class TileRows:
    """References to a tile's rows in shared memory, each (tile, 128)."""

    u: Any  # inputs, in their dtypes; replaced by du, ddelta, dz
    delta: Any
    z: Any
    raw_dy: Any
    Delta: Any  # float32
    Delta_u: Any  # Delta u
    dy: Any  # dy silu(z): the cotangent of y before the gate
    gate: Any  # dy silu'(z), or None without a gate
    rate: Any  # d Delta / d delta, or None if that is 1
    steps: Any  # steps from the tile's start to the end of the piece, or None if the tile is surely whole


def tile_rows(m: Refs, derived: Derived, slot: jax.Array, steps: jax.Array) -> TileRows:
    """The rows of the tile in a slot, which `steps` steps of the piece are left for."""

    def ring(name: str):
        return None if getattr(m, name + "_s") is None else getattr(m, name + "_s").at[slot]

    def find(name: str):
        if name in derived.own:
            first = derived.own.index(name) * derived.tile
            return m.rows_s.at[first : first + derived.tile]
        return ring(_REPLACES[name]) if name in derived.in_place else None

    return TileRows(
        ring("u"),
        ring("delta"),
        ring("z") if m.z is not None else None,
        ring("dy"),
        find("Delta"),
        find("Delta_u"),
        find("dy"),
        find("gate"),
        find("rate"),
        steps if derived.ragged else None,
    )


def prepare(rows: TileRows, x: Operands, fixed: stages.Parameters, t: jax.Array | int) -> None:
    """Derive the rows of step t.

    A step past the end gets Delta = 0 and no gradient: it leaves the state, its gradient and all sums as they are.
    """
    shifted = stages.row(rows.delta, t) + fixed.delta_bias
    u, dy = stages.row(rows.u, t), stages.row(rows.raw_dy, t)
    Delta, rate = shifted, None
    if x.softplus:
        Delta = arithmetic.softplus(shifted, x.delta.dtype)
        # sigmoid(v) = exp(v - softplus(v)): no division
        rate = jnp.exp2((shifted - Delta) * arithmetic.LOG2_E)
    if rows.steps is not None:
        valid = jnp.where(t < rows.steps, 1.0, 0.0)
        Delta, dy = Delta * valid, dy * valid
        rate = zero_row() + valid if rate is None else rate * valid
    if rate is not None:
        rows.rate[t, :] = rate
    if rows.gate is not None:
        z = stages.row(rows.z, t)
        sigmoid = arithmetic.sigmoid_by_log(z)
        scaled = dy * sigmoid
        rows.gate[t, :] = scaled * ((1.0 + z) - z * sigmoid)  # silu'(z) = sigmoid(z) (1 + z - silu(z))
        dy = scaled * z
    rows.Delta[t, :] = Delta
    rows.Delta_u[t, :] = Delta * u
    rows.dy[t, :] = dy
