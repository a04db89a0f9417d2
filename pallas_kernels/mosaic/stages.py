"""The small steps that the Mosaic kernels are made of. A row is 128 channels, a thread each; a state is a tuple of n
rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import arithmetic
from pallas_kernels.mosaic.launch import Refs
from pallas_kernels.mosaic.operands import ChannelRows, Operands

State = tuple[jax.Array, ...]


class Parameters(NamedTuple):
    """What a program keeps in registers for its whole length."""

    A: State  # scaled by log2(e)
    D: jax.Array
    delta_bias: jax.Array
    B: State | None  # if constant
    C: State | None  # if constant


def read_parameters(ref, rows: ChannelRows, n: int) -> Parameters:
    """The parameters, from rows of shared memory."""

    def state(first: int | None) -> State | None:
        return None if first is None else read_state(ref, first, n)

    A = read_state(ref, rows.A, n)
    return Parameters(A, ref[rows.D, :], ref[rows.delta_bias, :], state(rows.B), state(rows.C))


def read_state(ref, first: int, n: int) -> State:
    """n rows of shared memory."""
    return tuple(ref[first + k, :] for k in range(n))


def write_state(ref, state: State) -> None:
    """A state into the first rows of shared memory."""
    for k, value in enumerate(state):
        ref[k, :] = value


def row(ref, t: jax.Array | int) -> jax.Array:
    """Step t of a tile, widened."""
    return ref[t, :].astype(jnp.float32)


def step_size(row_of_delta: jax.Array, x: Operands, parameters: Parameters) -> jax.Array:
    """Delta of a step."""
    shifted = row_of_delta + parameters.delta_bias
    return arithmetic.softplus(shifted, x.delta.dtype) if x.softplus else shifted


def projection(constant: State | None, ring, slot: jax.Array, t: jax.Array, n: int):
    """B or C of a step: n scalars from shared memory, or n rows of parameters.

    Read before any arithmetic, the scalars come four to an instruction.
    """
    return constant or [ring[slot, t, k] for k in range(n)]


def before_document(m: Refs, slot: jax.Array, t: jax.Array) -> jax.Array | None:
    """-inf where a document begins at step t, else 0: added to the exponent of a decay, it makes that exactly 0."""
    return None if m.reset is None else m.reset_s[slot, t]


def decays(Delta: jax.Array, A: State, before_document: jax.Array | None) -> Iterator[jax.Array]:
    """exp(Delta A) state by state, or 0 if a document begins; the addition is part of the multiplication, and free."""
    return (jnp.exp2(Delta * a if before_document is None else Delta * a + before_document) for a in A)


def advanced(state: State, decays: Iterable[jax.Array], B, Delta_u: jax.Array) -> State:
    """h_t = exp(Delta A) h_{t-1} + B Delta u."""
    return tuple(a * h + b * Delta_u for a, h, b in zip(decays, state, B, strict=True))


def unroll(l: int) -> int:
    """Steps in a turn of a loop over the steps of a tile: a divisor of every tile's, at most 4.

    A turn costs 7 instructions; 4 steps at once also hide each other's latencies.
    """
    return math.gcd(l, 4)


def for_steps(count, unroll: int, step, carry):
    """`lax.fori_loop` over `count` steps, `unroll` of them a turn, which must divide count."""

    def turn(j, carry):
        for r in range(unroll):
            carry = step(j * unroll + r, carry)
        return carry

    return lax.fori_loop(0, count // unroll, turn, carry)


class Dot:
    """A sum of products, kept as two sums: that halves the chain of additions that depend on each other."""

    def __init__(self, start: jax.Array | None = None):
        self._sums: list[jax.Array] = [] if start is None else [start]
        self._next = 0

    def add(self, left, right) -> None:
        """Add left * right."""
        if len(self._sums) < 2:
            self._sums.append(left * right)
        else:
            self._sums[self._next] += left * right
            self._next = 1 - self._next

    @property
    def sum(self) -> jax.Array:
        """What was added, so far."""
        return self._sums[0] if len(self._sums) == 1 else self._sums[0] + self._sums[1]


def dot(left, right, start: jax.Array) -> jax.Array:
    """start + sum_k left_k right_k."""
    total = Dot(start)
    for a, b in zip(left, right, strict=True):
        total.add(a, b)
    return total.sum
