"""The associative form: a parallel scan over pairs (decay, drive) in a chunk, the state carried from chunk to chunk.

    (a, x) then (a', x')  =  (a' a, a' x + x')

An element is one step, or on a CPU a segment of steps, as in Blelloch's scan for fewer processors than elements.
Decays are only multiplied, never divided by their running product: strong decay underflows to zero and stays right.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from mamba_jax.scan import sequential
from mamba_jax.scan.chunked import chunked_scan
from mamba_jax.scan.inputs import ScanInputs
from pallas_kernels.device import target_platform

CHUNK = 64
"""Depth 6 where an element is a step; a chunk of 64 of (8, l, 2048, 16) in float32 is 64 MiB an array."""

SEGMENTS = 4
"""Of a chunk on a CPU, in blocks of a quarter of the channels: all four at once are as much as a step of `sequential`.

Measured on 2 cores at (2, 1024, 1536, 16), 2026-12-02: a step an element, in chunks of 16, took 4 times as long forward
and twice as long with gradients with jax 0.10.2, 1.4 times and as long with 0.12. With 4 segments of 128 channels and
not 32, XLA hands the sums of each step to a library whose calls cost more than the step: 1.4 to 2.2 times as long with
gradients.
"""


def scan(inputs: ScanInputs) -> tuple[jax.Array, jax.Array]:
    """The selective scan as a parallel prefix (paper, section 3.3.2; Blelloch 1990): y in u's dtype, last_state."""
    if target_platform() == "cpu":
        return chunked_scan(inputs, advance_segments, chunk=CHUNK, widest=128 // SEGMENTS)
    return chunked_scan(inputs, advance, chunk=CHUNK)


def advance(h, Delta, drive, A, B, C, reset) -> tuple[jax.Array, jax.Array]:
    """One chunk of one block, as `chunked.Advance` says, a step an element."""
    together = lax.optimization_barrier
    a = _decays(Delta, A, reset)
    # XLA would fuse what is made here into each slice that the scan takes of it, and what the scan makes into the sum
    # over states: the same exponentials and products several times over. With jax 0.12 that took 3 times as long.
    a, x = together((a, B * drive))
    a, x = together(lax.associative_scan(combine, (a, x)))
    h = together(a * h + x)
    y = jnp.sum(C * h, axis=1)
    return 2 * y.real if jnp.iscomplexobj(y) else y, h[-1]


def advance_segments(h, Delta, drive, A, B, C, reset) -> tuple[jax.Array, jax.Array]:
    """One chunk of one block, as `chunked.Advance` says, a segment an element.

    Each segment is scanned from zero for its pair, the pairs in a tree, then each segment from its true state: what is
    sequential is as long as two segments, and all segments are done together.
    """
    t = Delta.shape[0]
    steps = -(-t // SEGMENTS)
    segments = -(-t // steps)

    def cut(v: jax.Array) -> jax.Array:
        """(t, ...) -> (segments, steps, ...), with steps of size zero at the end, which leave the state as it is."""
        v = jnp.pad(v, [(0, segments * steps - t), *[(0, 0)] * (v.ndim - 1)])
        return v.reshape(segments, steps, *v.shape[1:])

    constant = {name: m for name, m in {"B": B, "C": C}.items() if m.shape[0] == 1}
    varying = {name: m for name, m in {"B": B, "C": C}.items() if name not in constant}
    varying = jax.tree.map(cut, varying | {"Delta": Delta, "drive": drive, "reset": reset})

    def advance_one(h: jax.Array, segment: dict) -> tuple[jax.Array, jax.Array]:
        return sequential.advance(h, A=A, **constant, **segment)

    _, x = jax.vmap(advance_one, in_axes=(None, 0))(jnp.zeros_like(h), varying)
    reset = None if reset is None else jnp.any(varying["reset"], axis=1)
    a = _decays(jnp.sum(varying["Delta"], axis=1), A, reset)
    a, x = lax.associative_scan(combine, lax.optimization_barrier((a, x)))
    after = a * h + x
    y, _ = jax.vmap(advance_one)(jnp.concatenate([h[None], after[:-1]]), varying)
    return y.reshape(-1, *y.shape[2:])[:t], after[-1]


def combine(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Two stretches of time one after the other, each a (decay, drive) pair."""
    (a, x), (a_next, x_next) = first, second
    return a_next * a, a_next * x + x_next


def _decays(Delta: jax.Array, A: jax.Array, reset: jax.Array | None) -> jax.Array:
    """exp(Delta A) (t, n, ...) of stretches that take Delta (t, 1, ...) each; zero where a document begins in one."""
    a = jnp.exp(Delta * A)
    return a if reset is None else jnp.where(reset.reshape(-1, *(1 for _ in A.shape)), 0, a)
