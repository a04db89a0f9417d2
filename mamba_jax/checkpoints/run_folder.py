"""The folder of a training run (`python -m train`): its newest checkpoint's model and parameters, through orbax.

Such a folder holds `config.toml` and `checkpoints/STEP/`, where `meta` is a JSON record with the model's configuration
under "model", and `state` a tree of arrays with the parameters under "params", nested as the model's are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from mamba_jax.checkpoints.configs import COMPUTE_FIELDS, MODEL_FIELDS, make_config
from mamba_jax.config import MambaConfig

Paths = dict[tuple[str, ...], Any]


def newest_step(folder: Path) -> Path | None:
    """The folder of a run's newest complete checkpoint; None if `folder` is no run's, or has none yet."""
    # One that is still being written has a longer name.
    steps = (path for path in (folder / "checkpoints").glob("*") if path.name.isdecimal())
    complete = [path for path in steps if (path / "state").is_dir() and (path / "meta").is_dir()]
    return max(complete, key=lambda path: int(path.name), default=None)


def read_run_config(step: Path, problems: list[str]) -> MambaConfig | None:
    """The model that a checkpoint holds; a line in `problems` for each field that is not understood."""
    import orbax.checkpoint as ocp

    with _opened() as checkpointer:
        record = checkpointer.restore(step.absolute(), args=ocp.args.Composite(meta=ocp.args.JsonRestore()))
    fields = record["meta"].get("model")
    if not isinstance(fields, dict):
        problems.append(f"{step / 'meta'} holds no `model`")
        return None
    problems += [
        f"config key `model.{name}` is unknown" for name in fields if name not in (*MODEL_FIELDS, *COMPUTE_FIELDS)
    ]
    return make_config({name: value for name, value in fields.items() if name in MODEL_FIELDS}, problems, {})


def read_run_parameters(
    step: Path,
    shapes: dict[tuple[str, ...], tuple[int, ...]],
    sharding: Callable[[tuple[str, ...], tuple[int, ...]], Sharding | None],
    problems: list[str],
) -> Paths:
    """Parameters by their path in the model, placed as they are read; moments and the rest are left alone.

    Args:
        step: the checkpoint's folder.
        shapes: of every parameter that the model has.
        sharding: of a path and a shape; None is the default device.
        problems: gets a line for each parameter that is missing, unknown or misshapen; nothing is read then.
    """
    import orbax.checkpoint as ocp

    with _opened() as checkpointer:
        stored = _flat(checkpointer.metadata(step.absolute()).item_metadata["state"].tree["params"])
        dotted = {path: ".".join(path) for path in {**shapes, **stored}}
        problems += [f"parameter `{dotted[path]}` is missing" for path in shapes if path not in stored]
        problems += [f"parameter `{dotted[path]}` is unknown" for path in stored if path not in shapes]
        problems += [
            f"parameter `{dotted[path]}` has shape {tuple(stored[path].shape)} instead of {shape}"
            for path, shape in shapes.items()
            if path in stored and tuple(stored[path].shape) != shape
        ]
        if problems:
            return {}
        shardings = {path: sharding(path, shape) for path, shape in shapes.items()}
        wanted = {
            path: np.empty((0,), np.float32)
            if shardings[path] is None
            else jax.ShapeDtypeStruct(shape, np.float32, sharding=shardings[path])
            for path, shape in shapes.items()
        }
        item = {"params": _nested(wanted)}
        arguments = ocp.args.PyTreeRestore(
            item=item, restore_args=ocp.checkpoint_utils.construct_restore_args(item), partial_restore=True
        )
        restored = checkpointer.restore(step.absolute(), args=ocp.args.Composite(state=arguments))
    # What has no sharding came as a NumPy array; on its device it is not committed, as a fresh model's parameters.
    return {path: jax.device_put(leaf) for path, leaf in _flat(restored["state"]["params"]).items()}


def _opened() -> Any:
    import orbax.checkpoint as ocp

    handler = ocp.CompositeCheckpointHandler(state=ocp.PyTreeCheckpointHandler(), meta=ocp.JsonCheckpointHandler())
    return ocp.Checkpointer(handler)


def _flat(tree: Any, path: tuple[str, ...] = ()) -> Paths:
    if not isinstance(tree, dict):
        return {path: tree}
    return {found: leaf for name, part in tree.items() for found, leaf in _flat(part, (*path, name)).items()}


def _nested(flat: Paths) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        part = tree
        for name in path[:-1]:
            part = part.setdefault(name, {})
        part[path[-1]] = leaf
    return tree
