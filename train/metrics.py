"""What a run can be judged by afterwards: `metrics.jsonl`, and `loss.png` drawn from it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Share of the run over which the smoothed training curve averages.
_SMOOTHING = 0.02


class Metrics:
    """`metrics.jsonl`: one JSON object a line, each written out at once: a killed run has lost no line that was shown.

    Args:
        path: the file. What it already holds stays, but for the lines of steps after `step`: a resumed run makes those
            again.
        step: the last step that stays.
    """

    def __init__(self, path: Path, step: int) -> None:
        kept = [record for record in read_metrics(path) if record["step"] <= step] if path.exists() else []
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append one line; a number that is not finite becomes null, since JSON has no other word for it."""
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`; a half-written last line, which a killed run may leave, is not one."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def draw_loss(records: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Draw a run into a PNG: bits per byte over the steps, in training and validation, beside the bigram model's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    training = [record for record in records if record.get("bpb") is not None]
    validation = [record for record in records if record.get("val_bpb") is not None]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if training:
        steps, bits = [record["step"] for record in training], [record["bpb"] for record in training]
        axes.plot(steps, bits, color="#9ecae1", linewidth=0.8, label="training, each step")
        axes.plot(steps, _smoothed(bits), color="#08519c", linewidth=1.8, label="training, smoothed")
    if validation:
        steps, bits = [record["step"] for record in validation], [record["val_bpb"] for record in validation]
        bigram = validation[-1]["bigram_bpb"]
        axes.axhline(bigram, color="#636363", linestyle="--", linewidth=1.2, label=f"bigram model, {bigram:.2f}")
        axes.plot(steps, bits, "o-", color="#d94801", linewidth=1.4, markersize=5, label=f"validation, {bits[-1]:.2f}")
    axes.set(xlabel="step", ylabel="bits per byte", title=title)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.02)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if training or validation:
        axes.legend(frameon=False)
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, path)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Exponential mean, corrected for its start, so that the first value counts for no more than any other."""
    weight = 1 - 1 / max(1.0, _SMOOTHING * len(values))
    total, norm, smoothed = 0.0, 0.0, []
    for value in values:
        total = weight * total + value
        norm = weight * norm + 1
        smoothed.append(total / norm)
    return smoothed
