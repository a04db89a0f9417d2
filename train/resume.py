"""What a run can be resumed from: its newest checkpoint that is whole, past those that are damaged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mamba_jax.checkpoints.digests import find_damage
from train.errors import TrainingStopped


@dataclasses.dataclass(frozen=True)
class Found:
    """The checkpoints of a run, as far down as one had to look."""

    step: int | None  # of the newest whole checkpoint; None if there is no checkpoint at all
    damaged: dict[int, str]  # newer ones that are not whole, with what is wrong with them


def find_checkpoint(run_dir: Path) -> Found:
    """The newest whole checkpoint of a run; nothing on disk is changed.

    Raises:
        TrainingStopped: there are checkpoints, and none of them is whole.
    """
    damaged: dict[int, str] = {}
    # One that is still being written, or was when the run was killed, has a longer name.
    steps = (int(path.name) for path in (run_dir / "checkpoints").glob("*") if path.name.isdecimal())
    for step in sorted(steps, reverse=True):
        damage = find_damage(checkpoint_folder(run_dir, step))
        if damage is None:
            return Found(step, damaged)
        damaged[step] = damage
    if damaged:
        raise TrainingStopped(
            "\n".join(
                [
                    f"None of the checkpoints in {run_dir / 'checkpoints'} is whole, and nothing has been changed:",
                    *(f"  step {step}: {damage}" for step, damage in damaged.items()),
                    "Bring one back from a copy, or begin anew in another --run-dir.",
                ]
            )
        )
    return Found(None, {})


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return run_dir / "checkpoints" / str(step)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint, so that the step can be saved again and nothing is lost; returns its new path."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.damaged-{number}")).exists():
        number += 1
    folder.rename(aside)
    return aside
