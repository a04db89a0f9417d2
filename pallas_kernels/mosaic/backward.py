"""The backward kernel: every gradient, from the inputs, the states kept before each tile, and the cotangents."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import arithmetic, channel_sums, stages
from pallas_kernels.mosaic.channel_sums import ROWS
from pallas_kernels.mosaic.launch import Refs, launch, place, programs, zero_row
from pallas_kernels.mosaic.operands import Operands
from pallas_kernels.mosaic.prepare import Derived, TileRows, prepare, tile_rows
from pallas_kernels.mosaic.stages import Parameters, State
from pallas_kernels.mosaic.stream import Stream, ring_scratch
from pallas_kernels.tiling import CHANNELS, MosaicTiling


class Gradients(NamedTuple):
    """What the kernel writes. Sums are still open over b and pieces, and over channel blocks where B and C vary."""

    u: jax.Array  # (b, l, g, r), u's dtype
    delta: jax.Array  # (b, l, g, r), delta's dtype
    z: jax.Array | None  # (b, l, g, r), z's dtype
    B: jax.Array | None  # (b, g blocks, l padded to tiles, n); None if constant
    C: jax.Array | None  # like B
    channels: jax.Array  # (b, pieces, rows, g, r): the rows of `Operands.channels`, without the factor log2(e) on A
    entering: jax.Array  # (b, pieces, n, g, r): of the state that enters each piece


class Sums(NamedTuple):
    """What a program adds up in registers, in the order of the parameters' rows."""

    A: State
    D: jax.Array
    delta_bias: jax.Array
    B: State  # empty if B varies
    C: State


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Everything static that the body depends on."""

    x: Operands
    tiling: MosaicTiling
    sequences: tuple[str, ...]
    projections: tuple[str, ...]
    derived: Derived

    @property
    def subtile(self) -> int:
        """Steps whose states stay in registers, and whose products fill 64 rows."""
        return ROWS // self.x.sizes.n

    @property
    def subtiles(self) -> int:
        """Of a tile."""
        return self.tiling.tile // self.subtile

    def entry(self, slot: Any) -> Any:
        """Where the state before the tile in a slot lies among the states before subtiles; the first places belong to
        the tile at work.
        """
        return self.subtiles - 1 + slot

    @property
    def spare(self) -> int:
        """The place among those states that nobody fills before the first tile is at work, nor after the last."""
        return self.entry(self.tiling.backward_stages - 1)


def backward(x: Operands, kept: jax.Array, dy: jax.Array, leaving: jax.Array, tiling: MosaicTiling) -> Gradients:
    """Run the kernel on the kept states (b, tiles, n, g, r) and the cotangents of y and of the state that leaves each
    piece, (b, pieces, n, g, r).

    Grid: as forward. A program walks its tiles from the last to the first. In a tile it first runs forward from the
    kept state and notes the state before each subtile of 64 / n steps, deriving on the way what does not depend on
    states (see `prepare`). Then, subtile by subtile from the last, it runs forward once more with all states in
    registers, and back with g_t = C_t dy_t + a_{t+1} g_{t+1}. With w = a g h_{t-1}:

        dA = sum Delta w,  dDelta = sum_n A w + u sum_n g B,  du = Delta sum_n g B + D dy,  dB = sum_channels g Delta
        u,  dC = sum_channels h dy

    Registers, over the whole length: a g, A, and the sums dA (n each), dD, d delta_bias, those of a constant B and C;
    within a subtile its states and decays. A varying B and C is summed over channels through shared memory, see
    `channel_sums`.
    Shared memory: rings of u, delta, z, dy, B, C and kept states, filled ahead; du, ddelta and dz replace u, delta
    and z and leave from there; states before subtiles, derived rows, two (64, 128) tiles of g and h, and the sums
    over channels of a tile.
    Bytes moved: u, delta, z, dy in and du, ddelta, dz out once; kept states once; B, C and their partial gradients
    (float32) once for each channel block.
    Accumulation in float32, no atomics: the same bits every run.
    """
    s, tile, pieces = x.sizes, tiling.tile, tiling.backward_pieces
    sequences, projections = x.arrays("u", "delta", "z") | {"dy": dy}, x.arrays("B", "C")
    plan = _Plan(x, tiling, tuple(sequences), tuple(projections), Derived.of(x, dy, tile))
    shape, f32 = jax.ShapeDtypeStruct, jnp.float32
    partial = shape((s.b, s.g * s.blocks, -(-s.l // tile) * plan.subtiles, plan.subtile, s.n), f32)
    results = launch(
        lambda m: _body(m, plan),
        "selective_scan_backward",
        programs(s, pieces),
        inputs={
            **dict.fromkeys(("z", "B", "C")),
            **sequences,
            **projections,
            "reset": x.reset,
            "channels": x.channels,
            "kept": kept,
            "leaving": leaving,
        },
        outputs={
            "du": shape(x.u.shape, x.u.dtype),
            "ddelta": shape(x.delta.shape, x.delta.dtype),
            "dz": None if x.z is None else shape(x.z.shape, x.z.dtype),
            "dB": None if x.B is None else partial,
            "dC": None if x.C is None else partial,
            "sums": shape((s.b, pieces.count, x.rows.count, s.g, s.r), f32),
            "dentering": shape((s.b, pieces.count, s.n, s.g, s.r), f32),
        },
        scratch={
            **ring_scratch(sequences, projections, x.reset, tile, tiling.backward_stages, extra=1),
            "states_s": plgpu.SMEM((plan.entry(tiling.backward_stages), s.n, CHANNELS), f32),
            "rows_s": plgpu.SMEM((max(x.rows.count, plan.derived.rows), CHANNELS), f32),
            **channel_sums.scratch(projections, s.n, plan.subtiles),
            "arrived": plgpu.Barrier(num_arrivals=2),
        },
    )
    B, C = (None if v is None else v.reshape(*v.shape[:2], -1, s.n) for v in (results.get("dB"), results.get("dC")))
    return Gradients(results["du"], results["ddelta"], results.get("dz"), B, C, results["sums"], results["dentering"])


def _body(m: Refs, plan: _Plan) -> None:
    x, tiling, n = plan.x, plan.tiling, plan.x.sizes.n
    at = place(x.sizes, tiling.backward_pieces)
    first_tile = at.start // tiling.tile

    def kept_state(position, slot):
        return [(m.kept.at[at.row, first_tile + position, :, at.group, at.channels], m.states_s.at[plan.entry(slot)])]

    stream = Stream(
        m, at, tiling.tile, tiling.backward_stages, plan.sequences, plan.projections, backwards=True, extra=kept_state
    )
    parameters = m.rows_s.at[0 : x.rows.count]
    plgpu.copy_gmem_to_smem(m.channels.at[:, at.group, at.channels], parameters, m.arrived)
    plgpu.copy_gmem_to_smem(
        m.leaving.at[at.row, at.piece, :, at.group, at.channels], m.states_s.at[plan.spare], m.arrived
    )
    stream.begin()
    plgpu.barrier_wait(m.arrived)
    fixed = stages.read_parameters(m.rows_s, x.rows, n)
    carry = stages.read_state(m.states_s.at[plan.spare], 0, n), _no_sums(fixed, n)

    def tile(k, carry):
        stream.wait(k)
        carry = _tile(m, plan, fixed, stream, k, carry)
        for name in ("u", "delta", "z"):
            if getattr(m, name) is not None:
                plgpu.copy_smem_to_gmem(
                    getattr(m, name + "_s").at[stream.slot(k)], stream.window(getattr(m, "d" + name), k)
                )
        for name in plan.projections:
            channel_sums.send(m, at, name, first_tile + stream.position(k))
        return carry

    state, sums = lax.fori_loop(0, stream.count, tile, carry)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    stages.write_state(m.states_s.at[plan.spare], state)
    stages.write_state(m.rows_s, (*sums.A, sums.D, sums.delta_bias, *sums.B, *sums.C))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(m.states_s.at[plan.spare], m.dentering.at[at.row, at.piece, :, at.group, at.channels])
    plgpu.copy_smem_to_gmem(parameters, m.sums.at[at.row, at.piece, :, at.group, at.channels])
    plgpu.wait_smem_to_gmem(0)


def _no_sums(fixed: Parameters, n: int) -> Sums:
    zero = zero_row()
    return Sums((zero,) * n, zero, zero, (zero,) * n if fixed.B else (), (zero,) * n if fixed.C else ())


def _tile(m: Refs, plan: _Plan, fixed: Parameters, stream: Stream, k: jax.Array, carry):
    """One tile: states before its subtiles, forward; then its subtiles, backward."""
    n, slot = plan.x.sizes.n, stream.slot(k)
    rows = tile_rows(m, plan.derived, slot, stream.at.steps - stream.position(k) * stream.tile)

    def note(j, state):
        for r in range(plan.subtile):
            prepare(rows, plan.x, fixed, (j + 1) * plan.subtile + r)
            _, state = _advance(m, rows, fixed, slot, j * plan.subtile + r, state)
        stages.write_state(m.states_s.at[j], state)
        return state

    for t in range(plan.subtile):
        prepare(rows, plan.x, fixed, t)
    if plan.subtiles > 1:
        lax.fori_loop(0, plan.subtiles - 1, note, stages.read_state(m.states_s.at[plan.entry(slot)], 0, n))
    # The results of the tile before have left, so its slot can be filled again.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.commit_smem()
    stream.advance(k)

    def subtile(q, carry):
        return _subtile(m, plan, fixed, rows, slot, plan.subtiles - 1 - q, carry)

    return lax.fori_loop(0, plan.subtiles, subtile, carry)


def _advance(
    m: Refs, rows: TileRows, fixed: Parameters, slot: jax.Array, t: jax.Array, state: State
) -> tuple[State, State]:
    """Step t forward: its decays, and the state after it."""
    B, reset = stages.projection(fixed.B, m.B_s, slot, t, len(state)), stages.before_document(m, slot, t)
    Delta, Delta_u = rows.Delta[t, :], rows.Delta_u[t, :]
    decays = tuple(stages.decays(Delta, fixed.A, reset))
    return decays, stages.advanced(state, decays, B, Delta_u)


def _subtile(m: Refs, plan: _Plan, fixed: Parameters, rows: TileRows, slot: jax.Array, j: jax.Array, carry):
    """Subtile j: forward, states and decays kept in registers; back over its steps; its sums over channels."""
    n, first = plan.x.sizes.n, j * plan.subtile
    start = m.states_s.at[jnp.where(j == 0, plan.entry(slot), j - 1)]
    states, decays = [stages.read_state(start, 0, n)], []
    for r in range(plan.subtile):
        step_decays, state = _advance(m, rows, fixed, slot, first + r, states[r])
        decays.append(step_decays)
        states.append(state)
        if m.h_s is not None:
            for k, h in enumerate(state):
                channel_sums.put(m.h_s, r, k, h)
    # No load moves across this barrier, which needs some value and costs the hardware nothing: the registers belong to
    # states and decays, and the compiler would keep B in them too, and then spill.
    *others, last = states[-1]
    states[-1] = (*others, lax.optimization_barrier(last))
    states[0] = stages.read_state(start, 0, n)
    for r in reversed(range(plan.subtile)):
        carry = _back(m, fixed, rows, slot, first + r, r, states[r], states[r + 1], decays[r], carry)
    plgpu.commit_smem()  # every thread's rows of g and h are written
    if m.g_s is not None:
        channel_sums.weighted_sum(m.g_s, rows.Delta_u, first, m.dB_s, j, n)
    if m.h_s is not None:
        channel_sums.weighted_sum(m.h_s, rows.dy, first, m.dC_s, j, n)
    plgpu.commit_smem()  # and read, before the next ones replace them
    return carry


def _back(m: Refs, fixed: Parameters, rows: TileRows, slot, t, r: int, before: State, h: State, decays: State, carry):
    """One step back: replaces its row of the inputs by their gradients; carries a_t g_t and the sums."""
    ag, sums = carry
    n = len(h)
    B, C = stages.projection(fixed.B, m.B_s, slot, t, n), stages.projection(fixed.C, m.C_s, slot, t, n)
    Delta, Delta_u, dy, u = rows.Delta[t, :], rows.Delta_u[t, :], rows.dy[t, :], stages.row(rows.u, t)
    y, wA, gB = stages.Dot(fixed.D * u), stages.Dot(), stages.Dot()
    ag, dA, dB, dC = list(ag), list(sums.A), list(sums.B), list(sums.C)
    for k in range(n):  # state by state: all of one stage first would keep more values alive, and cost registers
        if m.z is not None:
            y.add(C[k], h[k])
        g = ag[k] + C[k] * dy
        if m.g_s is None:
            dB[k] += g * Delta_u
        else:
            channel_sums.put(m.g_s, r, k, g)
        if m.h_s is None:
            dC[k] += h[k] * dy
        ag[k] = decays[k] * g
        w = ag[k] * before[k]
        dA[k] += Delta * w
        wA.add(w, fixed.A[k])
        gB.add(g, B[k])
    ddelta = wA.sum * arithmetic.LN_2 + u * gB.sum
    if rows.rate is not None:
        ddelta = ddelta * rows.rate[t, :]
    if m.z is not None:
        rows.z[t, :] = (y.sum * rows.gate[t, :]).astype(rows.z.dtype)
    rows.u[t, :] = (Delta * gB.sum + fixed.D * dy).astype(rows.u.dtype)
    rows.delta[t, :] = ddelta.astype(rows.delta.dtype)
    sums = Sums(tuple(dA), sums.D + dy * u, sums.delta_bias + ddelta, tuple(dB), tuple(dC))
    return tuple(ag), sums
