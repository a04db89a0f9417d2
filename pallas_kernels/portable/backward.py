"""The backward kernel of the portable pair.

Grid (b, g, channel blocks of a group), as forward. A program walks its chunks from the last to the first. In a chunk it
runs forward from the kept state and notes the state before every subtile, in a scratch block of global memory that
stays in the cache; then, subtile by subtile from the last, it runs forward once more with all states in registers, and
back with g_t = C_t dy_t + a_{t+1} g_{t+1}.

Registers, over the whole length: a g, A and dA (n, channels), dD, d delta_bias. Sums over batch rows and channel blocks
are left to the caller, who adds them in a fixed order. Accumulation in float32 (float64 if the inputs are).

Machine code at (8, 2048, 2048, 16) with z and softplus, instructions a step and channel (pallas_kernels.gpu_report):

| target | dtype | registers | spills | notes | walks back |
|---|---|---|---|---|---|
| sm_80, sm_89 | float32 | 252-255 | 0 | 109 | 527 |
| sm_80, sm_89 | bfloat16 | 250-254 | 0 | 118 | 559 |

Of the 527, 48 are exchanges between lanes for sums over states and channels.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.portable import stages
from pallas_kernels.portable.stages import Advanced, Parameters, Place, Plan, Row, Values
from pallas_kernels.tiling import chunks


class Gradients(NamedTuple):
    """What the backward kernel writes. Sums are still open over b, and over channel blocks where B and C vary."""

    u: Any  # (b, l, g, r), u's dtype
    delta: Any  # (b, l, g, r), delta's dtype
    A: Any  # like initial_state
    B: Any  # (b, g, blocks, l, n), or like A if constant
    C: Any  # like B
    D: Any  # (b, g, r)
    z: Any  # (b, l, g, r), z's dtype, or None
    delta_bias: Any  # (b, g, r)
    initial_state: Any  # (b, n, g, r), or (b, g, r, n) with `states_last`
    scratch: Any  # (programs or 1, chunk / subtile, n, channels): the states before each subtile of the chunk at work


class Sums(NamedTuple):
    """What a program adds up or carries over time."""

    ag: jax.Array  # (n, channels): the gradient of the state after the step that comes next
    A: jax.Array  # (n, channels)
    B: jax.Array | None  # (n, channels) if constant
    C: jax.Array | None  # (n, channels) if constant
    D: jax.Array  # (channels,)
    delta_bias: jax.Array  # (channels,)


def backward(values: Values, boundaries: jax.Array, dy: jax.Array, dlast: jax.Array, plan: Plan) -> Gradients:
    """Run the kernel on the kept states and the cotangents of y (b, l, g, r) and of the last state (b, n, g, r)."""
    (gradients,) = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=plan.grid,
        out_shape=[_results(values, plan)],
        interpret=plan.tiling.interpreted,
        compiler_params=compat.triton_params(plan.tiling.num_warps, plan.tiling.num_stages),
        name="selective_scan_backward",
    )(values, boundaries, dy, dlast)
    return gradients


def _results(values: Values, plan: Plan) -> Gradients:
    s, tiling, shape = plan.sizes, plan.tiling, jax.ShapeDtypeStruct
    state, per_channel = shape(values.initial_state.shape, plan.wide), shape((s.b, s.g, s.r), plan.wide)
    partial = shape((s.b, s.g, s.r // tiling.channels, s.l, s.n), plan.wide)
    # The interpreter runs one program after another: they share one block.
    programs = (1, 1, 1) if tiling.interpreted else plan.grid
    tile = (tiling.channels, s.n) if tiling.states_last else (s.n, tiling.channels)
    return Gradients(
        u=shape(values.u.shape, values.u.dtype),
        delta=shape(values.delta.shape, values.delta.dtype),
        A=state,
        B=state if plan.constant_B else partial,
        C=state if plan.constant_C else partial,
        D=per_channel,
        z=None if values.z is None else shape(values.z.shape, values.z.dtype),
        delta_bias=per_channel,
        initial_state=state,
        scratch=shape((*programs, tiling.chunk // tiling.subtile, *tile), plan.wide),
    )


def _kernel(refs: Values, boundaries_ref, dy_ref, dlast_ref, out: Gradients, *, plan: Plan) -> None:
    here = stages.place(plan)
    fixed = stages.parameters(refs, here, plan)
    count, chunk, subtile = chunks(plan.sizes.l), plan.tiling.chunk, plan.tiling.subtile
    program = (0, 0, 0) if plan.tiling.interpreted else (here.b, here.g, here.block)

    def read(c, j):
        return stages.read(refs, dy_ref, fixed, here, c * chunk + j * subtile, subtile, plan)

    def one_chunk(k, sums):
        c = count - 1 - k
        subtiles = stages.turns(c * chunk, subtile, plan)

        def note(j, h):
            out.scratch[(*program, j)] = h
            for row in read(c, j):
                h = stages.advance(row, h, fixed, plan).h
            return h

        h = _start(out.scratch.at[(*program, 0)], here.boundary(boundaries_ref, c), plan)
        h = stages.for_steps(subtiles - 1, note, h)
        out.scratch[(*program, subtiles - 1)] = h

        def one_subtile(i, sums):
            j = subtiles - 1 - i
            rows, steps, h = read(c, j), [], out.scratch[(*program, j)]
            for row in rows:
                steps.append(stages.advance(row, h, fixed, plan))
                h = steps[-1].h
            for row, step in zip(reversed(rows), reversed(steps)):
                sums = _back(out, fixed, here, plan, row, step, sums)
            return sums

        return stages.for_steps(subtiles, one_subtile, sums)

    zeros = jnp.zeros_like(fixed.A)
    sums = Sums(
        ag=here.state(dlast_ref)[...],
        A=zeros,
        B=zeros if plan.constant_B else None,
        C=zeros if plan.constant_C else None,
        D=jnp.zeros_like(fixed.D),
        delta_bias=jnp.zeros_like(fixed.D),
    )
    sums = stages.for_steps(count, one_chunk, sums)
    for ref, total in [
        (out.initial_state, sums.ag),
        (out.A, sums.A),
        (out.B, sums.B),
        (out.C, sums.C),
        (out.D, sums.D),
        (out.delta_bias, sums.delta_bias),
    ]:
        if total is not None:
            compat.store(here.state(ref), total)


def _start(scratch_ref, boundary_ref, plan: Plan) -> jax.Array:
    """The state before a chunk."""
    if not plan.tiling.states_last:
        return boundary_ref[...]
    # By way of memory it comes back in the layout of registers that A is in; else Triton turns it at every step.
    scratch_ref[...] = stages.turned(boundary_ref[...], plan)
    compat.barrier()
    return scratch_ref[...]


def _back(out: Gradients, fixed: Parameters, here: Place, plan: Plan, row: Row, step: Advanced, sums: Sums) -> Sums:
    """One step back: writes the gradients of its row, returns the sums with its part added.

    With w = a g h_{t-1}: dA = sum Delta w, dDelta = sum_n A w + u sum_n g B, du = Delta sum_n g B + D dy.
    """
    t, valid, dy = row.t, row.valid, row.dy
    if row.z is not None:
        gate = stages.sigmoid(row.z, plan)
        y = stages.sum_states(row.C * step.h, plan) + fixed.D * row.u
        compat.store(here.sequence(out.z, t), dy * y * gate * (1 + row.z * (1 - gate)), valid)
        dy = dy * row.z * gate
    g = stages.multiply_add(row.C, stages.by_channel(dy, plan), sums.ag, plan)
    ag = stages.restart(row, step.a * g)
    w = ag * step.before
    gB = stages.sum_states(g * row.B, plan)
    draw = stages.sum_states(w * fixed.A, plan) / stages.rate(plan) + row.u * gB
    if plan.softplus:
        draw *= stages.sigmoid(row.raw, plan)
    if valid is not None:  # a step past the end has dy = 0, but a gradient of the last state passes through it
        draw = jnp.where(valid, draw, 0)
    compat.store(here.sequence(out.u, t), step.Delta * gB + fixed.D * dy, valid)
    compat.store(here.sequence(out.delta, t), draw, valid)
    dB, dC = g * stages.by_channel(step.Delta * row.u, plan), step.h * stages.by_channel(dy, plan)
    if not plan.constant_B:
        compat.store(here.partial(out.B, t), stages.sum_channels(dB, plan), valid)
    if not plan.constant_C:
        compat.store(here.partial(out.C, t), stages.sum_channels(dC, plan), valid)
    return Sums(
        ag=ag,
        A=stages.multiply_add(stages.by_channel(step.Delta, plan), w, sums.A, plan),
        B=None if sums.B is None else sums.B + dB,
        C=None if sums.C is None else sums.C + dC,
        D=sums.D + dy * row.u,
        delta_bias=sums.delta_bias + draw,
    )
