"""Elementwise mathematics of the Mosaic kernels, written for the GPU's few special instructions: 2^x, 1/x, and no
log1p.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

# log1p(e) / e on [0, 1], minimax in relative error (Remez), lowest power first. In float32 the relative errors of e *
# P(e) are 3.4e-7 and 8.5e-6.
_LOG1P_WIDE = (0.99999982, -0.49997404, 0.33275479, -0.24495463, 0.17745242, -0.10768171, 0.04408963, -0.00853921)
_LOG1P_NARROW = (0.99999160, -0.49936137, 0.32520667, -0.21004869, 0.10122228, -0.02386915)


def softplus(v: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """max(v, 0) + log1p(exp(-|v|)), with as many right bits as a value that came in `dtype` deserves.

    The usual log(1 + e) loses them where Delta is small, and trained models have Delta near 1e-3; it also takes a
    slot of the special-function unit, which bounds the forward kernel. Exactly 0 for v below -104.
    """
    coefficients = _LOG1P_WIDE if jnp.dtype(dtype).itemsize > 2 else _LOG1P_NARROW
    e = jnp.exp2(jnp.abs(v) * -LOG2_E)
    polynomial = coefficients[-1]
    for c in coefficients[-2::-1]:
        polynomial = polynomial * e + c
    return polynomial * e + jnp.maximum(v, 0.0)


def silu(v: jax.Array) -> jax.Array:
    """v / (1 + exp(-v))."""
    return v / (1.0 + jnp.exp2(v * -LOG2_E))


def sigmoid_by_log(v: jax.Array) -> jax.Array:
    """1 / (1 + exp(-v)) as 2^-log2(1 + exp(-v)): no division, which costs three more instructions."""
    return jnp.exp2(-(jnp.log(1.0 + jnp.exp2(v * -LOG2_E)) * LOG2_E))
