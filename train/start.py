"""What a run starts from: a new model, or with --init-from the parameters of a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

from flax import nnx
from jax.sharding import Mesh

from mamba_jax import MambaConfig, MambaLM
from mamba_jax.checkpoints.configs import COMPUTE_FIELDS, MODEL_FIELDS
from mamba_jax.checkpoints.run_folder import read_run_config
from train.config import TrainConfig
from train.errors import UsageError
from train.mesh import check_mesh
from train.sharding import partition
from train.step import Params, model_config

# The settings that --init-from leaves no choice about.
_SIZES = tuple(name for name in MODEL_FIELDS if hasattr(TrainConfig, name))


def starting_point(
    config: TrainConfig, mesh: Mesh, step: Path | None = None
) -> tuple[TrainConfig, MambaConfig, Params | None]:
    """The settings with the model's true sizes, the model, and its parameters if they are not to be new ones.

    A run that began from a checkpoint and is resumed needs that one no more: its own says what the model is.

    Args:
        config: as the user gave it.
        mesh: the devices that parameters are placed on.
        step: the folder of the run's own checkpoint, if it is resumed from one.

    Raises:
        UsageError: there is no such checkpoint, it cannot be loaded, or a flag asks for another model than it holds.
    """
    if config.init_from is None:
        return config, model_config(config), None
    computed: dict[str, Any] = {name: getattr(config, name) for name in COMPUTE_FIELDS}
    if step is not None:
        problems: list[str] = []
        model = read_run_config(step, problems)
        if model is None or problems:
            raise UsageError("\n".join([f"--resume: {step} cannot be used:", *problems]))
        model = model.replace(**computed)
        return _with_sizes(config, model), model, None
    try:
        lm = MambaLM.from_pretrained(config.init_from, mesh=mesh, partition=partition(mesh), **computed)
    except (ValueError, ImportError) as error:
        raise UsageError(f"--init-from: {error}") from None
    return _with_sizes(config, lm.config), lm.config, nnx.to_pure_dict(nnx.state(lm))


def check_splits(config: TrainConfig, model: MambaConfig) -> None:
    """Whether batches and model can be split as the settings say.

    Raises:
        UsageError: naming every reason why not.
    """
    problems = check_mesh(
        config.mesh,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        seq_len=config.seq_len,
        d_conv=model.d_conv,
        d_inner=cast(int, model.d_inner),  # the record derived it
    )
    if problems:
        raise UsageError("\n".join(problems))


def _with_sizes(config: TrainConfig, model: MambaConfig) -> TrainConfig:
    """The settings with the sizes of the model; one that was set to another value is a mistake."""
    default = TrainConfig()
    wrong = [
        f"--{name.replace('_', '-')} {getattr(config, name)}: the model of --init-from has {getattr(model, name)}"
        for name in _SIZES
        if getattr(config, name) not in (getattr(default, name), getattr(model, name))
    ]
    if wrong:
        raise UsageError("\n".join(wrong))
    return dataclasses.replace(
        config, **{name: getattr(model, name) for name in _SIZES} | {"expand": float(model.expand)}
    )
