"""What a run can be judged by afterwards: `metrics.jsonl`, and `loss.png` drawn from it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mamba_jax.atomic import replacing
from train.errors import TrainingStopped, UsageError
from train.figure import loss_axes, save_losses

# Share of the run over which the smoothed training curve averages.
_SMOOTHING = 0.02
SCORES = {"bpb": "bits per byte", "bpt": "bits per token"}


class Metrics:
    """`metrics.jsonl`: one JSON object a line, each written out at once: a killed run has lost no line that was shown.

    Args:
        path: the file. What it already holds stays, but for the lines of steps after `step`: a resumed run makes those
            again.
        step: the last step that stays.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [record for record in read_metrics(path) if record["step"] <= step] if path.exists() else []
        with replacing(path) as temporary:
            temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        # Without a buffer: what could not be written is not tried again when the file is closed.
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line; what is not finite becomes null, as JSON has no other word for it, and so does None.

        Raises:
            TrainingStopped: it cannot be written.
        """
        finite = {name: None if value is None or not math.isfinite(value) else value for name, value in record.items()}
        line = json.dumps(finite).encode() + b"\n"
        try:
            whole = self._file.write(line) == len(line)
        except OSError as error:
            raise TrainingStopped(f"{self._path}: {error.strerror or error}") from None
        if not whole:
            raise TrainingStopped(f"{self._path}: No space left on device")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`; a half-written last line, which a killed run may leave, is not one.

    Raises:
        UsageError: a line in it is damaged.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or "step" not in record:
            raise UsageError(f"{path}: line {number} is no record of a step: mend it, or move the file away")
        records.append(record)
    return records


def score_of(records: Sequence[dict[str, Any]]) -> str:
    """The name of a run's score: "bpb", bits per byte, or "bpt", bits per token."""
    return "bpt" if any("bpt" in record for record in records) else "bpb"


def draw_loss(records: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw a run into a PNG: its score over the steps, in training and validation, beside the bigram model's."""
    score = score_of(records)
    training = [record for record in records if record.get(score) is not None]
    validation = [record for record in records if record.get(f"val_{score}") is not None]
    axes = loss_axes("step", SCORES[score], title)
    if training:
        steps, bits = [record["step"] for record in training], [record[score] for record in training]
        axes.plot(steps, bits, color="#9ecae1", linewidth=0.8, label="training, each step")
        axes.plot(steps, smoothed(bits), color="#08519c", linewidth=1.8, label="training, smoothed")
    if validation:
        steps, bits = [record["step"] for record in validation], [record[f"val_{score}"] for record in validation]
        if bigram := validation[-1].get("bigram_bpb"):
            axes.axhline(bigram, color="#636363", linestyle="--", linewidth=1.2, label=f"bigram model, {bigram:.2f}")
        axes.plot(steps, bits, "o-", color="#d94801", linewidth=1.4, markersize=5, label=f"validation, {bits[-1]:.2f}")
    save_losses(axes, path)


def smoothed(values: Sequence[float]) -> list[float]:
    """Exponential mean, corrected for its start, so that the first value counts for no more than any other."""
    weight = 1 - 1 / max(1.0, _SMOOTHING * len(values))
    total, norm, smoothed = 0.0, 0.0, []
    for value in values:
        total = weight * total + value
        norm = weight * norm + 1
        smoothed.append(total / norm)
    return smoothed
