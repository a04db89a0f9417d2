"""The small steps that both portable kernels are made of, and where in global memory a program reads and writes.

A tile is (n, channels). Time runs in a loop; each array's rows are read from its reference, one step at a time, since Triton
cannot slice values. References are to whole arrays, padded to whole blocks by the caller: no block has anything outside.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import compat
from pallas_kernels.tiling import Sizes, Tiling

LOG2_E = math.log2(math.e)


class Values(NamedTuple):
    """The scan's inputs in the kernels' layout, or references to them.

    Channels are split into (g, r). B and C that are constant over time are (n, g, r), like A.
    """

    u: Any  # (b, l, g, r)
    delta: Any  # (b, l, g, r)
    A: Any  # (n, g, r)
    B: Any  # (b, l, g, n) or (n, g, r)
    C: Any  # (b, l, g, n) or (n, g, r)
    D: Any  # (g, r)
    z: Any  # (b, l, g, r) or None
    delta_bias: Any  # (g, r)
    initial_state: Any  # (b, n, g, r)
    reset: Any  # (b, l) int32 or None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static that a kernel depends on; its sizes are whole blocks."""

    sizes: Sizes
    tiling: Tiling
    wide: jnp.dtype  # of the arithmetic
    constant_B: bool
    constant_C: bool
    softplus: bool

    @property
    def grid(self) -> tuple[int, int, int]:
        """Batch rows first: the other axes of a GPU's grid end at 65535."""
        return self.sizes.b, self.sizes.g, self.sizes.r // self.tiling.channels


class Place(NamedTuple):
    """Where a program works."""

    b: jax.Array
    g: jax.Array
    block: jax.Array  # of channels, within the group
    channels: Any  # the slice of them

    def sequence(self, ref, t: jax.Array):
        """Step t of a (b, l, g, r) array: (channels,)."""
        return ref.at[self.b, t, self.g, self.channels]

    def projection(self, ref, t: jax.Array):
        """Step t of a (b, l, g, n) array: (n,)."""
        return ref.at[self.b, t, self.g, :]

    def parameter(self, ref):
        """The tile of an (n, g, r) array, or the (channels,) of a (g, r) array."""
        return ref.at[..., self.g, self.channels]

    def state(self, ref, *chunk):
        """The tile of a (b, n, g, r) or (b, chunks, n, g, r) array, or the (channels,) of a (b, g, r) array."""
        return ref.at[(self.b, *chunk, ..., self.g, self.channels)]

    def partial(self, ref, t: jax.Array):
        """Step t of a (b, g, blocks, l, n) array: (n,)."""
        return ref.at[self.b, self.g, self.block, t, :]


def place(plan: Plan) -> Place:
    """This program's place."""
    b, g, block = (pl.program_id(axis) for axis in range(3))
    return Place(b, g, block, pl.ds(block * plan.tiling.channels, plan.tiling.channels))


class Parameters(NamedTuple):
    """What a program keeps in registers for the whole length."""

    A: jax.Array  # (n, channels), scaled for `decay`
    D: jax.Array  # (channels,)
    delta_bias: jax.Array  # (channels,)
    B: jax.Array | None  # (n, channels) if constant
    C: jax.Array | None  # (n, channels) if constant


def parameters(refs: Values, here: Place, plan: Plan) -> Parameters:
    """Read what does not depend on time."""

    def read(ref):
        return here.parameter(ref)[...].astype(plan.wide)

    return Parameters(
        A=read(refs.A) * rate(plan),
        D=read(refs.D),
        delta_bias=read(refs.delta_bias),
        B=read(refs.B) if plan.constant_B else None,
        C=read(refs.C) if plan.constant_C else None,
    )


def rate(plan: Plan) -> float:
    """Factor on A: a GPU has only a base-2 exponential, XLA on a CPU computes that from the natural one."""
    return 1.0 if plan.tiling.interpreted else LOG2_E


def decay(Delta: jax.Array, A: jax.Array, plan: Plan) -> jax.Array:
    """exp(Delta A) of a step, (n, channels), from A scaled by `rate`."""
    exponential = jnp.exp if plan.tiling.interpreted else jnp.exp2
    return exponential(Delta[None, :] * A)


def row(ref, valid: jax.Array | None, plan: Plan) -> jax.Array:
    """The values of one step, widened; zero if the step does not exist."""
    return compat.load(ref, valid).astype(plan.wide)


def step_size(raw: jax.Array, valid: jax.Array | None, plan: Plan) -> jax.Array:
    """Delta from delta + delta_bias; exactly 0 on steps past the end, so that they leave the state alone."""
    # log1p, since Delta is often near 1e-3, where log(1 + x) has few right bits on a GPU
    Delta = jnp.maximum(raw, 0) + jnp.log1p(jnp.exp(-jnp.abs(raw))) if plan.softplus else raw
    return Delta if valid is None else jnp.where(valid, Delta, 0)


def projection(ref, constant: jax.Array | None, here: Place, t: jax.Array, valid, plan: Plan) -> jax.Array:
    """B or C of step t, to be multiplied with a tile: (n, 1), or the whole tile if it is constant over time."""
    return row(here.projection(ref, t), valid, plan)[:, None] if constant is None else constant


def resets(refs: Values, here: Place, t: jax.Array, valid: jax.Array | None, state: jax.Array) -> jax.Array:
    """The state as step t finds it, or the gradient it sends back: zero where a document begins."""
    if refs.reset is None:
        return state
    return jnp.where(compat.load(refs.reset.at[here.b, t], valid) != 0, 0, state)


def for_steps(count, body: Callable, carry):
    """`lax.fori_loop` from 0 with a 32-bit counter, also under x64."""
    return lax.fori_loop(jnp.int32(0), jnp.asarray(count, jnp.int32), body, carry)
