"""How a kernel is launched: references by name, one warpgroup a program, and which part of the scan a program owns."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic.operands import CHANNELS, Sizes


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How the length is cut among programs: `count` pieces of `steps` steps, of which the last may be shorter."""

    count: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Place:
    """What a program owns: one batch row, one piece of the length, one block of channels of one group."""

    row: jax.Array
    piece: jax.Array
    group: jax.Array
    block: jax.Array  # of channels, among those of all groups
    channels: pl.Slice  # in the group
    start: jax.Array | int  # first step
    steps: jax.Array | int  # number of steps


def programs(sizes: Sizes, pieces: Pieces) -> int:
    """How many programs run: all on one grid axis, since the others end at 65535."""
    return sizes.b * pieces.count * sizes.g * sizes.blocks


def place(sizes: Sizes, pieces: Pieces) -> Place:
    """This program's part. Neighbours differ in their channels, so that they find B and C in the cache."""
    program = lax.axis_index("program")
    block, program = lax.rem(program, sizes.g * sizes.blocks), lax.div(program, sizes.g * sizes.blocks)
    row, piece = lax.div(program, pieces.count), lax.rem(program, pieces.count)
    group, channels = lax.div(block, sizes.blocks), pl.ds(lax.rem(block, sizes.blocks) * CHANNELS, CHANNELS)
    if pieces.count == 1:
        return Place(row, piece, group, block, channels, 0, sizes.l)
    start = piece * pieces.steps
    return Place(row, piece, group, block, channels, start, jnp.minimum(sizes.l - start, pieces.steps))


def launch(body: Callable[[types.SimpleNamespace], None], name: str, count: int, inputs: dict, outputs: dict, scratch: dict) -> dict[str, jax.Array]:
    """Run `body` on `count` warpgroups; it gets all references by name, and `None` for an entry that is None.

    Automatic barriers are off: they would cost two barriers for each row that is stored. The bodies order their accesses themselves, by
    `commit_smem`, a fence and a barrier of the warpgroup in one.
    """
    present = [{k: v for k, v in part.items() if v is not None} for part in (inputs, outputs, scratch)]
    names = [name for part in present for name in part]
    absent = {k: None for part in (inputs, outputs, scratch) for k in part if k not in names}

    def kernel(*refs) -> None:
        body(types.SimpleNamespace(**absent, **dict(zip(names, refs, strict=True))))

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


def copy_in(copies: list[tuple], barrier) -> None:
    """Start the copies (from global, to shared memory), all of which arrive at `barrier`."""
    for source, target in copies:
        plgpu.copy_gmem_to_smem(source, target, barrier)


def zero_row() -> jax.Array:
    """A zero for each channel, in the layout of a row that is read from shared memory."""
    return plgpu.layout_cast(jnp.zeros((CHANNELS,), jnp.float32), plgpu.Layout.WG_STRIDED((CHANNELS,), 1))
