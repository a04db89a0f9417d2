"""The pictures of the synthetic tasks: how a run learned one, and how far induction heads reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.figure import new_axes, save_png

_TRAINING, _VALIDATION, _CHANCE = "#08519c", "#d94801", "#636363"


def draw_accuracy(records: Sequence[dict[str, Any]], path: Path, title: str, chance: float) -> None:
    """Draw a run into a PNG: the share of right answers over the steps, and the training loss below.

    Args:
        records: of `metrics.jsonl`.
        path: the file.
        title: above the picture.
        chance: the share that guessing has.
    """
    training = [record for record in records if record.get("loss") is not None]
    validation = [record for record in records if record.get("val_accuracy") is not None]
    upper, lower = new_axes(rows=2)
    upper.axhline(chance, color=_CHANCE, linestyle="--", linewidth=1.2, label=f"by chance, {chance:.1%}")
    if validation:
        steps, shares = _columns(validation, "step", "val_accuracy")
        label = f"held-out sequences, {shares[-1]:.2%}"
        upper.plot(steps, shares, "o-", color=_VALIDATION, linewidth=1.4, markersize=4, label=label)
    upper.set(ylabel="right answers", title=title, ylim=(0, 1.03))
    upper.legend(frameon=False, loc="center right")
    if training:
        steps, losses = _columns(training, "step", "loss")
        lower.plot(steps, losses, color=_TRAINING, linewidth=0.8)
    # A loss of exactly zero, which float32 reaches on these tasks, has no place on the axis.
    lower.set_yscale("log", nonpositive="mask")
    lower.set(xlabel="step", ylabel="training loss, nats")
    save_png(upper, path)


def draw_extrapolation(
    shares: Mapping[int, float], path: Path, title: str, trained: Sequence[int], chance: float
) -> None:
    """Draw the share of right answers over the length of the sequences into a PNG, as the paper's table 2 has it.

    Args:
        shares: by length.
        path: the file.
        title: above the picture.
        trained: the lengths that the model was trained at.
        chance: the share that guessing has.
    """
    (axes,) = new_axes()
    label = f"trained at {' to '.join(f'{length:,}' for length in sorted({min(trained), max(trained)}))}"
    for length in {min(trained), max(trained)}:
        axes.axvline(length, color=_TRAINING, linestyle=":", linewidth=1.4, label=label)
        label = None
    axes.axhline(chance, color=_CHANCE, linestyle="--", linewidth=1.2, label=f"by chance, {chance:.1%}")
    axes.plot(list(shares), list(shares.values()), "o-", color=_VALIDATION, linewidth=1.6, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="length of the sequence", ylabel="right answers", title=title, ylim=(0, 1.03))
    axes.legend(frameon=False, loc="best")
    save_png(axes, path)


def _columns(records: Sequence[dict[str, Any]], *names: str) -> list[list[float]]:
    return [[record[name] for record in records] for name in names]
