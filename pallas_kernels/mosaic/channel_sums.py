"""Sums over channels for dB and dC: 2 n of them a step, which a shuffle each would make the dearest part of the
backward kernel.

The rows of g and h of a subtile, 64 of 128 channels, are written to shared memory as they come, a channel a thread.
They are read again in a layout that gives a lane four neighbouring channels of one row in one instruction, multiplied
there with what they are summed with (Delta u for dB, dy for dC), and added: about 1.4 instructions for each row and
step of a channel, against 20 for a sum of a row. Rows are 16 floats longer than they need be, so that neighbouring
ones lie 16 banks apart, and the eight lanes of one access cover all 32 banks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.launch import Place, Refs
from pallas_kernels.tiling import CHANNELS

ROWS = 64  # of a subtile: 16 a warp
_PADDING = 16

_load: Any = plgpu.load  # of another signature in jax 0.10, where these kernels are not used


def scratch(projections: dict[str, jax.Array], n: int, subtiles: int) -> dict:
    """The tiles of g and h, and the sums of a tile; none for a B or C that is constant, whose gradients are sums in
    registers.
    """
    steps, f32 = ROWS // n, jnp.float32
    rows, sums = plgpu.SMEM((steps, n, CHANNELS + _PADDING), f32), plgpu.SMEM((subtiles, steps, n), f32)
    has_B, has_C = "B" in projections, "C" in projections
    return {
        "g_s": rows if has_B else None,
        "h_s": rows if has_C else None,
        "dB_s": sums if has_B else None,
        "dC_s": sums if has_C else None,
    }


def put(ref, r: int, k: int, value: jax.Array) -> None:
    """Row k of step r of a subtile."""
    ref[r, k, pl.ds(0, CHANNELS)] = value


def weighted_sum(ref, weights, first: jax.Array, sums, j: jax.Array, n: int) -> None:
    """sums[j] (steps, n) = sum over channels of ref (steps, n, 128) times the weights of the steps from `first` on.
    All threads must have written their rows.
    """
    steps = ROWS // n
    layout = _layout(n)
    rows = _load(ref.at[:, :, pl.ds(0, CHANNELS)], layout=layout, optimized=False)
    weight = _load(weights.at[pl.ds(first, steps)], layout=layout.reduce((1,)), optimized=False)
    weight = plgpu.layout_cast(lax.broadcast_in_dim(weight, (steps, n, CHANNELS), (0, 2)), layout)
    sums[j] = jnp.sum(rows * weight, axis=2)


def send(m: Refs, at: Place, name: str, tile: jax.Array) -> None:
    """Start the copy of a tile's sums into the part of dB or dC that belongs to the program's block of channels."""
    source, target = getattr(m, f"d{name}_s"), getattr(m, "d" + name)
    subtiles = source.shape[0]
    plgpu.copy_smem_to_gmem(source, target.at[at.row, at.block, pl.ds(tile * subtiles, subtiles)])


def _layout(n: int) -> Any:
    """(64 / n, n, 128): each warp takes 16 rows; of its lanes each takes a row of every eight, and four neighbouring
    channels of every 16.
    """
    if n < 8:
        return plgpu.Layout.TILED(plgpu.Tiling(((8, n, 16), (8 // n, n, 4))), (-6,), (-3, -2, -4), -1)
    return plgpu.Layout.TILED(plgpu.Tiling(((4, 8, 16), (8, 4))), (-5,), (-2, -3), -1)
