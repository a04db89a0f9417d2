"""The forward kernel of the portable pair.

Grid (b, g, channel blocks of a group). A program owns one batch row and one block of channels, over the whole length.
Registers: the state (n, channels), A, and a row of each input. Global memory: each input and output passes once, B and C once for each channel block;
the state before every chunk is written for the backward pass. Accumulation in float32 (float64 if the inputs are wide).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.portable import stages
from pallas_kernels.portable.stages import Plan, Values
from pallas_kernels.tiling import chunks


class Results(NamedTuple):
    """What the forward kernel returns, or references to a program's blocks of it."""

    y: jax.Array  # (b, l, g, r), u's dtype
    last_state: jax.Array  # (b, n, g, r)
    boundaries: (
        jax.Array | None
    )  # (b, chunks, n, g, r): the state before each chunk; None if no gradient will be asked for


def forward(values: Values, plan: Plan, *, keep_states: bool) -> Results:
    """Run the kernel: y, the last state and, if wanted, the states at chunk boundaries."""
    s, count = plan.sizes, chunks(plan.sizes.l)
    shape = jax.ShapeDtypeStruct
    specs, shapes = (
        [stages.sequence_spec(plan), stages.state_spec(plan)],
        [
            shape((s.b, s.l, s.g, s.r), values.u.dtype),
            shape((s.b, s.n, s.g, s.r), plan.wide),
        ],
    )
    if keep_states:
        specs.append(stages.boundaries_spec(plan, count))
        shapes.append(shape((s.b, count, s.n, s.g, s.r), plan.wide))
    results = pl.pallas_call(
        functools.partial(_kernel, plan=plan),
        grid=plan.grid,
        in_specs=[stages.values_specs(values, plan)],
        out_specs=specs,
        out_shape=shapes,
        interpret=plan.tiling.interpreted,
        compiler_params=compat.triton_params(plan.tiling.num_warps, plan.tiling.num_stages),
        name="selective_scan_forward",
    )(values)
    return Results(*results, *(() if keep_states else (None,)))


def _kernel(refs: Values, y_ref, last_ref, boundaries_ref=None, *, plan: Plan) -> None:
    mask = stages.masks(plan)
    fixed = stages.parameters(refs, mask, plan)
    chunk, length = plan.tiling.chunk, plan.sizes.l

    def step(t, h):
        u = stages.row(refs.u, t, mask.channels, plan)
        Delta = stages.step_size(stages.row(refs.delta, t, mask.channels, plan) + fixed.delta_bias, None, plan)
        B = stages.projection(refs.B, fixed.B, t, mask, plan)
        C = stages.projection(refs.C, fixed.C, t, mask, plan)
        h = stages.decay(Delta, fixed.A, plan) * stages.resets(refs, t, None, h) + B * (Delta * u)[None, :]
        y = jnp.sum(C * h, axis=0) + fixed.D * u
        if refs.z is not None:
            y *= jax.nn.silu(stages.row(refs.z, t, mask.channels, plan))
        compat.store(y_ref.at[t], y, mask.channels)
        return h

    def one_chunk(c, h):
        if boundaries_ref is not None:
            compat.store(boundaries_ref.at[c], h, mask.tile)
        first = c * chunk
        return stages.for_steps(jnp.minimum(length - first, chunk), lambda i, h: step(first + i, h), h)

    h = stages.for_steps(chunks(length), one_chunk, compat.load(refs.initial_state, mask.tile))
    compat.store(last_ref, h, mask.tile)
