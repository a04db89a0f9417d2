"""The sequential form: `lax.scan` over time, the definition of the recurrence read from top to bottom."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from mamba_jax.scan.chunked import chunked_scan, over_channels
from mamba_jax.scan.inputs import ScanInputs

CHUNK = 64
"""Steps between kept states: 64 and 32 are equally fast, and 64 keeps half as many.

Measured on 2 cores with AVX2 at (2, 1024, 1536, 16), 2026-12-01.
"""


def scan(inputs: ScanInputs) -> tuple[jax.Array, jax.Array]:
    """The selective scan one step at a time (paper, section 3.2): y in u's dtype, last_state."""
    return chunked_scan(inputs, advance, chunk=CHUNK)


def advance(h, Delta, drive, A, B, C, reset) -> tuple[jax.Array, jax.Array]:
    """One chunk of one block, as `chunked.Advance` says."""

    B_constant, C_constant = (m[0] if m.ndim == 3 else None for m in (B, C))

    def step(h, x):
        Delta, drive, B, C, reset = x
        if reset is not None:
            h = jnp.where(reset, 0, h)
        h = jnp.exp(Delta * A) * h + (over_channels(B, *h.shape) if B_constant is None else B_constant) * drive
        y = jnp.sum(h * (over_channels(C, *h.shape) if C_constant is None else C_constant), axis=0)
        return h, 2 * y.real if jnp.iscomplexobj(y) else y

    B, C = (None if m.ndim == 3 else m for m in (B, C))
    h, y = lax.scan(step, h, (Delta, drive, B, C, reset))
    return y, h
