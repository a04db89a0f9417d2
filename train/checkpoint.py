"""Checkpoints through orbax: everything that the next step depends on, written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.errors import UsageError


class Checkpoints:
    """The checkpoints of one run, in `run_dir/checkpoints/STEP`.

    Each holds a tree of arrays ("state": parameters, optimizer moments, key) and a JSON record ("meta": step, model,
    text). Writing goes on in the background; a checkpoint has its name only once it is complete.
    """

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._manager = ocp.CheckpointManager(
            # orbax wants an absolute path.
            (run_dir / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True),
        )

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Begin to write a checkpoint; the arrays are copied before this returns, so they may be donated afterwards."""
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        self._manager.save(step, args=arguments, force=True)

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, after whatever is being written; None if there is none."""
        self._manager.wait_until_finished()
        return self._manager.latest_step()

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON record of a checkpoint."""
        return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, step: int, like: Any) -> Any:
        """The arrays of a checkpoint, in the structure, dtypes and shardings of `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))["state"]

    def close(self) -> None:
        """Wait for what is being written, and let go of the folder."""
        self._manager.close()


def check_same_model(saved: dict[str, Any], wanted: dict[str, Any], run_dir: Path) -> None:
    """Whether a run's checkpoint fits the model that is asked for.

    Raises:
        UsageError: naming every setting that differs.
    """
    names = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
    if names:
        lines = [f"  {name}: {saved.get(name)} there, {wanted.get(name)} asked for" for name in names]
        lines = [
            f"--resume: {run_dir} holds another model",
            *lines,
            "Leave these flags out, or name another --run-dir.",
        ]
        raise UsageError("\n".join(lines))
