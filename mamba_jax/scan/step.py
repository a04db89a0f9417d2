"""One step of the selective scan: what decoding runs for each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mamba_jax.scan.chunked import skip_and_gate
from mamba_jax.scan.inputs import wide_dtype
from mamba_jax.scan.validate import check_floating, check_shape


def selective_state_update(
    state: jax.Array,
    x: jax.Array,
    dt: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    z: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    dt_softplus: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """One step of `selective_scan` for every row of a batch.

        Delta = dt + dt_bias;  if dt_softplus: Delta = softplus(Delta)
        state' = exp(Delta A) * state + Delta B x;   y = (sum_n C[n] state'[n] + D x) * silu(z)

    Source: paper, section 3.2; `selective_state_update` of mamba_ssm for states (b, d, n). The arithmetic is in
    float32, or in float64 if any input is.

    Args:
        state: (b, d, n), real, or complex with `A`; keep it in float32, as a 16-bit state drifts.
        x: (b, d), the input.
        dt: (b, d), the step size before bias and softplus.
        A: (d, n), real or complex.
        B: (b, n), or (b, g, n) for g groups of d / g consecutive channels each.
        C: as B.
        D: (d,), the skip.
        z: (b, d), the gate.
        dt_bias: (d,), added to dt.
        dt_softplus: whether softplus follows.

    Returns:
        y (b, d) in x's dtype, and the new state (b, d, n) in the dtype of `state`.

    Raises:
        ValueError: an argument's shape or dtype is wrong; the message names it, what it is and what it should be.
    """
    state, x, dt, A, B, C = map(jnp.asarray, (state, x, dt, A, B, C))
    D, z, dt_bias = (None if v is None else jnp.asarray(v) for v in (D, z, dt_bias))
    _check(state, x, dt, A, B, C, D, z, dt_bias)
    wide = wide_dtype(state, x, dt, A, B, C, D, z, dt_bias)
    b, d, n = state.shape
    B, C = (_to_channels(m, b, d, n).astype(jnp.promote_types(m.dtype, wide)) for m in (B, C))
    x_wide, Delta = x.astype(wide), dt.astype(wide)
    if dt_bias is not None:
        Delta = Delta + dt_bias.astype(wide)
    if dt_softplus:
        Delta = jax.nn.softplus(Delta)
    A = A.astype(jnp.promote_types(A.dtype, wide))
    h = jnp.exp(Delta[..., None] * A) * state.astype(A.dtype) + B * (Delta * x_wide)[..., None]
    y = jnp.sum(h * C, axis=-1)
    y = 2 * y.real if jnp.iscomplexobj(y) else y
    D = jnp.zeros((d,), wide) if D is None else D.astype(wide)
    return skip_and_gate(y, x_wide, z, D).astype(x.dtype), h.astype(state.dtype)


def _to_channels(m: jax.Array, b: int, d: int, n: int) -> jax.Array:
    """(b, n) or (b, g, n) to what broadcasts against (b, d, n)."""
    if m.ndim == 2:
        return m[:, None]
    g = m.shape[1]
    return jnp.broadcast_to(m[:, :, None], (b, g, d // g, n)).reshape(b, d, n)


def _check(state, x, dt, A, B, C, D, z, dt_bias) -> None:
    if state.ndim != 3:
        raise ValueError(f"`state` has shape {state.shape}; expected (b, d, n): batch, channels, state")
    b, d, n = state.shape
    check_shape("A", A, (d, n), "(d, n)")
    for name, v in (("x", x), ("dt", dt), ("z", z)):
        check_shape(name, v, (b, d), "(b, d)")
        check_floating(name, v)
    for name, m in (("B", B), ("C", C)):
        groups = m.shape[1] if m.ndim == 3 else 1
        if m.shape not in ((b, n), (b, groups, n)) or groups < 1 or d % groups:
            raise ValueError(
                f"`{name}` has shape {m.shape}; expected (b, n) = {(b, n)} or (b, g, n) with g dividing d = {d}"
            )
        check_floating(name, m, or_complex=jnp.iscomplexobj(A))
    for name, v in (("D", D), ("dt_bias", dt_bias)):
        check_shape(name, v, (d,), "(d,)")
        check_floating(name, v)
    check_floating("A", A, or_complex=True)
    check_floating("state", state, or_complex=jnp.iscomplexobj(A))
    if jnp.iscomplexobj(A) and not jnp.iscomplexobj(state):
        raise ValueError(f"`state` has dtype {state.dtype}; expected a complex one, as `A` is complex")
