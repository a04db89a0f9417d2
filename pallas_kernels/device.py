"""What the code is being made for: platform, capability, multiprocessors; asked when a function is traced, not before.

The answer comes from the abstract mesh's device if there is one (perhaps a GPU that is not there), else from the first
device of this process. Which code runs is settled later, by the platform that the program is lowered for
(`lax.platform_dependent`).
"""

from __future__ import annotations

import dataclasses

import jax

# From NVIDIA's data sheets: words in a device's name, compute capability times ten, multiprocessors.
_GPUS = {
    "B300": (103, 148),
    "B200": (100, 148),
    "GB200": (100, 148),
    "H200": (90, 132),
    "GH200": (90, 132),
    "H100": (90, 132),
    "H800": (90, 132),
    "L40": (89, 142),
    "L40S": (89, 142),
    "L4": (89, 58),
    "4090": (89, 128),
    "A40": (86, 84),
    "A10": (86, 72),
    "A10G": (86, 80),
    "A6000": (86, 84),
    "3090": (86, 82),
    "A100": (80, 108),
    "A800": (80, 108),
    "A30": (80, 56),
    "T4": (75, 40),
    "V100": (70, 80),
}


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as far as the choice of a kernel needs it."""

    name: str
    capability: int  # compute capability times ten: 90 is Hopper
    multiprocessors: int


def target_platform() -> str:
    """The platform that tracing should plan for: "cpu", "gpu" or "tpu". It decides sizes, not what is computed."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device is not None else jax.default_backend()


def target_gpu() -> Gpu | None:
    """The GPU that a kernel lowered for "cuda" should be made for; None if none is known, or it is not NVIDIA's."""
    present = _first_gpu()
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or (present is not None and device.device_kind == present.name):
        return present
    if device.platform not in ("gpu", "cuda"):
        return None
    words = device.device_kind.replace("-", " ").split()
    known = next((_GPUS[word] for word in words if word in _GPUS), None)
    return Gpu(device.device_kind, *known) if known else None


def _first_gpu() -> Gpu | None:
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # JAX's way to say that there is no such backend
        return None
    return Gpu(device.device_kind, int(device.compute_capability.replace(".", "")), device.core_count)
