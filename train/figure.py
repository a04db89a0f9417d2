"""Pictures of runs: axes of one look, and how they come to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mamba_jax.atomic import replacing


def new_axes(rows: int = 1) -> list[Any]:
    """Axes in a figure of their own, one above the other, over one x axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2 + 2.5 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    column = list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0])
    for axes in column:
        axes.margins(x=0.02)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return column


def save_png(axes: Any, path: Path) -> None:
    """Write the figure of these axes, whole or not at all."""
    with replacing(path) as temporary:
        axes.figure.savefig(temporary, format="png")


def loss_axes(xlabel: str, ylabel: str, title: str = "") -> Any:
    """Axes for losses over steps or time."""
    (axes,) = new_axes()
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    return axes


def save_losses(axes: Any, path: Path) -> None:
    """`save_png` of losses: they begin at zero, with a legend if there is anything to name."""
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    save_png(axes, path)
