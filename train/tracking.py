"""Where the numbers of a run go besides metrics.jsonl: TensorBoard and Weights & Biases, through their libraries."""

from __future__ import annotations

import importlib
import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from train.config import TrainConfig
from train.errors import UsageError


class Tracker(Protocol):
    """What takes a run's numbers."""

    def write(self, record: Mapping[str, float | None]) -> None:
        """Take the numbers of a step, which is among them as "step"; None is a number that nobody knows."""
        ...

    def close(self) -> None:
        """Write what is still waiting."""
        ...


def check_trackers(config: TrainConfig) -> None:
    """Whether the libraries that the settings ask for are there.

    Raises:
        UsageError: one is missing.
    """
    for asked, flag, library, extra in (
        (config.tensorboard, "--tensorboard", "tensorboardX", "tensorboard"),
        (config.wandb is not None, "--wandb", "wandb", "wandb"),
    ):
        if asked and importlib.util.find_spec(library) is None:
            raise UsageError(f"{flag} needs the library {library}: pip install 'mamba-jax[{extra}]'")


def open_trackers(config: TrainConfig, run_dir: Path, step: int) -> list[Tracker]:
    """Those that the settings ask for; what they hold of steps after `step` is to be replaced.

    Raises:
        UsageError: one cannot be opened.
    """
    trackers: list[Tracker] = []
    if config.tensorboard:
        trackers.append(TensorBoard(run_dir / "tensorboard", step))
    if config.wandb is not None:
        trackers.append(WeightsAndBiases(config, config.wandb, run_dir))
    return trackers


class TensorBoard:
    """Event files, for `tensorboard --logdir RUN_DIR`."""

    def __init__(self, folder: Path, step: int) -> None:
        """Args: where to; the last step that stays."""
        self._writer = importlib.import_module("tensorboardX").SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, record: Mapping[str, float | None]) -> None:
        """As `Tracker` says."""
        for name, value in record.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, int(record["step"] or 0))

    def close(self) -> None:
        """As `Tracker` says."""
        self._writer.close()


class WeightsAndBiases:
    """A run of a Weights & Biases project; with WANDB_MODE=offline it stays on this machine."""

    def __init__(self, config: TrainConfig, project: str, run_dir: Path) -> None:
        """Args: the settings; the project's name; the run's folder, which keeps the run's id for when it is resumed.

        Raises:
            UsageError: it cannot be reached, or nobody is logged in.
        """
        wandb = importlib.import_module("wandb")
        path = run_dir / "wandb-id.txt"
        if not path.exists():
            path.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.name,
                id=path.read_text(encoding="utf-8"),
                resume="allow",
                dir=str(run_dir),
                config=config.settings(),
            )
        except wandb.Error as error:
            raise UsageError(f"--wandb: {str(error).splitlines()[0]}") from None

    def write(self, record: Mapping[str, float | None]) -> None:
        """As `Tracker` says."""
        known = {name: value for name, value in record.items() if value is not None}
        self._run.log(known, step=int(record["step"] or 0))

    def close(self) -> None:
        """As `Tracker` says."""
        self._run.finish()
