"""The small steps that both portable kernels are made of, and where in global memory a program reads and writes.

A state is a tuple of slabs. The interpreter has one, (n, channels), so that a step is few operations on whole arrays.
Triton has n of them, (channels,) each, one or two channels a thread: sums over states then need nothing from other
threads, and what belongs to a channel is computed once. A slab meets a (channels,) row as it is, and its part of B or C
is (n, 1) or a scalar, or like the slab where B or C is constant over time.

Time runs in a loop; rows are read from references, step by step, since Triton cannot slice values. References are to
whole arrays, padded to whole blocks by the caller: nothing lies outside.
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
from jax.experimental.pallas import triton

from pallas_kernels import compat
from pallas_kernels.portable import assembly
from pallas_kernels.tiling import Sizes, Tiling

LOG2_E = math.log2(math.e)

State = tuple[jax.Array, ...]  # of slabs


class Values(NamedTuple):
    """The scan's inputs in the kernels' layout, or references to them.

    Channels are split into (g, r). B and C that are constant over time are like A.
    """

    u: Any  # (b, l, g, r)
    delta: Any  # (b, l, g, r)
    A: Any  # (n, g, r)
    B: Any  # (b, l, g, n), wide, or like A
    C: Any  # (b, l, g, n), wide, or like A
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
    def slabs(self) -> tuple[Any, ...]:
        """Where each slab of a state lies on an axis of states."""
        return (slice(None),) if self.tiling.interpreted else tuple(range(self.sizes.n))

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

    def projection(self, ref, t: jax.Array, slab):
        """A slab's part of step t of a (b, l, g, n) array: (n,) or a scalar."""
        return ref.at[self.b, t, self.g, slab]

    def row(self, ref):
        """The (channels,) of a (g, r) array."""
        return ref.at[self.g, self.channels]

    def parameter(self, ref, slab):
        """A slab of an array like A."""
        return ref.at[slab, self.g, self.channels]

    def state(self, ref, slab):
        """A slab of an array like initial_state."""
        return ref.at[self.b, slab, self.g, self.channels]

    def boundary(self, ref, chunk: jax.Array, slab):
        """A slab of the state before a chunk."""
        return ref.at[self.b, chunk, slab, self.g, self.channels]


def place(plan: Plan) -> Place:
    """This program's place."""
    channels = plan.tiling.channels
    b, g, block = (pl.program_id(axis) for axis in range(3))
    return Place(b, g, block, pl.ds(block * channels, channels))


class Parameters(NamedTuple):
    """What a program keeps in registers for the whole length."""

    A: State  # scaled for `decay`
    D: jax.Array  # (channels,)
    delta_bias: jax.Array  # (channels,)
    B: State | None  # if constant
    C: State | None  # if constant


def parameters(refs: Values, here: Place, plan: Plan) -> Parameters:
    """Read what does not depend on time."""

    def state(ref) -> State:
        return tuple(here.parameter(ref, slab)[...].astype(plan.wide) for slab in plan.slabs)

    return Parameters(
        A=tuple(A * rate(plan) for A in state(refs.A)),
        D=here.row(refs.D)[...].astype(plan.wide),
        delta_bias=here.row(refs.delta_bias)[...].astype(plan.wide),
        B=state(refs.B) if plan.constant_B else None,
        C=state(refs.C) if plan.constant_C else None,
    )


class Row(NamedTuple):
    """One time step as a program reads it, widened."""

    t: jax.Array
    valid: jax.Array | None  # False past the end of the length, where all else reads as zero; None if t cannot be there
    u: jax.Array  # (channels,)
    raw: jax.Array  # (channels,): delta + delta_bias
    B: State  # by slab
    C: State
    z: jax.Array | None  # (channels,)
    reset: jax.Array | None  # scalar
    dy: Any  # (channels,); None on the way forward


def read(refs: Values, dy_ref, fixed: Parameters, here: Place, first: jax.Array, count: int, plan: Plan) -> list[Row]:
    """`count` steps from `first` on. Reading them all before anything is computed hides the memory's latency."""

    def one(t: jax.Array) -> Row:
        valid = t < plan.sizes.l if plan.sizes.l % count else None

        def load(ref):
            return compat.load(ref, valid).astype(plan.wide)

        def projection(ref) -> State:
            parts = (load(here.projection(ref, t, slab)) for slab in plan.slabs)
            return tuple(part[:, None] if part.ndim else part for part in parts)

        return Row(
            t=t,
            valid=valid,
            u=load(here.sequence(refs.u, t)),
            raw=load(here.sequence(refs.delta, t)) + fixed.delta_bias,
            B=projection(refs.B) if fixed.B is None else fixed.B,
            C=projection(refs.C) if fixed.C is None else fixed.C,
            z=None if refs.z is None else load(here.sequence(refs.z, t)),
            reset=None if refs.reset is None else compat.load(refs.reset.at[here.b, t], valid) != 0,
            dy=None if dy_ref is None else load(here.sequence(dy_ref, t)),
        )

    return [one(first + i) for i in range(count)]


def rate(plan: Plan) -> float:
    """Factor on A: a GPU has only a base-2 exponential, XLA on a CPU computes that from the natural one."""
    return 1.0 if plan.tiling.interpreted else LOG2_E


def decay(Delta: jax.Array, A: jax.Array, plan: Plan) -> jax.Array:
    """exp(Delta A) of a step for a slab, from A scaled by `rate`."""
    exponent = Delta * A
    return jnp.exp(exponent) if plan.tiling.interpreted else assembly.exp2(exponent)


def multiply_add(x: jax.Array, y: jax.Array, z: jax.Array, plan: Plan) -> jax.Array:
    """x y + z; XLA on a CPU fuses it by itself."""
    return x * y + z if plan.tiling.interpreted else assembly.multiply_add(x, y, z)


def dot(left: State, right: State, plan: Plan) -> jax.Array:
    """sum_n left right: (channels,)."""
    total = left[0] * right[0]
    for a, b in zip(left[1:], right[1:]):
        total = multiply_add(a, b, total, plan)
    return jnp.sum(total, axis=0) if plan.tiling.interpreted else total


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
    e = assembly.exp2(x * LOG2_E)
    s = e * assembly.reciprocal(2 + e)
    square = s * s
    series = jnp.full_like(s, _ATANH[-1])
    for coefficient in _ATANH[-2::-1]:
        series = assembly.multiply_add(series, square, jnp.full_like(s, coefficient))
    return 2 * s * series


def sigmoid(x: jax.Array, plan: Plan) -> jax.Array:
    """1 / (1 + exp(-x))"""
    if plan.tiling.interpreted:
        return jax.nn.sigmoid(x)
    return assembly.reciprocal(1 + assembly.exp2(x * -LOG2_E))


def restart(row: Row, state: jax.Array) -> jax.Array:
    """The state as a step finds it, or the gradient it sends back: zero where a document begins."""
    return state if row.reset is None else jnp.where(row.reset, 0, state)


class Advanced(NamedTuple):
    """A step done."""

    Delta: jax.Array  # (channels,)
    h: State  # the state after the step


def advance(row: Row, h: State, fixed: Parameters, plan: Plan) -> Advanced:
    """h_t = exp(Delta_t A) h_{t-1} + B_t Delta_t u_t"""
    Delta = step_size(row, plan)
    Delta_u = Delta * row.u

    def one(A, h, B):
        return multiply_add(decay(Delta, A, plan), restart(row, h), B * Delta_u, plan)

    return Advanced(Delta, tuple(one(*slab) for slab in zip(fixed.A, h, row.B)))


def turns(first: jax.Array, count: int, plan: Plan) -> jax.Array:
    """How often `count` steps fit, begun or whole, into the chunk that starts at `first` (`pl.cdiv` fails in x64)."""
    return (jnp.minimum(plan.sizes.l - first, plan.tiling.chunk) + (count - 1)) // count


def for_steps(count, body: Callable, carry):
    """`lax.fori_loop` from 0 with a 32-bit counter, also under x64."""
    return lax.fori_loop(jnp.int32(0), jnp.asarray(count, jnp.int32), body, carry)


def store_channel_sums(ref, here: Place, row: Row, products: list[tuple[jax.Array, jax.Array]], plan: Plan) -> None:
    """Write sum_channels x w for each (slab, row) pair (x, w), one after the other, into a step of (b, g, blocks, l,
    sums).
    """

    def place(rows):
        return ref.at[here.b, here.g, here.block, row.t, rows]

    if plan.tiling.interpreted:
        n = plan.sizes.n
        for i, (x, w) in enumerate(products):
            compat.store(place(pl.ds(i * n, n)), jnp.sum(x * w, axis=1), row.valid)
        return
    sums = assembly.channel_sums(products)
    number = lax.iota(jnp.int32, sums.size)
    mask = number < len(products)
    triton.store(place(number), sums, mask=mask if row.valid is None else mask & row.valid)
