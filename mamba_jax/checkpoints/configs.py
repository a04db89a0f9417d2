"""`config.json` of the original `mamba_ssm` models, of `transformers`' Mamba and of its FalconMamba, in and out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from mamba_jax.config import MambaConfig

Format = Literal["hf", "original"]

# Their key: our field. Source: `configuration_mamba.py` and `configuration_falcon_mamba.py` of `transformers`.
_HF = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layer",
    "state_size": "d_state",
    "conv_kernel": "d_conv",
    "expand": "expand",
    "intermediate_size": "d_inner",
    "time_step_rank": "dt_rank",
    "time_step_min": "dt_min",
    "time_step_max": "dt_max",
    "time_step_init_scheme": "dt_init",
    "time_step_scale": "dt_scale",
    "time_step_floor": "dt_init_floor",
    "initializer_range": "initializer_range",
    "rescale_prenorm_residual": "rescale_prenorm_residual",
    "use_conv_bias": "conv_bias",
    "use_bias": "bias",
    "layer_norm_epsilon": "norm_eps",
    "residual_in_fp32": "residual_in_fp32",
    "tie_word_embeddings": "tie_embeddings",
    "mixer_rms_eps": "mixer_rms_eps",
}
_HF_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers")
# `transformers`' defaults, where they are not ours.
_HF_DEFAULTS = {"initializer_range": 0.1, "rescale_prenorm_residual": False}
_HF_MODELS = {"mamba": "MambaForCausalLM", "falcon_mamba": "FalconMambaForCausalLM"}

# Source: `mamba_ssm/models/config_mamba.py`; `ssm_cfg` holds arguments of `mamba_ssm.modules.mamba_simple.Mamba`.
_ORIGINAL = {
    "d_model": "d_model",
    "n_layer": "n_layer",
    "vocab_size": "vocab_size",
    "residual_in_fp32": "residual_in_fp32",
    "pad_vocab_size_multiple": "pad_vocab_size_multiple",
    "tie_embeddings": "tie_embeddings",
}
_ORIGINAL_REQUIRED = ("d_model", "n_layer", "vocab_size")
_SSM = (
    "d_state", "d_conv", "expand", "dt_rank", "dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "conv_bias",
    "bias",
)  # fmt: skip
_ORIGINAL_NORM_EPS = 1e-5  # `MixerModel`'s default, which no configuration changes

# Keys that are understood and change nothing about the model's values.
_IRRELEVANT = {
    "hf": frozenset(
        (
            "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "architectures", "attn_implementation",
            "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "experts_implementation",
            "finetuning_task", "fused_add_norm", "id2label", "is_decoder", "is_encoder_decoder", "label2id",
            "layer_types", "model_type", "name_or_path", "output_attentions", "output_hidden_states", "pad_token_id",
            "prefix", "problem_type", "return_dict", "sep_token_id", "task_specific_params", "tf_legacy_loss",
            "tokenizer_class", "torch_dtype", "torchscript", "transformers_version", "use_associative_scan",
            "use_bfloat16", "use_cache", "use_falcon_mambapy", "use_mambapy",
        )
    ),
    "original": frozenset(("fused_add_norm", "architectures", "torch_dtype", "transformers_version", "_name_or_path")),
    "ssm_cfg": frozenset(("use_fast_path",)),
}  # fmt: skip
# Keys that are understood for one value alone: another one would be another model.
_FIXED: dict[str, dict[str, tuple[Any, ...]]] = {
    "hf": {"hidden_act": ("silu", "swish"), "rms_norm": (True,), "pruned_heads": ({}, None)},
    "original": {"rms_norm": (True,), "d_intermediate": (0,), "attn_layer_idx": ([], None), "attn_cfg": ({}, None)},
    "ssm_cfg": {"layer": ("Mamba1",)},
}
# `transformers`' converted checkpoints still carry the original keys beside its own.
_COMPANIONS = ("d_model", "n_layer", "d_inner")

# Under this key stand the fields that `transformers`' own keys cannot express (it keeps keys that it does not know).
_OURS = "mamba_jax"
# How a model is computed is the caller's choice, not part of a checkpoint.
COMPUTE_FIELDS = ("scan", "dtype", "remat", "remat_policy")
MODEL_FIELDS = tuple(field.name for field in dataclasses.fields(MambaConfig) if field.name not in COMPUTE_FIELDS)
_BOOLEANS = (
    "rescale_prenorm_residual", "selective", "conv_bias", "bias", "use_bcdt_norm", "residual_in_fp32", "tie_embeddings",
)  # fmt: skip
# No published format has a place for constant B and C; a run's checkpoint has.
_HF_OURS = tuple(name for name in MODEL_FIELDS if name != "selective")


def read_config(data: Mapping[str, Any], problems: list[str]) -> tuple[MambaConfig | None, Format]:
    """The model that a `config.json` describes, and the format of the tensors beside it.

    Args:
        data: its content.
        problems: gets a line for each key that is missing, unknown or out of its range.

    Returns:
        The configuration, None if there is too little to make one; "hf" or "original".
    """
    if "model_type" in data or "hidden_size" in data:
        return _read_hf(data, problems), "hf"
    return _read_original(data, problems), "original"


def write_config(config: MambaConfig, format: Format, dtype: str) -> dict[str, Any]:
    """The `config.json` of a model whose tensors are stored in `dtype`.

    Raises:
        ValueError: neither format, or the original one, can express the model; every reason is listed.
    """
    if not config.selective:
        raise ValueError("a model with `selective=False` has no published format: its B, C and Delta are constants")
    return _write_hf(config, dtype) if format == "hf" else _write_original(config)


def make_config(fields: Mapping[str, Any], problems: list[str], keys: Mapping[str, str]) -> MambaConfig | None:
    """A configuration of `fields`; for each that is out of its range a line in `problems`, and None.

    Args:
        fields: by our names.
        problems: gets the lines.
        keys: what the file calls a field, where it has another name.
    """
    fields = dict(fields)
    before = len(problems)
    problems += [
        f"config key `{keys.get(name, name)}` must be true or false, got {fields.pop(name)!r}"
        for name in _BOOLEANS
        if name in fields and not isinstance(fields[name], bool)
    ]
    # MambaConfig stops at its first mistake: each round leaves that one out and looks for the next.
    while True:
        try:
            config = MambaConfig(**fields)
            return config if len(problems) == before else None
        except (TypeError, ValueError) as error:
            found = re.match(r"`(\w+)`", str(error))
            name = found[1] if found else ""
            problems.append(
                "config key " + re.sub(r"`(\w+)`", lambda match: f"`{keys.get(match[1], match[1])}`", str(error))
            )
            if name not in fields:
                return None
            del fields[name]


def _read_hf(data: Mapping[str, Any], problems: list[str]) -> MambaConfig | None:
    model_type = data.get("model_type", "mamba")
    if model_type not in _HF_MODELS:
        problems.append(
            f"config key `model_type` is {model_type!r}: only {' and '.join(_HF_MODELS)} are Mamba-1 models"
        )
        return None
    missing = [key for key in _HF_REQUIRED if key not in data]
    _check_keys(data, "hf", (*_HF, *_COMPANIONS, "pad_vocab_size_multiple", "ssm_cfg", _OURS), problems)
    problems += [f"config key `{key}` is missing" for key in missing]
    ssm = _ssm_cfg(data, problems)
    if missing:
        return None
    fields: dict[str, Any] = _HF_DEFAULTS | {_HF[key]: value for key, value in data.items() if key in _HF}
    fields["use_bcdt_norm"] = model_type == "falcon_mamba"
    fields["pad_vocab_size_multiple"] = 1  # `vocab_size` counts the rows of the matrix, padding and all
    ours = data.get(_OURS, {})
    if isinstance(ours, dict):
        problems += [f"config key `{_OURS}.{name}` is unknown" for name in ours if name not in _HF_OURS]
        fields |= {name: value for name, value in ours.items() if name in _HF_OURS}
    else:
        problems.append(f"config key `{_OURS}` must be a table, got {ours!r}")
    config = make_config(fields, problems, {field: key for key, field in _HF.items()})
    if config is not None:
        companions = {key: data[key] for key in _COMPANIONS if key in data}
        companions |= {key: value for key, value in ssm.items() if value != "auto"}
        problems += [
            f"config key `{key}` is {value!r}, but transformers' own key for it says {getattr(config, key)!r}"
            for key, value in companions.items()
            if value != getattr(config, key)
        ]
    return config


def _read_original(data: Mapping[str, Any], problems: list[str]) -> MambaConfig | None:
    missing = [key for key in _ORIGINAL_REQUIRED if key not in data]
    _check_keys(data, "original", (*_ORIGINAL, "ssm_cfg"), problems)
    problems += [f"config key `{key}` is missing" for key in missing]
    ssm = _ssm_cfg(data, problems)
    if missing:
        return None
    fields = {_ORIGINAL[key]: value for key, value in data.items() if key in _ORIGINAL} | ssm
    return make_config(fields, problems, {key: f"ssm_cfg.{key}" for key in _SSM})


def _ssm_cfg(data: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """The block's arguments among the original keys, which have our names."""
    ssm = data.get("ssm_cfg") or {}
    if not isinstance(ssm, dict):
        problems.append(f"config key `ssm_cfg` must be a table, got {ssm!r}")
        return {}
    _check_keys(ssm, "ssm_cfg", _SSM, problems)
    return {key: value for key, value in ssm.items() if key in _SSM}


def _check_keys(data: Mapping[str, Any], table: str, known: tuple[str, ...], problems: list[str]) -> None:
    prefix = "ssm_cfg." if table == "ssm_cfg" else ""
    for key, value in data.items():
        fixed = _FIXED[table].get(key)
        if fixed is not None:
            if value not in fixed:
                problems.append(f"config key `{prefix}{key}` is {value!r}: only {fixed[0]!r} is supported")
        elif key not in known and key not in _IRRELEVANT[table]:
            problems.append(f"config key `{prefix}{key}` is unknown (its value is {value!r})")


def _write_hf(config: MambaConfig, dtype: str) -> dict[str, Any]:
    model_type = "falcon_mamba" if config.use_bcdt_norm else "mamba"
    data: dict[str, Any] = {key: getattr(config, field) for key, field in _HF.items()}
    data["vocab_size"] = config.padded_vocab_size
    # `transformers` allows whole numbers alone here, and goes by `intermediate_size`.
    data["expand"] = max(1, int(config.expand))
    # It says how a new model is drawn; `transformers` 5 also divides the weights that it has just loaded by it.
    data["rescale_prenorm_residual"] = False
    if not config.use_bcdt_norm:
        del data["mixer_rms_eps"]
    data |= {
        "architectures": [_HF_MODELS[model_type]],
        "model_type": model_type,
        "hidden_act": "silu",
        "torch_dtype": dtype,
        # Which tokens these are is the tokenizer's matter; left out, they would all be token 0 to `transformers`.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    back = _read_hf(data, [])
    data[_OURS] = {name: getattr(config, name) for name in MODEL_FIELDS if getattr(back, name) != getattr(config, name)}
    return data if data[_OURS] else {key: value for key, value in data.items() if key != _OURS}


def _write_original(config: MambaConfig) -> dict[str, Any]:
    expand = config.expand
    if config.d_inner != int(expand * config.d_model):
        expand = (config.d_inner or 0) / config.d_model
    problems = []
    if config.use_bcdt_norm:
        problems.append("`use_bcdt_norm`: it has no norms on B, C and dt")
    if config.norm_eps != _ORIGINAL_NORM_EPS:
        problems.append(f"`norm_eps` of {config.norm_eps}: it always uses {_ORIGINAL_NORM_EPS}")
    if config.d_inner != int(expand * config.d_model):
        problems.append(f"`d_inner` of {config.d_inner}: no `expand` gives it for `d_model` of {config.d_model}")
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise ValueError(f"`format` 'original' cannot express this model; 'hf' can:\n{lines}")
    data: dict[str, Any] = {key: getattr(config, field) for key, field in _ORIGINAL.items()}
    if config.tie_embeddings:
        del data["tie_embeddings"]  # the first releases of `mamba_ssm` tied always, and refuse the key
    data["ssm_cfg"] = {key: getattr(config, key) for key in _SSM} | {"expand": expand}
    return data | {"rms_norm": True, "fused_add_norm": True}
