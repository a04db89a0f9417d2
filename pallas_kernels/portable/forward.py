"""The forward kernel of the portable pair.

Grid (b, g, channel blocks of a group). A program owns one batch row and one block of channels, over the whole length.
Registers: the state and A (n for each channel), and what it reads, two steps at once on a GPU. Nothing is put into
shared memory by hand. Global memory: each sequence passes once, B and C once for each channel block; the state before
every chunk is written for the backward pass. Accumulation in float32 (float64 if the inputs are).

Machine code at n = 16 with softplus, skip and gate, instructions a step and channel (as in backward.py):

| target | dtype | channels a thread | registers | spills | instructions |
|---|---|---|---|---|---|
| sm_80, sm_89 | float32 | 2 | 168 | 0 | 130 |
| sm_80, sm_89 | bfloat16 | 2 | 168 | 0 | 135 |
| sm_80, sm_89 | float32 | 1 | 96 | 0 | 155 |
| sm_80, sm_89 | bfloat16 | 1 | 96 | 0 | 160 |
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.portable import stages
from pallas_kernels.portable.stages import Plan, Values
from pallas_kernels.tiling import chunks


class Results(NamedTuple):
    """What the forward kernel returns, or references to it."""

    y: Any  # (b, l, g, r), u's dtype
    last_state: Any  # like initial_state
    boundaries: Any  # (b, chunks, n, g, r): the state before each chunk; None if no gradient will be asked for


def forward(values: Values, plan: Plan, *, keep_states: bool) -> Results:
    """Run the kernel: y, the last state and, if wanted, the states at chunk boundaries."""
    s, shape = plan.sizes, jax.ShapeDtypeStruct
    results = Results(
        y=shape(values.u.shape, values.u.dtype),
        last_state=shape(values.initial_state.shape, plan.wide),
        boundaries=shape((s.b, chunks(s.l), s.n, s.g, s.r), plan.wide) if keep_states else None,
    )
    (results,) = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=plan.grid,
        out_shape=[results],
        interpret=plan.tiling.interpreted,
        compiler_params=compat.triton_params(plan.tiling.num_warps, plan.tiling.num_stages),
        name="selective_scan_forward",
    )(values)
    return results


def _kernel(refs: Values, out: Results, *, plan: Plan) -> None:
    here = stages.place(plan)
    fixed = stages.parameters(refs, here, plan)
    chunk, unroll = plan.tiling.chunk, plan.tiling.forward_unroll

    def steps(first, h):
        for row in stages.read(refs, None, fixed, here, first, unroll, plan):
            h = stages.advance(row, h, fixed, plan).h
            y = stages.dot(row.C, h, plan) + fixed.D * row.u
            if row.z is not None:
                y *= row.z * stages.sigmoid(row.z, plan)
            compat.store(here.sequence(out.y, row.t), y, row.valid)
        return h

    def one_chunk(c, h):
        if out.boundaries is not None:
            for slab, part in zip(plan.slabs, h):
                compat.store(here.boundary(out.boundaries, c, slab), part)
        first = c * chunk
        turns = stages.turns(first, unroll, plan)
        return stages.for_steps(turns, lambda i, h: steps(first + i * unroll, h), h)

    h = tuple(here.state(refs.initial_state, slab)[...] for slab in plan.slabs)
    h = stages.for_steps(chunks(plan.sizes.l), one_chunk, h)
    for slab, part in zip(plan.slabs, h):
        compat.store(here.state(out.last_state, slab), part)
