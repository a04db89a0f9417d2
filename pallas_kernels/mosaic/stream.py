"""A program's inputs on their way through shared memory: the copy engine fills a ring of slots, tile by tile, ahead
of their use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.launch import Place, Refs, when
from pallas_kernels.tiling import CHANNELS

_FEWEST_RESETS = 32  # a copy is a multiple of 128 bytes: beyond the tile, what follows comes too


@dataclasses.dataclass(frozen=True)
class Stream:
    """Tiles of `tile` steps, counted by k in the order of use: from the first step on, or from the last back.

    For every name of `sequences` (b, l, g, r) and `projections` (b, l, g, n) the references have the array itself
    and, with "_s" after it, its ring in shared memory; so has `reset`, if it is there. `extra` gives further (source,
    target) pairs for the tile at a position in time and a slot.
    """

    refs: Refs
    at: Place
    tile: int
    stages: int
    sequences: tuple[str, ...]
    projections: tuple[str, ...]
    backwards: bool = False
    extra: Callable[[jax.Array, jax.Array], list] = lambda position, slot: []

    @property
    def count(self) -> jax.Array | int:
        """Number of tiles."""
        return pl.cdiv(self.at.steps, self.tile)

    def position(self, k: jax.Array) -> jax.Array:
        """Where tile k lies in time."""
        return self.count - 1 - k if self.backwards else k

    def slot(self, k: jax.Array) -> jax.Array:
        """Where tile k lies in the ring."""
        return lax.rem(k, self.stages)

    def steps(self, k: jax.Array):
        """The steps of tile k, as a slice of an array's length; its end may lie outside."""
        return pl.ds(self.at.start + self.position(k) * self.tile, self.tile)

    def window(self, ref, k: jax.Array):
        """Tile k of a (b, l, g, r) array."""
        return ref.at[self.at.row, self.steps(k), self.at.group, self.at.channels]

    def begin(self) -> None:
        """Start the copies of all slots but one."""
        for k in range(self.stages - 1):
            when(k < self.count, lambda k=k: self._copy(jnp.int32(k)))

    def advance(self, k: jax.Array) -> None:
        """Refill the slot that tile k - 1 has left, once everybody is done with it."""
        ahead = k + (self.stages - 1)
        when(ahead < self.count, lambda: self._copy(ahead))

    def wait(self, k: jax.Array) -> None:
        """Until tile k is there."""
        plgpu.barrier_wait(self.refs.full.at[self.slot(k)])

    def _copy(self, k: jax.Array) -> None:
        m, at, slot = self.refs, self.at, self.slot(k)
        for name in self.sequences:
            plgpu.copy_gmem_to_smem(self.window(getattr(m, name), k), getattr(m, name + "_s").at[slot], m.full.at[slot])
        for name in self.projections:
            source = getattr(m, name).at[at.row, self.steps(k), at.group, :]
            plgpu.copy_gmem_to_smem(source, getattr(m, name + "_s").at[slot], m.full.at[slot])
        if m.reset is not None:
            steps = pl.ds(self.at.start + self.position(k) * self.tile, m.reset_s.shape[1])
            plgpu.copy_gmem_to_smem(m.reset.at[at.row, steps], m.reset_s.at[slot], m.full.at[slot])
        for source, target in self.extra(self.position(k), slot):
            plgpu.copy_gmem_to_smem(source, target, m.full.at[slot])


def ring_scratch(
    sequences: dict[str, jax.Array],
    projections: dict[str, jax.Array],
    reset: jax.Array | None,
    tile: int,
    stages: int,
    extra: int = 0,
) -> dict:
    """The rings, and the barriers at which the copies of a slot arrive; `extra` is the number of further copies a
    tile.
    """
    rings: dict[str, Any] = dict.fromkeys(("u_s", "delta_s", "z_s", "dy_s", "B_s", "C_s"))
    for name, array in sequences.items():
        rings[name + "_s"] = plgpu.SMEM((stages, tile, CHANNELS), array.dtype)
    for name, array in projections.items():
        rings[name + "_s"] = plgpu.SMEM((stages, tile, array.shape[-1]), array.dtype)
    rings["reset_s"] = None if reset is None else plgpu.SMEM((stages, max(tile, _FEWEST_RESETS)), jnp.float32)
    arrivals = len(sequences) + len(projections) + (reset is not None) + extra
    return rings | {"full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)}
