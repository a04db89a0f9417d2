"""train.flops: the count by hand, and the share of a peak."""

from types import SimpleNamespace

import jax
import pytest

from mamba_jax import MambaConfig
from train import flops as module
from train.flops import memory_gib, peak_flops_per_s, training_flops, utilisation
from train.step import build_model

SIZES = {"d_model": 16, "n_layer": 2, "d_state": 4, "vocab_size": 256}  # d_inner 32, dt_rank 1
BLOCKS = 2 * (16 * 64 + 32 * (1 + 8) + 1 * 32 + 32 * 16)


@pytest.mark.parametrize("tied", [True, False])
def test_the_count_is_that_by_hand(tied):
    config = MambaConfig(**SIZES, tie_embeddings=tied)
    params = jax.eval_shape(lambda: build_model(config, 0)[1])
    # One head, whether it is the embedding or a matrix of its own: looking a token up is no product.
    assert training_flops(config, params, 10) == 10 * 3 * (2 * (BLOCKS + 256 * 16) + 9 * 32 * 4 * 2)


def test_peaks():
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops_per_s("NVIDIA L40S") == 362e12
    assert peak_flops_per_s("TPU v5 lite") == 197e12
    assert peak_flops_per_s("cpu") is None


def test_a_cpus_use_is_not_known():
    assert utilisation(1e9, 1.0, 1) is None
    assert memory_gib() is None


def test_use_is_that_of_the_devices_that_work(monkeypatch):
    device = SimpleNamespace(device_kind="NVIDIA H200", memory_stats=lambda: {"peak_bytes_in_use": 3 * 2**30})
    for name in ("devices", "local_devices"):
        monkeypatch.setattr(module.jax, name, lambda: [device] * 4)
    assert utilisation(989.4e12, 1.0, 4) == pytest.approx(0.25)
    assert memory_gib() == 3.0
