"""How a kernel is launched: references by name, one warpgroup a program, and the part of the scan that a program
owns.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.operands import PaddedSizes
from pallas_kernels.tiling import CHANNELS, Pieces

Refs = types.SimpleNamespace


@dataclasses.dataclass(frozen=True)
class Place:
    """What a program owns: one batch row, one piece of the length, one block of channels of one group."""

    row: jax.Array
    piece: jax.Array
    group: jax.Array
    block: jax.Array  # of channels, among those of all groups
    channels: Any  # a slice of the group's channels
    start: jax.Array | int  # first step
    steps: jax.Array | int  # number of steps


def programs(sizes: PaddedSizes, pieces: Pieces) -> int:
    """How many programs run: all on one grid axis, since the others end at 65535."""
    return sizes.b * pieces.count * sizes.g * sizes.blocks


def place(sizes: PaddedSizes, pieces: Pieces) -> Place:
    """This program's part. Neighbours differ in their channels, so that they find B and C in the cache."""
    program, blocks = lax.axis_index("program"), sizes.g * sizes.blocks
    block, program = lax.rem(program, blocks), lax.div(program, blocks)
    piece, row = lax.rem(program, pieces.count), lax.div(program, pieces.count)
    group, channels = lax.div(block, sizes.blocks), pl.ds(lax.rem(block, sizes.blocks) * CHANNELS, CHANNELS)
    if pieces.count == 1:
        return Place(row, piece, group, block, channels, 0, sizes.l)
    start = piece * pieces.steps
    return Place(row, piece, group, block, channels, start, jnp.minimum(sizes.l - start, pieces.steps))


def launch(
    body: Callable[[Refs], None], name: str, count: int, *, inputs: dict, outputs: dict, scratch: dict
) -> dict[str, jax.Array]:
    """Run `body` on `count` warpgroups and return the outputs by name.

    The body gets a namespace with a reference for each entry, or None where the entry is None.
    Automatic barriers are off: they would cost two barriers for each row stored. The bodies order their accesses
    themselves, with `commit_smem`, which is a barrier of the warpgroup and a fence towards the copy engine in one.
    """
    kinds = (inputs, outputs, scratch)
    present = [{key: value for key, value in kind.items() if value is not None} for kind in kinds]
    names = [key for kind in present for key in kind]
    absent = {key: None for kind in kinds for key in kind if kind[key] is None}

    def kernel(*refs) -> None:
        body(Refs(**absent, **dict(zip(names, refs, strict=True))))

    kernel.__name__ = name
    run = plgpu.kernel(
        kernel,
        out_type=tuple(present[1].values()),
        scratch_types=list(present[2].values()),
        grid=(count,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            unsafe_no_auto_barriers=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    return dict(zip(present[1], run(*present[0].values()), strict=True))


def when(condition, action: Callable[[], None]) -> None:
    """`pl.when`, that settles a condition which is known while tracing at once."""
    if not isinstance(condition, bool):
        pl.when(condition)(action)
    elif condition:
        action()


def zero_row() -> jax.Array:
    """A zero for each channel, laid out as a row that is read from shared memory."""
    return plgpu.layout_cast(jnp.zeros((CHANNELS,), jnp.float32), plgpu.Layout.WG_STRIDED((CHANNELS,), 1))
