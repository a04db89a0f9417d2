"""The backward kernel of the portable pair.

Grid (b, g, channel blocks of a group), as forward. A program walks its chunks from the last to the first. In a chunk it
runs forward from the kept state and notes Delta and the state before every step, in scratch blocks of global memory
that stay in the cache; then it walks back with g_t = C_t dy_t + a_{t+1} g_{t+1}.

Registers, over the whole length: a g, A and dA (n for each channel), dD, d delta_bias; of the step at work the states
before and after it, B and C. Sums of dB and dC over channels: see `assembly.channel_sums`. Sums over batch rows and
channel blocks are left to the caller, who adds them in a fixed order: no atomics. Accumulation in float32 (float64 if
the inputs are).

Machine code at n = 16 with softplus, skip and gate, jax 0.12.0.1 and ptxas 13, instructions a step and channel
(python -m pallas_kernels.gpu_report --gradient --target a100 --sizes 8 2048 2048 16, and 4 2048 2048 16):

| target | dtype | channels a thread | registers | spills | forward again | walks back |
|---|---|---|---|---|---|---|
| sm_80, sm_89 | float32 | 2 | 246 | 0 | 107 | 314 |
| sm_80, sm_89 | bfloat16 | 2 | 250 | 0 | 109 | 322 |
| sm_80, sm_89 | float32 | 1 | 168 | 0 | 133 | 414 |
| sm_80, sm_89 | bfloat16 | 1 | 168 | 0 | 135 | 422 |

Below 200 it cannot come in this form. Of the 314, 184 are 11.5 for each of 16 states: the decay's product and its
exponential, the gradient and what it hands on, w, dA, three sums over states, the products for dB and dC, half a load
of the noted state. The sums over channels take 63: 31 exchanges, with two selections and an addition each, for two
channels (126 with one a thread). 16 are loads of B and C, which Triton makes entry by entry (32 with one channel); to
load several at once has not been tried. The other 51 belong to a channel or to the loop: row, gate, rate, stores,
addresses. Without any sum over channels all would still be above 200. An L40 has one channel a thread at
(8, 2048, 2048, 16): 256 programs would leave most of its 568 schedulers idle.

Tried and not kept: tiles of (channels, n) with the states spread over four lanes (527: sums over states and channels
take exchanges, and rows of channels pass through shared memory); recomputing states two steps at a time in place of
noting each (413 with two channels a thread and 808 bytes of spills; 449 with one).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.portable import stages
from pallas_kernels.portable.stages import Parameters, Place, Plan, Row, State, Values
from pallas_kernels.tiling import chunks


class Gradients(NamedTuple):
    """What the backward kernel writes. Sums are still open over b, and over channel blocks where B and C vary."""

    u: Any  # (b, l, g, r), u's dtype
    delta: Any  # (b, l, g, r), delta's dtype
    A: Any  # like initial_state
    B: Any  # like A if constant, else None
    C: Any  # like B
    projections: Any  # (b, g, blocks, l, those of B and C that vary, one after the other); None if neither does
    D: Any  # (b, g, r)
    z: Any  # (b, l, g, r), z's dtype, or None
    delta_bias: Any  # (b, g, r)
    initial_state: Any  # (b, n, g, r)
    states: Any  # (programs or 1, chunk, n, channels): scratch, the state before each step of the chunk at work
    Delta: Any  # (programs or 1, chunk, channels): scratch


class Sums(NamedTuple):
    """What a program adds up or carries over time."""

    ag: State  # the gradient of the state after the step that comes next
    A: State
    B: State | None  # if constant
    C: State | None  # if constant
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
    varying = (not plan.constant_B) + (not plan.constant_C)
    # The interpreter runs one program after another: they share one block.
    programs = (1, 1, 1) if tiling.interpreted else plan.grid
    return Gradients(
        u=shape(values.u.shape, values.u.dtype),
        delta=shape(values.delta.shape, values.delta.dtype),
        A=state,
        B=state if plan.constant_B else None,
        C=state if plan.constant_C else None,
        projections=shape((s.b, s.g, s.r // tiling.channels, s.l, varying * s.n), plan.wide) if varying else None,
        D=per_channel,
        z=None if values.z is None else shape(values.z.shape, values.z.dtype),
        delta_bias=per_channel,
        initial_state=state,
        states=shape((*programs, tiling.chunk, s.n, tiling.channels), plan.wide),
        Delta=shape((*programs, tiling.chunk, tiling.channels), plan.wide),
    )


def _kernel(refs: Values, boundaries_ref, dy_ref, dlast_ref, out: Gradients, *, plan: Plan) -> None:
    here = stages.place(plan)
    fixed = stages.parameters(refs, here, plan)
    count, chunk = chunks(plan.sizes.l), plan.tiling.chunk
    program = (0, 0, 0) if plan.tiling.interpreted else (here.b, here.g, here.block)

    def note(c, j, h: State) -> State:
        """Advance by `forward_unroll` steps; what the way back needs of each is written down."""
        first = j * plan.tiling.forward_unroll
        for i, row in enumerate(
            stages.read(refs, None, fixed, here, c * chunk + first, plan.tiling.forward_unroll, plan)
        ):
            step = stages.advance(row, h, fixed, plan)
            for slab, part in zip(plan.slabs, h):
                out.states[(*program, first + i, slab)] = part
            out.Delta[(*program, first + i)] = step.Delta
            h = step.h
        return h

    def back(c, j, carry: tuple[State, Sums]) -> tuple[State, Sums]:
        """`backward_unroll` steps back, from the state after them."""
        h, sums = carry
        first = j * plan.tiling.backward_unroll
        rows = stages.read(refs, dy_ref, fixed, here, c * chunk + first, plan.tiling.backward_unroll, plan)
        for i, row in reversed(list(enumerate(rows))):
            before = tuple(out.states[(*program, first + i, slab)] for slab in plan.slabs)
            sums = _back(out, fixed, here, plan, row, out.Delta[(*program, first + i)], before, h, sums)
            h = before
        return h, sums

    def one_chunk(k, sums):
        c = count - 1 - k
        h = tuple(here.boundary(boundaries_ref, c, slab)[...] for slab in plan.slabs)
        h = stages.for_steps(stages.turns(c * chunk, plan.tiling.forward_unroll, plan), lambda j, h: note(c, j, h), h)
        turns = stages.turns(c * chunk, plan.tiling.backward_unroll, plan)
        return stages.for_steps(turns, lambda i, carry: back(c, turns - 1 - i, carry), (h, sums))[1]

    zeros = tuple(jnp.zeros_like(slab) for slab in fixed.A)
    sums = Sums(
        ag=tuple(here.state(dlast_ref, slab)[...] for slab in plan.slabs),
        A=zeros,
        B=zeros if plan.constant_B else None,
        C=zeros if plan.constant_C else None,
        D=jnp.zeros_like(fixed.D),
        delta_bias=jnp.zeros_like(fixed.D),
    )
    sums = stages.for_steps(count, one_chunk, sums)
    for ref, total in ((out.initial_state, sums.ag), (out.A, sums.A), (out.B, sums.B), (out.C, sums.C)):
        for slab, part in zip(plan.slabs, total or ()):
            compat.store(here.state(ref, slab), part)
    for ref, total in ((out.D, sums.D), (out.delta_bias, sums.delta_bias)):
        compat.store(ref.at[here.b, here.g, here.channels], total)


def _back(
    out: Gradients,
    fixed: Parameters,
    here: Place,
    plan: Plan,
    row: Row,
    Delta: jax.Array,
    before: State,
    h: State,
    sums: Sums,
) -> Sums:
    """One step back: writes the gradients of its row, returns the sums with its part added.

    With w = a g h_{t-1}: dA = sum Delta w, dDelta = sum_n A w + u sum_n g B, du = Delta sum_n g B + D dy.
    """
    t, dy, Delta_u = row.t, row.dy, Delta * row.u

    def each(function, *states) -> State:
        return tuple(function(*slabs) for slabs in zip(*states, strict=True))

    def add_product(total, slab, weight) -> State:
        return each(lambda t, x: stages.multiply_add(weight, x, t, plan), total, slab)

    if row.z is not None:
        gate = stages.sigmoid(row.z, plan)
        y = stages.dot(row.C, h, plan) + fixed.D * row.u
        compat.store(here.sequence(out.z, t), dy * y * gate * (1 + row.z * (1 - gate)), row.valid)
        dy = dy * row.z * gate
    g = add_product(sums.ag, row.C, dy)
    # Zero where a document begins: then nothing flows back to the state before, and w is 0.
    ag = each(lambda A, g: stages.restart(row, stages.decay(Delta, A, plan) * g), fixed.A, g)
    w = each(jnp.multiply, ag, before)
    gB = stages.dot(g, row.B, plan)
    draw = stages.dot(w, fixed.A, plan) / stages.rate(plan) + row.u * gB
    if plan.softplus:
        draw *= stages.sigmoid(row.raw, plan)
    if row.valid is not None:  # a step past the end has dy = 0, but a gradient of the last state passes through it
        draw = jnp.where(row.valid, draw, 0)
    compat.store(here.sequence(out.u, t), Delta * gB + fixed.D * dy, row.valid)
    compat.store(here.sequence(out.delta, t), draw, row.valid)
    varying = [] if plan.constant_B else [(slab, Delta_u) for slab in g]
    varying += [] if plan.constant_C else [(slab, dy) for slab in h]
    if varying:
        stages.store_channel_sums(out.projections, here, row, varying, plan)
    return Sums(
        ag=ag,
        A=add_product(sums.A, w, Delta),
        B=None if sums.B is None else add_product(sums.B, g, Delta_u),
        C=None if sums.C is None else add_product(sums.C, h, dy),
        D=sums.D + dy * row.u,
        delta_bias=sums.delta_bias + draw,
    )
