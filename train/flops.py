"""How much arithmetic a training step needs, and what share of a device's peak that is (MFU)."""

from __future__ import annotations

from typing import Any

import jax

from mamba_jax import MambaConfig

# Dense bfloat16 matrix products with float32 sums, in TFLOP/s, from the makers' data sheets, by the beginning of the
# device's name. The longest that fits counts: "TPU v5" is v5p, "TPU v5 lite" v5e.
_PEAK_TFLOPS = {
    "NVIDIA A100": 312,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H200": 989.4,
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362,
    "NVIDIA GeForce RTX 4090": 165.2,
    "TPU v4": 275,
    "TPU v5": 459,
    "TPU v5 lite": 197,
    "TPU v6 lite": 918,
}


def peak_flops_per_s(device_kind: str) -> float | None:
    """The peak of a device, in floating-point operations a second; None if it is not known."""
    names = [name for name in _PEAK_TFLOPS if device_kind.startswith(name)]
    return _PEAK_TFLOPS[max(names, key=len)] * 1e12 if names else None


def training_flops(config: MambaConfig, params: Any, n_tokens: int) -> float:
    """Floating-point operations of a training step, which is three forward passes: 3 (2 P + 9 d n layers) a token.

    P are the parameters of matrix products: the four projections of each block, and the head, be it tied to the
    embedding or not. 9 d n is the scan's: per channel and state an exponential, four products and sums for the state,
    two for the output, and the products for Delta A and Delta B u. What remat computes again is not counted.
    """
    flat = {tuple(key.key for key in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    tied = not any("lm_head" in path for path in flat)
    counted = [leaf.size for path, leaf in flat.items() if path[-1] == "kernel" or (tied and path[-1] == "embedding")]
    d_inner: Any = config.d_inner  # the configuration has derived it
    return n_tokens * 3.0 * (2 * sum(counted) + 9 * d_inner * config.d_state * config.n_layer)


def utilisation(flops: float, seconds: float, devices: int) -> float | None:
    """Model FLOPs utilisation: the share of so many devices' peak that was used; None where it is not known."""
    peak = peak_flops_per_s(jax.devices()[0].device_kind)
    return None if peak is None else flops / (seconds * peak * devices)


def memory_gib() -> float | None:
    """The most memory that was in use on this process' first device; None where the device does not say."""
    stats = jax.local_devices()[0].memory_stats()
    return stats["peak_bytes_in_use"] / 2**30 if stats and "peak_bytes_in_use" in stats else None
