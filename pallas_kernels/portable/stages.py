"""The small steps that both portable kernels are made of, and where in global memory a program reads and writes.

A tile is (n, channels), or (channels, n) with `states_last`; both are written (n, channels) below. Time runs in a loop;
rows are read from references, step by step, since Triton cannot slice values. References are to whole arrays, padded to
whole blocks by the caller: nothing lies outside.
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

    Channels are split into (g, r). B and C that are constant over time are like A.
    """

    u: Any  # (b, l, g, r)
    delta: Any  # (b, l, g, r)
    A: Any  # (n, g, r), or (g, r, n) with `states_last`
    B: Any  # (b, l, g, n), or like A
    C: Any  # (b, l, g, n), or like A
    D: Any  # (g, r)
    z: Any  # (b, l, g, r) or None
    delta_bias: Any  # (g, r)
    initial_state: Any  # (b, n, g, r), or (b, g, r, n) with `states_last`
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
    states_last: bool

    def sequence(self, ref, t: jax.Array):
        """Step t of a (b, l, g, r) array: (channels,)."""
        return ref.at[self.b, t, self.g, self.channels]

    def projection(self, ref, t: jax.Array):
        """Step t of a (b, l, g, n) array: (n,)."""
        return ref.at[self.b, t, self.g, :]

    def parameter(self, ref):
        """The tile of an array like A, or the (channels,) of a (g, r) array."""
        return ref.at[self.g, self.channels] if self.states_last else ref.at[..., self.g, self.channels]

    def state(self, ref):
        """The tile of an array like initial_state, or the (channels,) of a (b, g, r) array."""
        index = (self.g, self.channels) if self.states_last else (..., self.g, self.channels)
        return ref.at[(self.b, *index)]

    def boundary(self, ref, chunk: jax.Array):
        """The state before a chunk: (n, channels), whatever a tile is."""
        return ref.at[self.b, chunk, :, self.g, self.channels]

    def partial(self, ref, t: jax.Array):
        """Step t of a (b, g, blocks, l, n) array: (n,)."""
        return ref.at[self.b, self.g, self.block, t, :]


def place(plan: Plan) -> Place:
    """This program's place."""
    channels = plan.tiling.channels
    b, g, block = (pl.program_id(axis) for axis in range(3))
    return Place(b, g, block, pl.ds(block * channels, channels), plan.tiling.states_last)


def by_channel(row: jax.Array, plan: Plan) -> jax.Array:
    """(channels,) made ready to meet a tile."""
    return row[:, None] if plan.tiling.states_last else row[None, :]


def by_state(row: jax.Array, plan: Plan) -> jax.Array:
    """(n,) made ready to meet a tile."""
    return row[None, :] if plan.tiling.states_last else row[:, None]


def sum_states(tile: jax.Array, plan: Plan) -> jax.Array:
    """(n, channels) -> (channels,)"""
    return jnp.sum(tile, axis=1 if plan.tiling.states_last else 0)


def sum_channels(tile: jax.Array, plan: Plan) -> jax.Array:
    """(n, channels) -> (n,)"""
    return jnp.sum(tile, axis=0 if plan.tiling.states_last else 1)


def turned(tile: jax.Array, plan: Plan) -> jax.Array:
    """A tile as (n, channels), or back."""
    return tile.T if plan.tiling.states_last else tile


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


class Row(NamedTuple):
    """One time step as a program reads it, widened. B and C are (n, 1), or (n, channels) if constant over time."""

    t: jax.Array
    valid: jax.Array | None  # False past the end of the length, where all else reads as zero; None if t cannot be there
    u: jax.Array  # (channels,)
    raw: jax.Array  # (channels,): delta + delta_bias
    B: jax.Array
    C: jax.Array
    z: jax.Array | None  # (channels,)
    reset: jax.Array | None  # scalar
    dy: Any  # (channels,); None on the way forward


def read(refs: Values, dy_ref, fixed: Parameters, here: Place, first: jax.Array, count: int, plan: Plan) -> list[Row]:
    """`count` steps from `first` on. Reading them all before anything is computed hides the memory's latency."""

    def one(t: jax.Array) -> Row:
        valid = t < plan.sizes.l if plan.sizes.l % count else None

        def load(ref):
            return compat.load(ref, valid).astype(plan.wide)

        return Row(
            t=t,
            valid=valid,
            u=load(here.sequence(refs.u, t)),
            raw=load(here.sequence(refs.delta, t)) + fixed.delta_bias,
            B=by_state(load(here.projection(refs.B, t)), plan) if fixed.B is None else fixed.B,
            C=by_state(load(here.projection(refs.C, t)), plan) if fixed.C is None else fixed.C,
            z=None if refs.z is None else load(here.sequence(refs.z, t)),
            reset=None if refs.reset is None else compat.load(refs.reset.at[here.b, t], valid) != 0,
            dy=None if dy_ref is None else load(here.sequence(dy_ref, t)),
        )

    return [one(first + i) for i in range(count)]


def rate(plan: Plan) -> float:
    """Factor on A: a GPU has only a base-2 exponential, XLA on a CPU computes that from the natural one."""
    return 1.0 if plan.tiling.interpreted else LOG2_E


def decay(Delta: jax.Array, A: jax.Array, plan: Plan) -> jax.Array:
    """exp(Delta A) of a step, (n, channels), from A scaled by `rate`."""
    exponent = by_channel(Delta, plan) * A
    return jnp.exp(exponent) if plan.tiling.interpreted else compat.fast_exp2(exponent)


def multiply_add(x: jax.Array, y: jax.Array, z: jax.Array, plan: Plan) -> jax.Array:
    """x y + z; XLA on a CPU fuses it by itself."""
    return x * y + z if plan.tiling.interpreted else compat.fused_multiply_add(x, y, z)


def step_size(row: Row, plan: Plan) -> jax.Array:
    """Delta from delta + delta_bias; exactly 0 on steps past the end, so that they leave the state alone."""
    raw = row.raw
    Delta = jnp.maximum(raw, 0) + _log1p_exp(-jnp.abs(raw), plan) if plan.softplus else raw
    return Delta if row.valid is None else jnp.where(row.valid, Delta, 0)


# atanh(s) / s as a polynomial in s^2 on [0, 1/9]: least squares at Chebyshev points, relative error 4e-9.
_ATANH = (1, 0.33333158, 0.200124269, 0.139807094, 0.140873286)


def _log1p_exp(x: jax.Array, plan: Plan) -> jax.Array:
    """log(1 + exp(x)) for x <= 0, also where it is tiny: Delta is often near 1e-3, where log(1 + .) has few right bits.

    On a GPU as 2 atanh(s), s = e / (2 + e): 10 instructions where libdevice's log1p takes 20.
    """
    if plan.tiling.interpreted:
        return jnp.log1p(jnp.exp(x))
    e = compat.fast_exp2(x * LOG2_E)
    s = e * compat.fast_reciprocal(2 + e)
    square = s * s
    series = jnp.full_like(s, _ATANH[-1])
    for coefficient in _ATANH[-2::-1]:
        series = compat.fused_multiply_add(series, square, jnp.full_like(s, coefficient))
    return 2 * s * series


def sigmoid(x: jax.Array, plan: Plan) -> jax.Array:
    """1 / (1 + exp(-x))"""
    if plan.tiling.interpreted:
        return jax.nn.sigmoid(x)
    return compat.fast_reciprocal(1 + compat.fast_exp2(x * -LOG2_E))


def restart(row: Row, state: jax.Array) -> jax.Array:
    """The state as a step finds it, or the gradient it sends back: zero where a document begins."""
    return state if row.reset is None else jnp.where(row.reset, 0, state)


class Advanced(NamedTuple):
    """A step done."""

    Delta: jax.Array  # (channels,)
    a: jax.Array  # (n, channels)
    before: jax.Array  # (n, channels): the state that the step started from, after a reset
    h: jax.Array  # (n, channels): the state after the step


def advance(row: Row, h: jax.Array, fixed: Parameters, plan: Plan) -> Advanced:
    """h_t = exp(Delta_t A) h_{t-1} + B_t Delta_t u_t"""
    Delta = step_size(row, plan)
    a, before = decay(Delta, fixed.A, plan), restart(row, h)
    return Advanced(Delta, a, before, multiply_add(a, before, row.B * by_channel(Delta * row.u, plan), plan))


def turns(first: jax.Array, count: int, plan: Plan) -> jax.Array:
    """How often `count` steps fit, begun or whole, into the chunk that starts at `first` (`pl.cdiv` fails in x64)."""
    return (jnp.minimum(plan.sizes.l - first, plan.tiling.chunk) + (count - 1)) // count


def for_steps(count, body: Callable, carry):
    """`lax.fori_loop` from 0 with a 32-bit counter, also under x64."""
    return lax.fori_loop(jnp.int32(0), jnp.asarray(count, jnp.int32), body, carry)
