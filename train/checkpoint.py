"""Checkpoints through orbax: everything that the next step depends on, written whole or not at all."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from mamba_jax import MambaConfig
from mamba_jax.checkpoints.digests import write_digests
from train.errors import TrainingStopped, UsageError


class Checkpoints:
    """The checkpoints of one run, in `run_dir/checkpoints/STEP`.

    Each holds a tree of arrays ("state": parameters, optimizer moments, key), a JSON record ("meta": step, model,
    text), and digests of both. Writing goes on in the background; a checkpoint has its name only once it is complete.
    """

    def __init__(self, run_dir: Path, keep: int, keep_every: int | None = None) -> None:
        """Args: how many of the newest stay on disk; every how many steps one stays for good."""
        self._run_dir = run_dir
        self._folder = (run_dir / "checkpoints").absolute()  # orbax wants an absolute path
        self._saving, self._failed = 0, False
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                keep_period=keep_every,
                enable_async_checkpointing=True,
                async_options=ocp.AsyncOptions(post_finalization_callback=self._write_digests),
                # What a killed run had begun to write.
                cleanup_tmp_directories=True,
            ),
        )

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Begin to write a checkpoint; the arrays are copied before this returns, so they may be donated afterwards.

        Raises:
            TrainingStopped: this one or the one before could not be written.
        """
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        self.latest_step()
        self._saving = step
        try:
            self._manager.save(step, args=arguments, force=True)
        except Exception as error:
            raise self._not_written(error) from None

    def check(self) -> None:
        """See how the writing goes, without waiting for it.

        Raises:
            TrainingStopped: it has failed.
        """
        try:
            self._manager.check_for_errors()
        except Exception as error:
            raise self._not_written(error) from None

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, after whatever is being written; None if there is none.

        Raises:
            TrainingStopped: the writing has failed.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._not_written(error) from None
        return self._manager.latest_step()

    def meta(self, step: int) -> dict[str, Any]:
        """The JSON record of a checkpoint."""
        return self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]

    def restore(self, step: int, like: Any) -> Any:
        """The arrays of a checkpoint, in the structure, dtypes and shardings of `like`.

        Raises:
            TrainingStopped: they do not fit, as those of another version of this program may not.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        try:
            return self._manager.restore(step, args=arguments)["state"]
        except Exception as error:
            what = f"The checkpoint of step {step} in {self._folder} is whole, but cannot be used here"
            raise TrainingStopped(f"{what}: {_first_line(error)}") from None

    def reload(self) -> None:
        """Look again which checkpoints there are."""
        self._manager.reload()

    def close(self) -> None:
        """Wait for what is being written, and let go of the folder.

        Raises:
            TrainingStopped: the writing has failed, and nobody has been told.
        """
        try:
            self._manager.close()
        except Exception as error:
            if not self._failed:
                raise self._not_written(error) from None

    def _write_digests(self) -> None:
        """What orbax calls when all files of a checkpoint are written, before it gives the folder its name."""
        if jax.process_index() == 0:
            (folder,) = self._folder.glob(f"{self._saving}.orbax-checkpoint-tmp*")
            write_digests(folder)

    def _not_written(self, error: Exception) -> TrainingStopped:
        self._failed = True
        # tensorstore's messages are long; what the operating system said stands before its number.
        said = re.search(r": ([^:\[]+) \[os_error_code", str(error))
        what = f"The checkpoint of step {self._saving} could not be written to {self._folder}"
        reason = said.group(1) if said else _first_line(error)
        return TrainingStopped(f"{what}: {reason}\n{last_good(self._run_dir, self._manager.latest_step())}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def last_good(run_dir: Path, step: int | None) -> str:
    """What to say of the newest checkpoint when a run has ended early."""
    if step is None:
        return "There is no checkpoint yet."
    return (
        f"The last good checkpoint is of step {step}: {run_dir / 'checkpoints' / str(step)}\n"
        f"To go on from it: --resume --run-dir {run_dir}"
    )


def check_same_model(saved: dict[str, Any], wanted: dict[str, Any], run_dir: Path) -> None:
    """Whether a run's checkpoint fits the model that is asked for.

    Raises:
        UsageError: naming every setting that differs.
    """
    # A checkpoint from before a field was there is of a model with that field's default.
    saved = {field.name: field.default for field in dataclasses.fields(MambaConfig) if field.name in wanted} | saved
    names = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
    if names:
        lines = [f"  {name}: {saved.get(name)} there, {wanted.get(name)} asked for" for name in names]
        lines = [
            f"--resume: {run_dir} holds another model",
            *lines,
            "Leave these flags out, or name another --run-dir.",
        ]
        raise UsageError("\n".join(lines))
