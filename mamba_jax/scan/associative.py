"""The associative form: a parallel scan over pairs (decay, drive) in a chunk, the state carried from chunk to chunk.

    (a, x) then (a', x')  =  (a' a, a' x + x')

Decays are only multiplied, never divided by their running product: strong decay underflows to zero and stays right.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from mamba_jax.scan.chunked import chunked_scan
from mamba_jax.scan.inputs import ScanInputs
from pallas_kernels.device import target_platform

CPU_CHUNK = 16
"""16 steps compile in 0.7 of the time that 64 take, and run in 1.2 to 1.3 times theirs (jax 0.10.2), or as fast (0.12).

Measured on 2 cores at (2, 1024, 1536, 16), forward and with gradients, 2026-12-02.
"""

CHUNK = 64
"""Elsewhere: depth 6 for 64 steps; a chunk of 64 of (8, l, 2048, 16) in float32 is 64 MiB an array."""


def scan(inputs: ScanInputs) -> tuple[jax.Array, jax.Array]:
    """The selective scan as a parallel prefix (paper, section 3.3.2; Blelloch 1990): y in u's dtype, last_state."""
    return chunked_scan(inputs, advance, chunk=CPU_CHUNK if target_platform() == "cpu" else CHUNK)


def advance(h, Delta, drive, A, B, C, reset) -> tuple[jax.Array, jax.Array]:
    """One chunk of one block, as `chunked.Advance` says."""
    together = lax.optimization_barrier
    a = jnp.exp(Delta * A)
    if reset is not None:
        a = jnp.where(reset.reshape(-1, *(1 for _ in A.shape)), 0, a)
    # XLA would fuse what is made here into each slice that the scan takes of it, and what the scan makes into the sum
    # over states: the same exponentials and products several times over. With jax 0.12 that took 3 times as long.
    a, x = together((a, B * drive))
    a, x = together(lax.associative_scan(combine, (a, x)))
    h = together(a * h + x)
    y = jnp.sum(C * h, axis=1)
    return 2 * y.real if jnp.iscomplexobj(y) else y, h[-1]


def combine(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Two stretches of time one after the other, each a (decay, drive) pair."""
    (a, x), (a_next, x_next) = first, second
    return a_next * a, a_next * x + x_next
