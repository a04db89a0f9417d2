"""The selective scan in PyTorch as mamba-minimal runs it: discretise the whole sequence, then a Python loop over time.

Import this module only where it is used: it needs torch, and `mamba_jax` must not.
Axis legend: b batch, l length, d channels, n state, g groups of channels.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def selective_scan_loop(
    u: torch.Tensor,
    delta: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    *,
    delta_softplus: bool = False,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y (b, l, d) in u's dtype and the last state (b, d, n), differentiable by autograd.

    h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t u_t
    y_t = (sum_n C_t h_t + D u_t) silu(z_t), with 2 Re(C h) for a complex A

    Shapes as for `mamba_jax.selective_scan`: u, delta, z (b, l, d); A (d, n); B, C (b, l, n), (b, l, g, n) or (d, n).
    Arithmetic is in the widest dtype of the arguments. Documents (`segment_ids`) are not supported.
    Source: arXiv 2312.00752, algorithm 2; the order of operations is `selective_scan` of mamba-minimal's MambaBlock.
    """
    _, l, d = u.shape
    Delta = delta if delta_bias is None else delta + delta_bias
    if delta_softplus:
        Delta = functional.softplus(Delta)
    B, C = _spread(B, l, d), _spread(C, l, d)

    decay = torch.exp(Delta[..., None] * A)  # (b, l, d, n)
    drive = (Delta * u)[..., None] * B  # (b, l, d, n)
    h = torch.zeros_like(decay[:, 0]) if initial_state is None else initial_state
    outputs = []
    for t in range(l):
        h = decay[:, t] * h + drive[:, t]  # (b, d, n)
        outputs.append((h * C[:, t]).sum(-1))  # (b, d)
    y = torch.stack(outputs, dim=1)

    if A.is_complex():
        y = 2 * y.real
    if D is not None:
        y = y + D * u
    if z is not None:
        y = y * functional.silu(z)
    return y.to(u.dtype), h


def _spread(value: torch.Tensor, l: int, d: int) -> torch.Tensor:
    """B or C in any of its shapes, as (b, l, d or 1, n) or, constant over time, (1, l, d, n)."""
    if value.ndim == 2:
        return value.expand(1, l, *value.shape)
    if value.ndim == 3:
        return value[:, :, None]
    return value.repeat_interleave(d // value.shape[2], dim=2)
