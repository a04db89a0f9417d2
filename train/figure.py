"""Pictures of losses: their axes, and how they come to disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def loss_axes(xlabel: str, ylabel: str, title: str = "") -> Any:
    """Axes in a figure of their own; losses stand over steps or time, and begin at zero."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.margins(x=0.02)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def save_png(axes: Any, path: Path) -> None:
    """Write the figure of these axes, whole or not at all, with a legend if there is anything to name."""
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    temporary = path.with_suffix(".tmp")
    axes.figure.savefig(temporary, format="png")
    os.replace(temporary, path)
