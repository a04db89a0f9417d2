"""What people do in PyTorch to make the selective scan faster: functions (u, delta, A, B, C, D) -> y.

    h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t,   y_t = sum_n C_t[n] h_t[n] + D u_t

Shapes: u, delta, y (b, l, d); A (d, n); B, C (b, l, n); D (d,). All are differentiable by autograd.
Import this module only where it is used: it needs torch. A function that needs more raises ImportError without it.
Axis legend: b batch, l length, d channels, n state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from mamba_jax.reference.torch_forms import selective_scan_loop

Scan = Callable[..., torch.Tensor]


def loop(u, delta, A, B, C, D) -> torch.Tensor:
    """The Python loop over time of mamba-minimal: its tensors (b, l, d, n) are made first, then read step by step."""
    return selective_scan_loop(u, delta, A, B, C, D)[0]


def compiled_loop() -> Scan:
    """`loop` under `torch.compile`, which unrolls it: one graph with l copies of the step."""
    torch.compiler.reset()  # after 8 compilations of one function PyTorch would go back to running it uncompiled
    return torch.compile(loop, dynamic=False, fullgraph=True)


def fused_step_loop() -> Scan:
    """A Python loop around a step in TorchScript, which makes its own decay: no (b, l, d, n) tensor is needed."""
    with warnings.catch_warnings():
        # TorchScript is deprecated, and is here because it is what people are told to try.
        warnings.simplefilter("ignore", DeprecationWarning)
        step = torch.jit.script(_fused_step)

        def fused_loop(u, delta, A, B, C, D):
            h = torch.zeros(u.shape[0], A.shape[0], A.shape[1], dtype=A.dtype, device=u.device)
            outputs = []
            for u_t, delta_t, B_t, C_t in zip(u.unbind(1), delta.unbind(1), B.unbind(1), C.unbind(1)):
                h, y = step(h, u_t, delta_t, A, B_t, C_t)
                outputs.append(y)
            return (torch.stack(outputs, dim=1) + D * u).to(u.dtype)

        return fused_loop


def _fused_step(
    h: torch.Tensor, u: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """h (b, d, n); u, delta (b, d); A (d, n); B, C (b, n) -> the next h, and y (b, d)."""
    h = torch.exp(delta[:, :, None] * A) * h + (delta * u)[:, :, None] * B[:, None]
    return h, (h * C[:, None]).sum(-1)


def transposed_loop(u, delta, A, B, C, D) -> torch.Tensor:
    """`loop` with its tensors laid out (b, d, l, n): the n states of neighbouring steps lie side by side in memory."""
    l = u.shape[1]
    u, delta = u.transpose(1, 2), delta.transpose(1, 2)  # (b, d, l)
    decay = torch.exp(delta[..., None] * A[:, None])  # (b, d, l, n)
    drive = (delta * u)[..., None] * B[:, None]  # (b, d, l, n)
    h = torch.zeros_like(decay[:, :, 0])
    outputs = []
    for t in range(l):
        h = decay[:, :, t] * h + drive[:, :, t]  # (b, d, n)
        outputs.append((h * C[:, t, None]).sum(-1))  # (b, d)
    y = torch.stack(outputs, dim=2) + D[:, None] * u
    return y.transpose(1, 2).to(u.dtype)


def mambapy_scan() -> Scan:
    """The parallel scan of the package mambapy (its `pscan`), called as its MambaBlock does."""
    from mambapy.pscan import pscan  # pyright: ignore[reportMissingImports]

    def scan(u, delta, A, B, C, D):
        decay = torch.exp(delta[..., None] * A)
        drive = (delta * u)[..., None] * B[:, :, None]
        h = pscan(decay, drive.to(decay.dtype))
        return ((h @ C[..., None].to(h.dtype))[..., 0] + D * u).to(u.dtype)

    return scan


def transformers_scan() -> Scan:
    """The scan of transformers' Mamba where no CUDA kernels are installed: `mamba_selective_scan`, layout (b, d, l)."""
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan

    def scan(u, delta, A, B, C, D):
        u_rows, delta_rows, B_rows, C_rows = (v.transpose(1, 2) for v in (u, delta, B, C))
        return mamba_selective_scan(u_rows, delta_rows, A, B_rows, C_rows, D=D).transpose(1, 2).to(u.dtype)

    return scan


def mamba_ssm_scan() -> Scan:
    """The CUDA kernel of mamba_ssm, layout (b, d, l)."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn  # pyright: ignore[reportMissingImports]

    def scan(u, delta, A, B, C, D):
        u_rows, delta_rows, B_rows, C_rows = (v.transpose(1, 2).contiguous() for v in (u, delta, B, C))
        return selective_scan_fn(u_rows, delta_rows, A, B_rows, C_rows, D=D).transpose(1, 2)

    return scan
