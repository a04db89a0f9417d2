import dataclasses

import pytest

from mamba_jax.config import MambaConfig

# Widths inside a block and ranks of Delta of the published checkpoints, read off their tensors' shapes.
PUBLISHED = {
    "mamba-130m": (24, 768, 1536, 48),
    "mamba-370m": (48, 1024, 2048, 64),
    "mamba-790m": (48, 1536, 3072, 96),
    "mamba-1.4b": (48, 2048, 4096, 128),
    "mamba-2.8b": (64, 2560, 5120, 160),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets(name):
    config = MambaConfig.preset(name)
    assert (config.n_layer, config.d_model, config.d_inner, config.dt_rank) == PUBLISHED[name]
    assert (config.vocab_size, config.padded_vocab_size) == (50277, 50280)
    assert config == MambaConfig.preset(f"state-spaces/{name}")


def test_preset_with_changes():
    config = MambaConfig.preset("mamba-130m", d_model=100, n_layer=2, scan="pallas")
    assert (config.d_inner, config.dt_rank, config.n_layer, config.scan) == (200, 7, 2, "pallas")


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"`name` must be one of mamba-130m, .*, got 'mamba-7b'"):
        MambaConfig.preset("mamba-7b")


def test_given_sizes_stand():
    config = MambaConfig(d_model=64, d_inner=100, dt_rank=3)
    assert (config.d_inner, config.dt_rank) == (100, 3)


@pytest.mark.parametrize(("vocab_size", "multiple", "padded"), [(256, 8, 256), (257, 8, 264), (7, 1, 7), (1, 16, 16)])
def test_padded_vocabulary(vocab_size, multiple, padded):
    assert MambaConfig(vocab_size=vocab_size, pad_vocab_size_multiple=multiple).padded_vocab_size == padded


def test_replace_derives_again():
    config = MambaConfig(d_model=64).replace(d_model=160)
    assert (config.d_inner, config.dt_rank) == (320, 10)


def test_replace_keeps_given_sizes():
    config = MambaConfig(d_model=64, d_inner=100, dt_rank=3).replace(d_model=160)
    assert (config.d_inner, config.dt_rank) == (100, 3)


def test_frozen_and_hashable():
    config = MambaConfig()
    assert hash(config) == hash(MambaConfig())
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, "d_model", 5)  # noqa: B010  as a statement it is a type error


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("d_model", 0, "`d_model` must be a whole number of at least 1, got 0"),
        ("d_model", 2.5, "`d_model` must be a whole number of at least 1, got 2.5"),
        ("n_layer", True, "`n_layer` must be a whole number of at least 1, got True"),
        ("vocab_size", -1, "`vocab_size` must be a whole number"),
        ("d_conv", 0, "`d_conv` must be a whole number"),
        ("d_inner", 0, "`d_inner` must be a whole number of at least 1, got 0"),
        ("expand", 0, "`expand` must be a number above 0, got 0"),
        ("expand", 0.001, "`d_inner` must be a whole number of at least 1, got 0"),
        ("dt_rank", "full", "`dt_rank` must be a whole number of at least 1 or 'auto', got 'full'"),
        ("dt_min", 1.0, r"`dt_min` is 1\.0, above `dt_max`, 0\.1"),
        ("dt_init", "zeros", "`dt_init` must be one of random, constant, got 'zeros'"),
        ("norm_eps", 0, "`norm_eps` must be a number above 0, got 0"),
        ("initializer_range", -1.0, "`initializer_range` must not be negative"),
        ("scan", "cuda", "`scan` must be one of auto, sequential, associative, pallas, got 'cuda'"),
        ("dtype", "int8", "`dtype` must be one of float32, bfloat16, float16, float64, got 'int8'"),
        ("remat_policy", "some", "`remat_policy` must be one of nothing, dots, got 'some'"),
    ],
)
def test_wrong_fields(field, value, message):
    with pytest.raises(ValueError, match=message):
        MambaConfig(**{field: value})


def test_norms_on_what_is_not_there():
    with pytest.raises(ValueError, match="`use_bcdt_norm` needs `selective`"):
        MambaConfig(use_bcdt_norm=True, selective=False)
