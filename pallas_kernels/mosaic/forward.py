"""The forward kernel: y, the last state, and the state before every tile for the backward pass."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import arithmetic, stages
from pallas_kernels.mosaic.launch import Refs, launch, place, programs
from pallas_kernels.mosaic.operands import Operands
from pallas_kernels.mosaic.stream import Stream, ring_scratch
from pallas_kernels.tiling import CHANNELS, MosaicTiling


class Results(NamedTuple):
    """What the kernel writes."""

    y: jax.Array  # (b, l, g, r), u's dtype
    last_states: jax.Array  # (b, pieces, n, g, r): the state after each piece
    kept: jax.Array | None  # (b, tiles, n, g, r): the state before each tile; None if no gradient will be asked for


def forward(x: Operands, entering: jax.Array, tiling: MosaicTiling, *, keep_states: bool) -> Results:
    """Run the kernel from the states that enter each piece of the length, (b, pieces, n, g, r).

    Grid: a warpgroup for each batch row, piece of the length and block of 128 channels of a group; a thread owns a
    channel.
    Registers, over the whole length: the state and A (n each), D, delta_bias, a constant B and C.
    Shared memory: a ring of slots with tiles of u, delta, z, B, C and reset, which the copy engine fills two tiles
    ahead; two tiles of y; a state on its way in or out.
    Bytes moved: u, delta, z and y once, B and C (float32) once for each channel block, states once each way.
    Accumulation in float32.
    """
    s, tile, pieces = x.sizes, tiling.tile, tiling.forward_pieces
    sequences, projections = x.arrays("u", "delta", "z"), x.arrays("B", "C")
    shape = jax.ShapeDtypeStruct
    results = launch(
        lambda m: _body(m, x, tiling, tuple(sequences), tuple(projections)),
        "selective_scan_forward",
        programs(s, pieces),
        inputs={
            **dict.fromkeys(("z", "B", "C")),
            **sequences,
            **projections,
            "reset": x.reset,
            "channels": x.channels,
            "entering": entering,
        },
        outputs={
            "y": shape(x.u.shape, x.u.dtype),
            "last": shape((s.b, pieces.count, s.n, s.g, s.r), jnp.float32),
            "kept": shape((s.b, -(-s.l // tile), s.n, s.g, s.r), jnp.float32) if keep_states else None,
        },
        scratch={
            **ring_scratch(sequences, projections, x.reset, tile, tiling.forward_stages),
            "channels_s": plgpu.SMEM((x.rows.count, CHANNELS), jnp.float32),
            "state_s": plgpu.SMEM((s.n, CHANNELS), jnp.float32),
            "y_s": plgpu.SMEM((2, tile, CHANNELS), x.u.dtype),
            "arrived": plgpu.Barrier(num_arrivals=2),
        },
    )
    return Results(results["y"], results["last"], results.get("kept"))


def _body(m: Refs, x: Operands, tiling: MosaicTiling, sequences: tuple[str, ...], projections: tuple[str, ...]) -> None:
    at = place(x.sizes, tiling.forward_pieces)
    stream = Stream(m, at, tiling.tile, tiling.forward_stages, sequences, projections)
    plgpu.copy_gmem_to_smem(m.channels.at[:, at.group, at.channels], m.channels_s, m.arrived)
    plgpu.copy_gmem_to_smem(m.entering.at[at.row, at.piece, :, at.group, at.channels], m.state_s, m.arrived)
    stream.begin()
    plgpu.barrier_wait(m.arrived)
    fixed = stages.read_parameters(m.channels_s, x.rows, x.sizes.n)
    state = stages.read_state(m.state_s, 0, x.sizes.n)

    def keep(position, state) -> None:
        stages.write_state(m.state_s, state)
        plgpu.commit_smem()
        first = at.start // tiling.tile
        plgpu.copy_smem_to_gmem(m.state_s, m.kept.at[at.row, first + position, :, at.group, at.channels])

    def tile(k, state):
        stream.advance(k)
        stream.wait(k)
        # The results of the tile before last and the state of the last one must have left; only the last tile's
        # results may be on their way.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        if m.kept is not None:
            keep(k, state)
        state = _tile(m, x, fixed, stream, k, state)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(m.y_s.at[lax.rem(k, 2)], stream.window(m.y, k))
        return state

    state = lax.fori_loop(0, stream.count, tile, state)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    stages.write_state(m.state_s, state)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(m.state_s, m.last.at[at.row, at.piece, :, at.group, at.channels])
    plgpu.wait_smem_to_gmem(0)


def _tile(
    m: Refs, x: Operands, fixed: stages.Parameters, stream: Stream, k: jax.Array, state: stages.State
) -> stages.State:
    """The steps of a tile, as many as there are: nothing is computed past the end, so nothing there needs a mask."""
    slot, out, n = stream.slot(k), lax.rem(k, 2), x.sizes.n

    def step(t, state):
        B, C = stages.projection(fixed.B, m.B_s, slot, t, n), stages.projection(fixed.C, m.C_s, slot, t, n)
        u = stages.row(m.u_s.at[slot], t)
        Delta = stages.step_size(stages.row(m.delta_s.at[slot], t), x, fixed)
        decays = stages.decays(Delta, fixed.A, stages.before_document(m, slot, t))
        state = stages.advanced(state, decays, B, Delta * u)
        y = stages.dot(C, state, fixed.D * u)
        if m.z is not None:
            y = y * arithmetic.silu(stages.row(m.z_s.at[slot], t))
        m.y_s[out, t, :] = y.astype(m.y_s.dtype)
        return state

    steps = stream.tile
    if x.sizes.l % stream.tile:
        steps = jnp.minimum(stream.at.steps - k * stream.tile, stream.tile)
    return stages.for_steps(steps, stages.unroll(x.sizes.l), step, state)
