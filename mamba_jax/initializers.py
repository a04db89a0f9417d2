"""How each parameter of Mamba starts, each with its source.

All take a `jax.random` key, a shape and a dtype, as Flax's initialisers do, and are plain functions of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


def a_log(key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """A_log[d, n] = log(n + 1): A = -exp(A_log) is then -1, -2, ..., -n in every channel.

    S4D-Real (arXiv 2206.11893, section 4.4; arXiv 2312.00752, section 3.6; `mamba_ssm.Mamba`). `key` is not used.
    """
    del key
    channel = jnp.log(jnp.arange(1, shape[-1] + 1, dtype=jnp.float32))
    return jnp.broadcast_to(channel, shape).astype(dtype)


def dt_bias(dt_min: float = 0.001, dt_max: float = 0.1, dt_init_floor: float = 1e-4) -> nnx.Initializer:
    """Bias of Delta: softplus(bias) is log-uniform on [dt_min, dt_max] and at least `dt_init_floor`, drawn per channel.

    bias = dt + log(-expm1(-dt)), the inverse of softplus without overflow
    (arXiv 2312.00752, section 3.6; `mamba_ssm.Mamba.__init__`).
    """

    def init(key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> jax.Array:
        low, high = math.log(dt_min), math.log(dt_max)
        dt = jnp.exp(jax.random.uniform(key, shape, jnp.float32) * (high - low) + low)
        dt = jnp.maximum(dt, dt_init_floor)
        return (dt + jnp.log(-jnp.expm1(-dt))).astype(dtype)

    return init


def dt_projection(dt_rank: int, dt_init: str = "random", dt_scale: float = 1.0) -> nnx.Initializer:
    """Weight that maps dt_rank to d_inner: uniform on +-dt_scale dt_rank^-0.5, or that number everywhere ("constant").

    It keeps the variance of Delta's input at initialisation (`mamba_ssm.Mamba.__init__`).
    """
    bound = dt_scale * dt_rank**-0.5
    if dt_init == "constant":
        return nnx.initializers.constant(bound)
    return symmetric_uniform(bound)


def projection(fan_in: int, scale: float = 1.0) -> nnx.Initializer:
    """Uniform on +-scale fan_in^-0.5: `torch.nn.Linear`'s and `torch.nn.Conv1d`'s default (Kaiming, a = sqrt 5).

    `mamba_ssm` leaves in_proj, x_proj, the convolution with its bias, and an untied head at it. For out_proj `scale` is
    n_layer^-0.5, since the residual adds one such product a layer (`mamba_ssm.models.mixer_seq_simple._init_weights`,
    after GPT-2). For the depthwise convolution `fan_in` is its width.
    """
    return symmetric_uniform(scale * fan_in**-0.5)


def constant_C(key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """C of a block that is not selective: standard normal, beside a B of ones, so that y keeps u's variance.

    Source: S4D (arXiv 2206.11893, section 3.3), from which selection sets Mamba apart.
    """
    return jax.random.normal(key, shape, dtype)


def embedding(initializer_range: float = 0.02) -> nnx.Initializer:
    """Normal with standard deviation `initializer_range` (`mamba_ssm.models.mixer_seq_simple._init_weights`)."""
    return nnx.initializers.normal(initializer_range)


def symmetric_uniform(bound: float) -> nnx.Initializer:
    """Uniform on [-bound, bound)."""

    def init(key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init
