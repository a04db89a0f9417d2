"""The GPU that code is made for: what is read from the names of devices that are not there."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import device


def on(device_kind, platform):
    abstract = AbstractDevice(device_kind=device_kind, num_cores=None, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=abstract))


@pytest.mark.parametrize(
    ("name", "capability", "multiprocessors"),
    [
        ("NVIDIA A100-SXM4-80GB", 80, 108),
        ("NVIDIA A10", 86, 72),
        ("NVIDIA L40", 89, 142),
        ("NVIDIA GeForce RTX 4090", 89, 128),
        ("NVIDIA H100 80GB HBM3", 90, 132),
        ("NVIDIA GB200", 100, 148),
        ("Tesla V100-SXM2-16GB", 70, 80),
    ],
)
def test_known_gpus(name, capability, multiprocessors):
    with on(name, "gpu"):
        assert device.target_gpu() == device.Gpu(name, capability, multiprocessors)
        assert device.target_platform() == "gpu"


@pytest.mark.parametrize(("name", "platform"), [("NVIDIA Z999", "gpu"), ("TPU v5e", "tpu")])
def test_unknown_gpus_and_other_devices(name, platform):
    with on(name, platform):
        assert device.target_gpu() is None
        assert device.target_platform() == platform


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what is found where there is no GPU")
def test_no_gpu():
    assert device.target_platform() == "cpu"
    assert device.target_gpu() is None
