"""Which kernels run a scan, how they cut it up, and why: chosen here, and said by `explain`."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import compat, device, tiling
from pallas_kernels.device import Gpu
from pallas_kernels.tiling import Sizes, Tiling

LEAST_CAPABILITY = 80
"""Ampere, compute capability 8.0 times ten: the least that the kernels compile for."""

_MULTIPROCESSORS = 108  # of a GPU that is not known: an A100's


@dataclasses.dataclass(frozen=True)
class Choice:
    """The kernels for a scan. `str()` of it is one line for a person."""

    kernels: Literal["interpreter", "triton", "mosaic"]
    tiling: Any  # a MosaicTiling for "mosaic", else a Tiling
    shared_bytes: tuple[int, int]  # placed by hand, of a forward and of a backward program, without barriers
    why: str

    def __str__(self) -> str:
        cut = self.tiling
        if isinstance(cut, Tiling):
            sizes = f"programs of {cut.channels} channels, states kept every {cut.chunk} steps"
            if self.kernels == "interpreter":
                return f"portable kernels, interpreted: {sizes}; {self.why}"
            return f"portable kernels through Triton: {sizes}, {cut.num_warps} warps a program; {self.why}"
        forward, backward = (f"{size / 1024:.0f} KB" for size in self.shared_bytes)
        pieces = f"{cut.forward_pieces.count} forward, {cut.backward_pieces.count} backward"
        return (
            f"Mosaic kernels: programs of {tiling.CHANNELS} channels, tiles of {cut.tile} steps, shared memory "
            f"{forward} forward with {cut.forward_stages} stages, {backward} backward with {cut.backward_stages}; "
            f"length in pieces: {pieces}; {self.why}"
        )


def on_cpu(sizes: Sizes) -> Choice:
    """The choice where the program is lowered for a CPU."""
    return Choice("interpreter", tiling.interpreter_tiling(sizes), (0, 0), "on a CPU Pallas' interpreter runs them")


def on_gpu(sizes: Sizes, itemsizes: tuple[int, int, int], gpu: Gpu | None) -> Choice:
    """The choice where the program is lowered for CUDA.

    Hopper and the Blackwell of data centers have the copy engine and the shared memory that the Mosaic kernels need.
    Ampere and Ada have Triton's: Mosaic's other way into shared memory, cp.async, takes no row of 128 channels in 16
    bits ("CP_ASYNC requires at least 4 bytes per transfer", jax 0.12.0.1), and in float32 the forward kernel made that
    way takes 135 instructions a step and 78 KB: 4 warps to a multiprocessor of an L40. Triton's takes 130 on an A100
    and 155 on an L40, and no shared memory.

    Args:
        sizes: of the scan.
        itemsizes: bytes of an element of u, delta and z, 0 for a z that is not there.
        gpu: the one that the program is made for; None if it is not known.
    """
    capable = gpu is not None and 90 <= gpu.capability < 110
    if gpu is not None and capable and compat.HAS_MOSAIC:
        cut = tiling.mosaic_tiling(sizes, itemsizes, gpu.multiprocessors)
        shared = (
            tiling.mosaic_forward_bytes(sizes, itemsizes, cut.forward_stages),
            tiling.mosaic_backward_bytes(sizes, itemsizes, cut.backward_stages),
        )
        return Choice("mosaic", cut, shared, f"{gpu.name} has a copy engine and {gpu.multiprocessors} multiprocessors")
    why = "the GPU is not known"
    if gpu is not None:
        why = f"{gpu.name} has compute capability {gpu.capability / 10:.1f}, and Mosaic needs 9.0 or 10.x"
    if capable:
        why = "Mosaic needs jax 0.11.2 or newer"
    cut = tiling.triton_tiling(sizes, gpu.multiprocessors if gpu else _MULTIPROCESSORS)
    return Choice("triton", cut, (0, 0), why)


def gpu_lacks(wide: DTypeLike, gpu: Gpu | None) -> str | None:
    """Why no kernel takes a scan of this arithmetic on this GPU; None if one does."""
    if jnp.dtype(wide) == jnp.float64:
        return "on a GPU the Pallas kernels take no float64"
    if gpu is not None and gpu.capability < LEAST_CAPABILITY:
        return (
            f"the Pallas kernels need a GPU of compute capability {LEAST_CAPABILITY / 10:.1f} or more, "
            f"and {gpu.name} has {gpu.capability / 10:.1f}"
        )
    return None


def explain(
    b: int, l: int, d: int, n: int = 16, *, g: int = 1, dtype: DTypeLike = jnp.float32, gate: bool = True
) -> Choice:
    """Which kernels `selective_scan` would run for these sizes on the device at hand, and why; print it to read it.

    The device is the abstract mesh's if there is one, else this process' first; see `pallas_kernels.device`.

    Args:
        b, l, d, n, g: batch, length, channels, states, groups.
        dtype: of u, delta and z.
        gate: whether there is a z.

    Raises:
        NotImplementedError: no kernel runs this there; the message says why.
    """
    sizes, itemsize = Sizes(b=b, l=l, d=d, n=n, g=g), jnp.dtype(dtype).itemsize
    platform = device.target_platform()
    if platform == "cpu":
        return on_cpu(sizes)
    gpu = device.target_gpu()
    reason = gpu_lacks(jnp.promote_types(dtype, jnp.float32), gpu)
    if platform not in ("gpu", "cuda"):
        reason = f"the Pallas kernels run on CPUs and NVIDIA GPUs only, not on {platform}"
    if reason is not None:
        raise NotImplementedError(reason)
    return on_gpu(sizes, (itemsize, itemsize, itemsize if gate else 0), gpu)
