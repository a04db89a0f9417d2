"""The length split for small batches: what each piece of the length does to a state that enters it, and so the states
that enter each piece.

A scan is linear in its state: a piece turns h into p h + e, with p = exp2(A sum of Delta), or 0 if a document begins
in it, and e the piece's own scan from zero. A kernel computes e and the sums of Delta for all pieces at once; to
combine them over the pieces is little work. The same holds, from the last piece to the first, for the gradient of the
state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import arithmetic, stages
from pallas_kernels.mosaic.launch import Refs, launch, place, programs, zero_row
from pallas_kernels.mosaic.operands import Operands
from pallas_kernels.mosaic.stream import Stream, ring_scratch
from pallas_kernels.tiling import CHANNELS, MosaicTiling, Pieces


def entering_states(x: Operands, tiling: MosaicTiling) -> jax.Array:
    """The state that enters each piece, (b, pieces, n, g, r)."""
    pieces = tiling.forward_pieces
    if pieces.count == 1:
        return x.initial_state[:, None]
    return _combine(*_summaries(x, None, tiling, pieces), x.initial_state)


def leaving_gradients(x: Operands, dy: jax.Array, dlast: jax.Array, tiling: MosaicTiling) -> jax.Array:
    """The gradient of the state that leaves each piece, (b, pieces, n, g, r), from the cotangents of y (b, l, g, r)
    and of the last state (b, n, g, r).
    """
    pieces = tiling.backward_pieces
    if pieces.count == 1:
        return dlast[:, None]
    factors, ends = _summaries(x, dy, tiling, pieces)
    return _combine(factors[:, ::-1], ends[:, ::-1], dlast)[:, ::-1]


def _combine(factors: jax.Array, ends: jax.Array, start: jax.Array) -> jax.Array:
    """The states before each piece, from (b, pieces, n, g, r) factors and ends and the state before the first; a scan
    in log2(pieces) rounds.
    """

    def then(first, second):
        return first[0] * second[0], second[0] * first[1] + second[1]

    factors, ends = factors[:, :-1], ends[:, :-1]
    products, sums = lax.associative_scan(then, (factors, ends), axis=1)
    return jnp.concatenate([start[:, None], products * start[:, None] + sums], axis=1)


def _summaries(x: Operands, dy: jax.Array | None, tiling: MosaicTiling, pieces: Pieces) -> tuple[jax.Array, jax.Array]:
    """Each piece's factor p and end e, (b, pieces, n, g, r); of the state, or with dy of the gradient of the state."""
    sums, ends = _run(x, dy, tiling, pieces)
    A = x.channels[x.rows.A : x.rows.A + x.sizes.n]
    factors = jnp.exp2(sums[:, :, None] * A)
    if x.reset is not None:
        steps = jnp.pad(x.reset[:, : x.sizes.l], ((0, 0), (0, pieces.count * pieces.steps - x.sizes.l)))
        begins = jnp.any(steps.reshape(x.sizes.b, pieces.count, pieces.steps) != 0, axis=2)
        factors = jnp.where(begins[:, :, None, None, None], 0.0, factors)
    return factors, ends


def _run(x: Operands, dy: jax.Array | None, tiling: MosaicTiling, pieces: Pieces) -> tuple[jax.Array, jax.Array]:
    """The kernel: sums of Delta (b, pieces, g, r), and ends (b, pieces, n, g, r).

    Grid: as forward, and like it but for what is left out: no y; or, with dy, from the last step to the first, g_t =
    C_t dy_t + a_{t+1} g_{t+1}.
    Registers: the state and A (n each), delta_bias, the sum of Delta, a constant B or C. Shared memory: rings of what
    is read, a state on its way out.
    Bytes moved: delta, and u and B or dy, z and C, once. Accumulation in float32.
    """
    s, f32 = x.sizes, jnp.float32
    if dy is None:
        sequences, projections = x.arrays("u", "delta"), x.arrays("B")
    else:
        sequences, projections = x.arrays("delta", "z") | {"dy": dy}, x.arrays("C")
    shape = jax.ShapeDtypeStruct
    results = launch(
        lambda m: _body(m, x, tiling, pieces, tuple(sequences), tuple(projections)),
        "selective_scan_summary" if dy is None else "selective_scan_gradient_summary",
        programs(s, pieces),
        inputs={
            **dict.fromkeys(("u", "dy", "z", "B", "C")),
            **sequences,
            **projections,
            "reset": x.reset,
            "channels": x.channels,
        },
        outputs={
            "sums": shape((s.b, pieces.count, 1, s.g, s.r), f32),
            "ends": shape((s.b, pieces.count, s.n, s.g, s.r), f32),
        },
        scratch={
            **ring_scratch(sequences, projections, x.reset, tiling.tile, tiling.forward_stages),
            "channels_s": plgpu.SMEM((x.rows.count, CHANNELS), f32),
            "arrived": plgpu.Barrier(num_arrivals=1),
        },
    )
    return results["sums"][:, :, 0], results["ends"]


def _body(m: Refs, x: Operands, tiling: MosaicTiling, pieces: Pieces, sequences, projections) -> None:
    at, n = place(x.sizes, pieces), x.sizes.n
    backwards = m.dy is not None
    stream = Stream(m, at, tiling.tile, tiling.forward_stages, sequences, projections, backwards)
    plgpu.copy_gmem_to_smem(m.channels.at[:, at.group, at.channels], m.channels_s, m.arrived)
    stream.begin()
    plgpu.barrier_wait(m.arrived)
    fixed = stages.read_parameters(m.channels_s, x.rows, n)

    def tile(k, carry):
        stream.advance(k)
        stream.wait(k)
        slot = stream.slot(k)
        steps = jnp.minimum(at.steps - stream.position(k) * tiling.tile, tiling.tile)

        def step(i, carry):
            state, total = carry
            t = steps - 1 - i if backwards else i
            Delta = stages.step_size(stages.row(m.delta_s.at[slot], t), x, fixed)
            decays = stages.decays(Delta, fixed.A, stages.before_document(m, slot, t))
            if backwards:
                dy = stages.row(m.dy_s.at[slot], t)
                if m.z is not None:
                    z = stages.row(m.z_s.at[slot], t)
                    dy = dy * (z * arithmetic.sigmoid_by_log(z))
                C = stages.projection(fixed.C, m.C_s, slot, t, n)
                state = tuple(a * (h + C[k] * dy) for k, (a, h) in enumerate(zip(decays, state, strict=True)))
                return state, total + Delta
            B = stages.projection(fixed.B, m.B_s, slot, t, n)
            Delta_u = Delta * stages.row(m.u_s.at[slot], t)
            return stages.advanced(state, decays, B, Delta_u), total + Delta

        carry = stages.for_steps(steps, stages.unroll(x.sizes.l), step, carry)
        plgpu.commit_smem()  # everybody is done with the slot
        return carry

    zero = zero_row()
    state, total = lax.fori_loop(0, stream.count, tile, ((zero,) * n, zero))
    stages.write_state(m.channels_s, (*state, total))  # in place of A and D
    plgpu.commit_smem()
    place_of = (slice(None), at.group, at.channels)
    plgpu.copy_smem_to_gmem(m.channels_s.at[0:n], m.ends.at[(at.row, at.piece, *place_of)])
    plgpu.copy_smem_to_gmem(m.channels_s.at[n : n + 1], m.sums.at[(at.row, at.piece, *place_of)])
    plgpu.wait_smem_to_gmem(0)
