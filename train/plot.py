"""`python -m train.plot RUN...` draws runs over each other, from their metrics.jsonl, into a PNG."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import tyro

from train.errors import UsageError
from train.figure import loss_axes, save_losses
from train.metrics import SCORES, read_metrics, score_of, smoothed
from train.report import exit_code

PROGRAM = "python -m train.plot"
_LABELS = {"step": "step", "tokens": "tokens", "hours": "hours of training steps"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Draw runs over each other: a thin line is the training loss, a thick one the same smoothed, dots validation."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Folders of runs, or their metrics.jsonl."""
    out: str = "runs.png"
    """The picture."""
    x: Literal["step", "tokens", "hours"] = "step"
    """What the losses stand over."""


@dataclasses.dataclass(frozen=True)
class _Curve:
    """A run's numbers; x and y in the plot's units."""

    name: str
    unit: str  # "bpb" or "bpt"
    training: list[tuple[float, float]]
    validation: list[tuple[float, float]]


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code: 0 done, 1 it could not go on, 2 the user's mistake, 130 interrupted."""
    settings = tyro.cli(Settings, prog=PROGRAM, args=list(arguments))
    return exit_code(lambda: plot(settings), "Cannot draw", "Drawing stopped", "Interrupted.")


def plot(settings: Settings) -> None:
    """Read the runs and draw them.

    Raises:
        UsageError: one of them cannot be read, or they cannot be compared.
    """
    if not settings.runs:
        raise UsageError("name one run or more")
    names = _names(settings.runs)
    curves = [_read(name, _metrics(run), settings.x) for name, run in zip(names, settings.runs)]
    draw_runs(curves, Path(settings.out), _LABELS[settings.x])
    print(f"{settings.out}: {', '.join(names)}")


def draw_runs(curves: Sequence[_Curve], path: Path, xlabel: str) -> None:
    """Draw each run in a colour of its own.

    Raises:
        UsageError: they have no score in common, or the picture cannot be written.
    """
    units = {curve.unit for curve in curves}
    if len(units) > 1:
        raise UsageError("some runs have bits per byte and some bits per token, which cannot be compared")
    axes = loss_axes(xlabel, SCORES[units.pop()])
    for number, curve in enumerate(curves):
        colour = f"C{number}"
        x, y = [place for place, _ in curve.training], [value for _, value in curve.training]
        axes.plot(x, y, color=colour, linewidth=0.6, alpha=0.3)
        label = curve.name
        if curve.validation:
            label += f", validation {curve.validation[-1][1]:.3f}"
            axes.plot(*zip(*curve.validation), "o", color=colour, markersize=4)
        axes.plot(x, smoothed(y), color=colour, linewidth=1.6, label=label)
    try:
        save_losses(axes, path)
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror or error}") from None


def _metrics(run: str) -> Path:
    path = Path(run)
    return path / "metrics.jsonl" if path.is_dir() else path


def _names(runs: Sequence[str]) -> list[str]:
    """The folders' names; where they are the same, their paths."""
    names = [_metrics(run).absolute().parent.name for run in runs]
    return names if len(set(names)) == len(names) else list(runs)


def _read(name: str, path: Path, x: str) -> _Curve:
    """A run's curve.

    Raises:
        UsageError: there is none.
    """
    try:
        records = read_metrics(path)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    places: dict[int, float] = {}
    tokens = seconds = 0.0
    for record in records:
        if "step_ms" in record:
            seconds += record["step_ms"] / 1000
            tokens += record["tokens_per_s"] * record["step_ms"] / 1000
            places[record["step"]] = {"step": record["step"], "tokens": tokens, "hours": seconds / 3600}[x]
    unit = score_of(records)

    def points(score: str) -> list[tuple[float, float]]:
        found = [(places[r["step"]], r[score]) for r in records if r.get(score) is not None and r["step"] in places]
        return [(place, value) for place, value in found if math.isfinite(value)]

    curve = _Curve(name, unit, points(unit), points(f"val_{unit}"))
    if not curve.training:
        raise UsageError(f"{path} holds no training step")
    return curve


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
