"""Which kernels a scan gets, on GPUs that are not there, and what is said of it."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from mamba_jax import selective_scan
from pallas_kernels import compat, explain
from pallas_kernels.device import target_gpu


def on(device_kind, platform="gpu"):
    """As if that device were at hand."""
    device = AbstractDevice(device_kind=device_kind, num_cores=None, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("device",), abstract_device=device))


def test_interpreter_on_a_cpu():
    chosen = explain(2, 100, 200)
    assert chosen.kernels == "interpreter" and "interpreter" in str(chosen)


@pytest.mark.parametrize("device_kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "NVIDIA GeForce RTX 5090"])
def test_triton_below_hopper_and_on_unknown_gpus(device_kind):
    with on(device_kind):
        assert explain(2, 100, 200).kernels == "triton"


@pytest.mark.parametrize("device_kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA B200"])
def test_mosaic_from_hopper_on(device_kind):
    with on(device_kind):
        chosen = explain(8, 2048, 2048)
    assert chosen.kernels == ("mosaic" if compat.HAS_MOSAIC else "triton")
    if compat.HAS_MOSAIC:
        assert device_kind in str(chosen) and max(chosen.shared_bytes) < 227 * 1024
        assert chosen.tiling.forward_pieces.count == 1


@pytest.mark.skipif(not compat.HAS_MOSAIC, reason="needs jax 0.11.2")
def test_small_batches_are_split():
    with on("NVIDIA H200"):
        assert explain(1, 65536, 2048).tiling.forward_pieces.count > 1


def test_old_gpu_is_refused_in_one_line():
    with on("Tesla T4"):
        assert target_gpu().capability == 75
        with pytest.raises(NotImplementedError, match=r"capability 8\.0 or more, and Tesla T4 has 7\.5"):
            explain(2, 100, 200)


def test_other_platforms_are_refused():
    with on("TPU v5e", "tpu"), pytest.raises(NotImplementedError, match="not on tpu"):
        explain(2, 100, 200)


def lowered(scan):
    u, A, B = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, 8, 16), (16, 4), (1, 8, 4)))
    traced = jax.jit(lambda u, A, B: selective_scan(u, u, A, B, B, scan=scan)).trace(u, A, B)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_explicit_pallas_on_an_old_gpu():
    with on("Tesla T4"), pytest.raises(NotImplementedError, match=r"and Tesla T4 has 7\.5; use scan="):
        lowered("pallas")


def test_auto_on_an_old_gpu_says_so_once(caplog):
    with on("Tesla V100-SXM2-16GB"):
        lowered("auto")
        lowered("auto")
    assert [record.message for record in caplog.records if "associative form" in record.message] == [
        'Tesla V100-SXM2-16GB has compute capability 7.0; scan="pallas" needs 8.0 or more, '
        'so "auto" takes the associative form'
    ]


def test_auto_is_the_kernel_on_a_new_gpu():
    with on("NVIDIA A100-SXM4-80GB"):
        kernel = lowered("auto")
    assert "custom_call" in kernel and "custom_call" not in lowered("associative")
