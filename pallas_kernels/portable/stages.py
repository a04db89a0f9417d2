"""The small steps that both portable kernels are made of, and the blocks of global memory that a program sees.

A tile is (n, channels). Time runs in a loop; each array's rows are read from its reference, one step at a time, since Triton cannot slice values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.tiling import Sizes, Tiling

LOG2_E = math.log2(math.e)


class Values(NamedTuple):
    """The scan's inputs in the kernels' layout, or references to a program's blocks of them, or their block specs.

    Channels are split into (g, r). B and C that are constant over time are (n, g, r), like A.
    """

    u: jax.Array  # (b, l, g, r)
    delta: jax.Array  # (b, l, g, r)
    A: jax.Array  # (n, g, r)
    B: jax.Array  # (b, l, g, n) or (n, g, r)
    C: jax.Array  # (b, l, g, n) or (n, g, r)
    D: jax.Array  # (g, r)
    z: jax.Array | None  # (b, l, g, r)
    delta_bias: jax.Array  # (g, r)
    initial_state: jax.Array  # (b, n, g, r)
    reset: jax.Array | None  # (b, l) int32


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static that a kernel depends on."""

    sizes: Sizes
    tiling: Tiling
    wide: jnp.dtype  # of the arithmetic
    constant_B: bool
    constant_C: bool
    softplus: bool

    @property
    def grid(self) -> tuple[int, int, int]:
        """Batch rows first: the other axes of a GPU's grid end at 65535."""
        return self.sizes.b, self.sizes.g, self.tiling.blocks(self.sizes)


class Masks(NamedTuple):
    """Which entries of a block exist; None means all."""

    channels: jax.Array | None  # (channels,)
    states: jax.Array | None  # (n,)
    tile: jax.Array | None  # (n, channels)


# -- blocks ------------------------------------------------------------------------------------------------------------


def sequence_spec(plan: Plan) -> pl.BlockSpec:
    """A program's (l, channels) of a (b, l, g, r) array."""
    return pl.BlockSpec((None, plan.sizes.l, None, plan.tiling.channels), lambda b, g, j: (b, 0, g, j))


def projection_spec(plan: Plan) -> pl.BlockSpec:
    """A program's (l, n) of a (b, l, g, n) array."""
    return pl.BlockSpec((None, plan.sizes.l, None, plan.tiling.states), lambda b, g, j: (b, 0, g, 0))


def parameter_spec(plan: Plan) -> pl.BlockSpec:
    """A program's (n, channels) of an (n, g, r) array."""
    return pl.BlockSpec((plan.tiling.states, None, plan.tiling.channels), lambda b, g, j: (0, g, j))


def state_spec(plan: Plan) -> pl.BlockSpec:
    """A program's (n, channels) of a (b, n, g, r) array."""
    return pl.BlockSpec((None, plan.tiling.states, None, plan.tiling.channels), lambda b, g, j: (b, 0, g, j))


def boundaries_spec(plan: Plan, count: int) -> pl.BlockSpec:
    """A program's (chunks, n, channels) of a (b, chunks, n, g, r) array."""
    block = (None, count, plan.tiling.states, None, plan.tiling.channels)
    return pl.BlockSpec(block, lambda b, g, j: (b, 0, 0, g, j))


def values_specs(values: Values, plan: Plan) -> Values:
    """The block specs of all inputs."""
    sequence, channel = sequence_spec(plan), pl.BlockSpec((None, plan.tiling.channels), lambda b, g, j: (g, j))
    varying, constant = projection_spec(plan), parameter_spec(plan)
    return Values(
        u=sequence,
        delta=sequence,
        A=constant,
        B=constant if plan.constant_B else varying,
        C=constant if plan.constant_C else varying,
        D=channel,
        z=None if values.z is None else sequence,
        delta_bias=channel,
        initial_state=state_spec(plan),
        reset=None if values.reset is None else pl.BlockSpec((None, plan.sizes.l), lambda b, g, j: (b, 0)),
    )


def masks(plan: Plan) -> Masks:
    """What exists of this program's block: its last channels and states may lie outside."""
    sizes, tiling = plan.sizes, plan.tiling
    channels = states = tile = None
    if sizes.r % tiling.channels:
        channels = pl.program_id(2) * tiling.channels + jnp.arange(tiling.channels, dtype=jnp.int32) < sizes.r
    if sizes.n != tiling.states:
        states = jnp.arange(tiling.states, dtype=jnp.int32) < sizes.n
    if channels is not None:
        tile = jnp.broadcast_to(channels[None, :], (tiling.states, tiling.channels))
    if states is not None:
        rows = jnp.broadcast_to(states[:, None], (tiling.states, tiling.channels))
        tile = rows if tile is None else rows & tile
    return Masks(channels, states, tile)


def within(mask: Masks, valid: jax.Array | None, plan: Plan) -> Masks:
    """The masks of a row of time step t, where the scalar `valid` is False if that step does not exist."""
    if valid is None:
        return mask
    channels, states = jnp.broadcast_to(valid, (plan.tiling.channels,)), jnp.broadcast_to(valid, (plan.tiling.states,))
    return Masks(
        channels if mask.channels is None else mask.channels & channels,
        states if mask.states is None else mask.states & states,
        mask.tile,
    )


# -- stages ------------------------------------------------------------------------------------------------------------


class Parameters(NamedTuple):
    """What a program keeps in registers for the whole length."""

    A: jax.Array  # (n, channels), scaled for `decay`
    D: jax.Array  # (channels,)
    delta_bias: jax.Array  # (channels,)
    B: jax.Array | None  # (n, channels) if constant
    C: jax.Array | None  # (n, channels) if constant


def parameters(refs: Values, mask: Masks, plan: Plan) -> Parameters:
    """Read what does not depend on time."""

    def tile(ref):
        return compat.load(ref, mask.tile).astype(plan.wide)

    return Parameters(
        A=tile(refs.A) * rate(plan),
        D=compat.load(refs.D, mask.channels),
        delta_bias=compat.load(refs.delta_bias, mask.channels),
        B=tile(refs.B) if plan.constant_B else None,
        C=tile(refs.C) if plan.constant_C else None,
    )


def rate(plan: Plan) -> float:
    """Factor on A: a GPU has only a base-2 exponential, XLA on a CPU computes that from the natural one."""
    return 1.0 if plan.tiling.interpreted else LOG2_E


def decay(Delta: jax.Array, A: jax.Array, plan: Plan) -> jax.Array:
    """exp(Delta A) of a step, (n, channels), from A scaled by `rate`."""
    exponential = jnp.exp if plan.tiling.interpreted else jnp.exp2
    return exponential(Delta[None, :] * A)


def row(ref, t: jax.Array, mask: jax.Array | None, plan: Plan) -> jax.Array:
    """Step t of a block with time in front, widened."""
    return compat.load(ref.at[t], mask).astype(plan.wide)


def step_size(raw: jax.Array, valid: jax.Array | None, plan: Plan) -> jax.Array:
    """Delta from delta + delta_bias; exactly 0 on steps past the end, so that they leave the state alone."""
    # log1p, since Delta is often near 1e-3, where log(1 + x) has few right bits on a GPU
    Delta = jnp.maximum(raw, 0) + jnp.log1p(jnp.exp(-jnp.abs(raw))) if plan.softplus else raw
    return Delta if valid is None else jnp.where(valid, Delta, 0)


def projection(ref, constant: jax.Array | None, t: jax.Array, mask: Masks, plan: Plan) -> jax.Array:
    """B or C of step t, to be multiplied with (n, channels): (n, 1), or the whole tile if it is constant over time."""
    return row(ref, t, mask.states, plan)[:, None] if constant is None else constant


def resets(refs: Values, t: jax.Array, valid: jax.Array | None, state: jax.Array) -> jax.Array:
    """The state as step t finds it, or the gradient it sends back: zero where a document begins."""
    if refs.reset is None:
        return state
    return jnp.where(compat.load(refs.reset.at[t], valid) != 0, 0, state)


def for_steps(count, body: Callable, carry):
    """`lax.fori_loop` from 0 with a 32-bit counter, also under x64."""
    return lax.fori_loop(jnp.int32(0), jnp.asarray(count, jnp.int32), body, carry)
