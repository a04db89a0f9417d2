"""The selective scan in float64 NumPy, forward and backward written by hand: the yardstick for every other form.

Axis legend: b batch, l length, d channels, n state, g groups of channels.

Whole (b, l, d, n) tensors are kept and only time is looped over, so a length of 4096 takes a fraction of a second.

Backward pass. With s = 2 for a complex A and 1 otherwise, y'_t = s Re(sum_n C_t h_t) + D u_t and y_t = y'_t silu(z_t):

    dy'_t = dy_t silu(z_t)
    g_t   = s C_t dy'_t + a_{t+1} g_{t+1},   g_{l-1} also takes dlast
    a_t   = exp(Delta_t A), 0 where a document begins
    w_t   = g_t a_t h_{t-1}
    dA = sum_{b,t} w_t Delta_t,  dB_t = g_t Delta_t u_t,  dC_t = s h_t dy'_t,  dinitial = a_0 g_0
    dDelta_t = Re sum_n (w_t A + g_t B_t u_t),  du_t = Re sum_n g_t B_t Delta_t + D dy'_t

Complex gradients follow `jax.grad`: df = Re(gradient * change), so nothing is conjugated.
Source: arXiv 2312.00752, section 3; the operation that `mamba_ssm` calls `selective_scan_fn`.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class _Forward:
    """Arguments in float64 or complex128, broadcast to whole tensors, and all that the forward pass makes of them."""

    u: np.ndarray  # (b, l, d)
    A: np.ndarray  # (d, n)
    B: np.ndarray  # (b, l, d, n)
    C: np.ndarray  # (b, l, d, n)
    D: np.ndarray  # (d,)
    shifted: np.ndarray  # (b, l, d): delta + delta_bias, before softplus
    Delta: np.ndarray  # (b, l, d)
    decay: np.ndarray  # (b, l, d, n): exp(Delta A), 0 where a document begins
    states: np.ndarray  # (b, l + 1, d, n): the initial state, then the state after each step
    ungated: np.ndarray  # (b, l, d): y before the gate
    scale: float  # 2 for a complex A, 1 otherwise


def selective_scan_oracle(
    u: ArrayLike,
    delta: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    z: ArrayLike | None = None,
    delta_bias: ArrayLike | None = None,
    *,
    delta_softplus: bool = False,
    initial_state: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """y (b, l, d) in float64 and the last state (b, d, n) in float64 or complex128.

    h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t u_t
    y_t = (sum_n C_t h_t + D u_t) silu(z_t), with 2 Re(C h) for a complex A

    Arguments are those of `mamba_jax.selective_scan`, of any dtype; they are taken as right.
    """
    forward = _forward(u, delta, A, B, C, D, delta_bias, delta_softplus, initial_state, segment_ids)
    y = forward.ungated if z is None else forward.ungated * _silu(_wide(z))
    return y, forward.states[:, -1]


def selective_scan_oracle_gradients(
    u: ArrayLike,
    delta: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    z: ArrayLike | None = None,
    delta_bias: ArrayLike | None = None,
    *,
    delta_softplus: bool = False,
    initial_state: ArrayLike | None = None,
    segment_ids: ArrayLike | None = None,
    dy: ArrayLike,
    dlast: ArrayLike | None = None,
) -> dict[str, np.ndarray]:
    """Gradients of Re(sum(dy y) + sum(dlast last_state)), by argument name, each in its argument's shape.

    dy is (b, l, d), dlast (b, d, n) or None for zeros; results are float64, or complex128 for a complex argument.
    Arguments that are None have no entry, but `initial_state` always has one.
    """
    f = _forward(u, delta, A, B, C, D, delta_bias, delta_softplus, initial_state, segment_ids)
    gradients = {}
    d_ungated = _wide(dy)
    if z is not None:
        gate, sigmoid = _wide(z), _sigmoid(_wide(z))
        gradients["z"] = d_ungated * f.ungated * sigmoid * (1 + gate * (1 - sigmoid))
        d_ungated = d_ungated * _silu(gate)

    d_states, d_initial = _reverse_recursion(f, d_ungated, dlast)
    through_decay = d_states * f.decay * f.states[:, :-1]
    Delta_u = f.Delta * f.u
    d_Delta = (through_decay * f.A + d_states * f.B * f.u[..., None]).sum(-1).real
    d_delta = d_Delta * _sigmoid(f.shifted) if delta_softplus else d_Delta

    gradients["u"] = (d_states * f.B).sum(-1).real * f.Delta + f.D * d_ungated
    gradients["delta"] = d_delta
    gradients["A"] = _like(A, (through_decay * f.Delta[..., None]).sum((0, 1)))
    gradients["B"] = _like(B, _collect(d_states * Delta_u[..., None], np.shape(B)))
    gradients["C"] = _like(C, _collect(f.scale * f.states[:, 1:] * d_ungated[..., None], np.shape(C)))
    gradients["initial_state"] = d_initial if initial_state is None else _like(initial_state, d_initial)
    if D is not None:
        gradients["D"] = (d_ungated * f.u).sum((0, 1))
    if delta_bias is not None:
        gradients["delta_bias"] = d_delta.sum((0, 1))
    return gradients


def selective_state_update_oracle(
    state: ArrayLike,
    x: ArrayLike,
    dt: ArrayLike,
    A: ArrayLike,
    B: ArrayLike,
    C: ArrayLike,
    D: ArrayLike | None = None,
    z: ArrayLike | None = None,
    dt_bias: ArrayLike | None = None,
    dt_softplus: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """One step of the scan: y (b, d) and the new state (b, d, n).

    state (b, d, n); x, dt, z (b, d); A (d, n); B, C (b, n) or (b, g, n); D, dt_bias (d,).
    Source: `mamba_ssm`'s `selective_state_update`. The state it was given is left as it was.
    """
    x, A = _wide(x), _wide(A)
    d = x.shape[1]
    Delta = _wide(dt) if dt_bias is None else _wide(dt) + _wide(dt_bias)
    if dt_softplus:
        Delta = np.logaddexp(0, Delta)
    B, C = (_wide(v) if np.ndim(v) == 3 else _wide(v)[:, None] for v in (B, C))
    B, C = (np.repeat(v, d // v.shape[1], axis=1) for v in (B, C))
    new = np.exp(Delta[..., None] * A) * _wide(state) + (Delta * x)[..., None] * B
    y = (C * new).sum(-1)
    y = 2 * y.real if np.iscomplexobj(A) else y
    if D is not None:
        y = y + _wide(D) * x
    if z is not None:
        y = y * _silu(_wide(z))
    return y, new


def _forward(u, delta, A, B, C, D, delta_bias, delta_softplus, initial_state, segment_ids) -> _Forward:
    """The scan without its gate, all intermediate values kept."""
    u, A = _wide(u), _wide(A)
    (b, l, d), n = u.shape, A.shape[1]
    shifted = _wide(delta) if delta_bias is None else _wide(delta) + _wide(delta_bias)
    Delta = np.logaddexp(0, shifted) if delta_softplus else shifted
    B, C = _spread(B, b, l, d), _spread(C, b, l, d)
    D = np.zeros(d) if D is None else _wide(D)

    decay = np.exp(Delta[..., None] * A)
    if segment_ids is not None:
        ids = np.asarray(segment_ids)
        decay[:, 1:][ids[:, 1:] != ids[:, :-1]] = 0
    drive = (Delta * u)[..., None] * B
    states = np.zeros((b, l + 1, d, n), A.dtype)
    if initial_state is not None:
        states[:, 0] = _wide(initial_state)
    for t in range(l):
        states[:, t + 1] = decay[:, t] * states[:, t] + drive[:, t]

    scale = 2.0 if np.iscomplexobj(A) else 1.0
    ungated = scale * (C * states[:, 1:]).sum(-1).real + D * u
    return _Forward(u, A, B, C, D, shifted, Delta, decay, states, ungated, scale)


def _reverse_recursion(f: _Forward, d_ungated: np.ndarray, dlast: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    """Gradients of the state after each step, (b, l, d, n), and of the initial state, (b, d, n)."""
    d_states = f.scale * f.C * d_ungated[..., None]
    d_states = d_states.astype(f.states.dtype)
    carry = np.zeros_like(f.states[:, 0]) if dlast is None else _wide(dlast).astype(f.states.dtype)
    for t in reversed(range(d_states.shape[1])):
        d_states[:, t] += carry
        carry = f.decay[:, t] * d_states[:, t]
    return d_states, carry


def _wide(value: ArrayLike) -> np.ndarray:
    """The value in float64, or in complex128 if it is complex."""
    value = np.asarray(value)
    return value.astype(np.complex128 if np.iscomplexobj(value) else np.float64)


def _spread(value: ArrayLike, b: int, l: int, d: int) -> np.ndarray:
    """B or C in any of its shapes, as (b, l, d, n)."""
    value = _wide(value)
    n = value.shape[-1]
    if value.ndim == 3:
        value = value[:, :, None]
    elif value.ndim == 4:
        value = np.repeat(value, d // max(value.shape[2], 1), axis=2)
    return np.broadcast_to(value, (b, l, d, n))


def _collect(gradient: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The transpose of `_spread`: a gradient (b, l, d, n), summed down to the shape that B or C came in."""
    if len(shape) == 2:
        return gradient.sum((0, 1))
    if len(shape) == 3:
        return gradient.sum(2)
    b, l, d, n = gradient.shape
    g = shape[2]
    return gradient.reshape(b, l, g, d // max(g, 1), n).sum(3)


def _like(argument: ArrayLike, gradient: np.ndarray) -> np.ndarray:
    """The gradient of an argument: its real part where the argument is real."""
    return gradient if np.iscomplexobj(np.asarray(argument)) else np.real(gradient)


def _sigmoid(value: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -value))  # 1 / (1 + exp(-value)) would overflow at the -1e4 that marks padding


def _silu(value: np.ndarray) -> np.ndarray:
    return value * _sigmoid(value)
