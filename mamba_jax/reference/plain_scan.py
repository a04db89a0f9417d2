"""The selective scan as one `lax.scan` over the whole length with state (b, d, n): the baseline for timing other forms.

No blocks, no checkpoints: its gradient keeps (b, l, d, n) tensors.
Axis legend: b batch, l length, d channels, n state, g groups.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def plain_scan(
    u: jax.Array,
    delta: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    z: jax.Array | None = None,
    delta_bias: jax.Array | None = None,
    *,
    delta_softplus: bool = False,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_last_state: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Selective scan, arguments and results of `mamba_jax.selective_scan` without `scan`; arguments are taken as right.

    h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t u_t
    y_t = (sum_n C_t h_t + D u_t) silu(z_t), with 2 Re(C h) for a complex A

    u, delta, z (b, l, d); A (d, n); B, C (b, l, n), (b, l, g, n) or (d, n); D, delta_bias (d,); segment_ids (b, l);
    initial_state (b, d, n). Arithmetic is float32, or float64 if any argument is; y (b, l, d) has u's dtype.
    Source: arXiv 2312.00752, section 3; `mamba_ssm`'s `selective_scan_fn`.
    """
    arguments = [v for v in (u, delta, A, B, C, D, z, delta_bias, initial_state) if v is not None]
    wide = jnp.result_type(jnp.float32, *(jnp.finfo(v.dtype).dtype for v in arguments))
    is_complex = jnp.iscomplexobj(A)
    b, l, d = u.shape

    Delta = delta.astype(wide)
    if delta_bias is not None:
        Delta = Delta + delta_bias.astype(wide)
    if delta_softplus:
        Delta = jax.nn.softplus(Delta)
    if segment_ids is None:
        keep = jnp.ones((b, l), bool)
    else:
        keep = jnp.concatenate([jnp.ones((b, l), bool)[:, :1], segment_ids[:, 1:] == segment_ids[:, :-1]], axis=1)
    h = jnp.zeros((b, d, A.shape[1]), A.dtype) if initial_state is None else initial_state
    h = h.astype(jnp.result_type(wide, A.dtype))

    def step(h, inputs):
        u_t, Delta_t, B_t, C_t, keep_t = inputs
        decay = jnp.exp(Delta_t[..., None] * A)
        if segment_ids is not None:
            decay = jnp.where(keep_t[:, None, None], decay, 0)
        h = decay * h + (Delta_t * u_t)[..., None] * B_t
        y = (h * C_t).sum(-1)
        return h, 2 * y.real if is_complex else y

    by_time = [jnp.swapaxes(v, 0, 1) for v in (u.astype(wide), Delta, _spread(B, l, d), _spread(C, l, d), keep)]
    last_state, y = lax.scan(step, h, tuple(by_time))
    y = jnp.swapaxes(y, 0, 1)
    if D is not None:
        y = y + D.astype(wide) * u.astype(wide)
    if z is not None:
        y = y * jax.nn.silu(z.astype(wide))
    y = y.astype(u.dtype)
    return (y, last_state) if return_last_state else y


def _spread(value: jax.Array, l: int, d: int) -> jax.Array:
    """B or C in any of its shapes, as (b, l, d or 1, n) or, constant over time, (1, l, d, n)."""
    if value.ndim == 2:
        return jnp.broadcast_to(value, (1, l, *value.shape))
    if value.ndim == 3:
        return value[:, :, None]
    return jnp.repeat(value, d // value.shape[2], axis=2)
