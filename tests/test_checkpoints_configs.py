"""Configurations of checkpoints: published ones are understood, and every fault is named."""

import json

import pytest
from checkpoint_files import (
    FALCON,
    TIED,
    edit_json,
    error_of,
    random_model,
)

from mamba_jax.config import MambaConfig


def test_published_configs():
    """As they stand beside the published weights."""
    from mamba_jax.checkpoints.configs import read_config

    problems = []
    original = {
        "d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": True, "residual_in_fp32": True,
        "fused_add_norm": True, "pad_vocab_size_multiple": 8,
    }  # fmt: skip
    assert read_config(original, problems) == (MambaConfig.preset("mamba-130m"), "original")

    shared = {
        "bos_token_id": 0, "conv_kernel": 4, "eos_token_id": 0, "hidden_act": "silu", "initializer_range": 0.1,
        "layer_norm_epsilon": 1e-05, "pad_token_id": 0, "rescale_prenorm_residual": False, "residual_in_fp32": True,
        "state_size": 16, "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1,
        "time_step_min": 0.001, "time_step_scale": 1.0, "torch_dtype": "float32", "transformers_version": "4.39.0",
        "use_bias": False, "use_cache": True, "use_conv_bias": True,
    }  # fmt: skip
    converted = original | shared | {
        "architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24,
        "vocab_size": 50280, "expand": 2, "intermediate_size": 1536, "d_inner": 1536, "time_step_rank": 48,
    }  # fmt: skip
    config, format = read_config(converted, problems)
    assert format == "hf" and not problems
    assert (config.padded_vocab_size, config.d_inner, config.dt_rank, config.tie_embeddings) == (50280, 1536, 48, True)

    falcon = shared | {
        "architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba", "hidden_size": 4096,
        "num_hidden_layers": 64, "vocab_size": 65024, "expand": 16, "intermediate_size": 8192, "time_step_rank": 256,
        "tie_word_embeddings": False, "use_falcon_mambapy": False,
    }  # fmt: skip
    config, _ = read_config(falcon, problems)
    assert not problems
    assert (config.d_inner, config.use_bcdt_norm, config.mixer_rms_eps, config.tie_embeddings) == (
        8192,
        True,
        1e-6,
        False,
    )


def test_config_faults_are_listed_together(tmp_path):
    random_model(TIED).save_pretrained(tmp_path)
    edit_json(
        tmp_path / "config.json", sliding_window=7, hidden_act="gelu", state_size=-3, use_bias="no", conv_kernel=0
    )
    message = error_of(tmp_path)
    for part in (
        "`sliding_window` is unknown",
        "`hidden_act` is 'gelu'",
        "`state_size` must be",
        "`conv_kernel` must be",
    ):
        assert part in message
    assert "`use_bias` must be true or false, got 'no'" in message
    assert len(message.splitlines()) == 6


def test_original_config_faults_are_listed_together(tmp_path):
    random_model(TIED).save_pretrained(tmp_path, format="original")
    edit_json(
        tmp_path / "config.json", n_layer=None, rms_norm=False, hidden=3, attn_layer_idx=[1],
        ssm_cfg={"layer": "Mamba2", "headdim": 64},
    )  # fmt: skip
    message = error_of(tmp_path)
    for part in ("`n_layer` is missing", "`rms_norm` is False", "`hidden` is unknown", "`attn_layer_idx` is [1]"):
        assert part in message
    assert "`ssm_cfg.layer` is 'Mamba2'" in message and "`ssm_cfg.headdim` is unknown" in message


def test_contradicting_companion_keys(tmp_path):
    random_model(TIED).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", d_model=11, ssm_cfg={"d_state": 16})
    message = error_of(tmp_path)
    assert "`d_model` is 11" in message and "`d_state` is 16" in message


def test_another_kind_of_model(tmp_path):
    random_model(TIED).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", model_type="mamba2")
    assert "`model_type` is 'mamba2'" in error_of(tmp_path)


def test_what_the_original_format_cannot_express(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)'hf' can.*`use_bcdt_norm`.*`norm_eps`"):
        random_model(FALCON).save_pretrained(tmp_path / "model", format="original")
    assert not (tmp_path / "model").exists()


def test_extra_config(tmp_path):
    lm = random_model(TIED)
    lm.save_pretrained(tmp_path, extra_config={"eos_token_id": 11})
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 11
    with pytest.raises(ValueError, match=r"`extra_config`.*`eos` is unknown"):
        lm.save_pretrained(tmp_path, extra_config={"eos": 11})
    with pytest.raises(ValueError, match=r"`extra_config`.*another one"):
        lm.save_pretrained(tmp_path, extra_config={"state_size": 11})


@pytest.mark.parametrize("argument", [{"format": "gguf"}, {"dtype": "int8"}])
def test_wrong_choices(tmp_path, argument):
    with pytest.raises(ValueError, match=f"`{next(iter(argument))}` must be one of"):
        random_model(TIED).save_pretrained(tmp_path, **argument)
