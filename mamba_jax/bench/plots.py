"""The plots: time and memory over length, and how many times as fast as the PyTorch loop each implementation is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mamba_jax.bench.implementations import BASELINE, IMPLEMENTATIONS

Rows = Sequence[dict[str, Any]]

# Ours in strong colours with round marks, rivals in quiet ones: Okabe and Ito's palette, for colour-blind readers too.
_LOOKS: dict[str, dict[str, Any]] = {
    "torch-loop": {"color": "#000000", "marker": "s"},
    "torch-compile": {"color": "#7f7f7f", "marker": "D"},
    "torch-script": {"color": "#7f7f7f", "marker": "v"},
    "torch-transposed": {"color": "#7f7f7f", "marker": "^"},
    "mambapy": {"color": "#CC79A7", "marker": "P"},
    "transformers": {"color": "#E69F00", "marker": "X"},
    "mamba_ssm": {"color": "#8C564B", "marker": "*"},
    "plain-scan": {"color": "#56B4E9", "marker": "d"},
    "sequential": {"color": "#0072B2", "marker": "o"},
    "associative": {"color": "#009E73", "marker": "o"},
    "pallas": {"color": "#D55E00", "marker": "o"},
    "sequential-split": {"color": "#0072B2", "marker": "o"},
    "associative-split": {"color": "#009E73", "marker": "o"},
    "pallas-split": {"color": "#D55E00", "marker": "o"},
}
_PASS_TITLES = {"forward": "forward", "gradient": "forward + backward"}
_STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "axes.grid": True, "grid.color": "#e5e5e5", "grid.linewidth": 0.6, "axes.axisbelow": True, "savefig.dpi": 200,
    "figure.constrained_layout.use": True,
}  # fmt: skip


def write_plots(rows: Rows, folder: Path) -> list[Path]:
    """Write time.png, memory.png and ratio.png into `folder`, those that have something to show; their paths."""
    from matplotlib import rc_context

    rows = [row for row in rows if row["ms"] is not None]
    paths = []
    with rc_context(_STYLE):
        for name, make in (("time", _time), ("memory", _memory), ("ratio", _ratio)):
            figure = make(rows)
            if figure is not None:
                paths.append(folder / f"{name}.png")
                figure.savefig(paths[-1])
    return paths


def _time(rows: Rows) -> Any:
    return _over_length(rows, "ms", "time [ms]", lambda ax: _slope_mark(ax))


def _memory(rows: Rows) -> Any:
    return _over_length([r for r in rows if r["temp_mib"]], "temp_mib", "temporary memory [MiB]", lambda ax: None)


def _over_length(rows: Rows, value: str, label: str, decorate) -> Any:
    """A panel a pass, both axes logarithmic, one legend beside them."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    if not rows:
        return None
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    figure = Figure(figsize=(3.3 * len(passes) + 2.2, 3.6))
    panels = figure.subplots(1, len(passes), squeeze=False, sharey=True)[0]
    handles: dict[str, Any] = {}
    for panel, which in zip(panels, passes):
        for name in IMPLEMENTATIONS:
            points = sorted((r["length"], r[value]) for r in rows if (r["pass"], r["implementation"]) == (which, name))
            if points:
                (line,) = panel.plot(*zip(*points), label=IMPLEMENTATIONS[name].title, **_line(name))
                handles.setdefault(name, line)
        lengths = sorted({row["length"] for row in rows})
        panel.set(xscale="log", yscale="log", xlabel="sequence length", title=_PASS_TITLES[which])
        panel.set_xticks(lengths, labels=[_short(l) for l in lengths])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.10g}"))
        decorate(panel)
    panels[0].set_ylabel(label)
    figure.legend(handles.values(), [h.get_label() for h in handles.values()], loc="outside right center", fontsize=8)
    figure.suptitle(_sizes(rows), fontsize=9, color="#555555")
    return figure


def _line(name: str) -> dict[str, Any]:
    ours = name.split("-")[0] in ("sequential", "associative", "pallas")
    dashes = {"linestyle": (0, (4, 2)), "markerfacecolor": "white"} if name.endswith("-split") else {}
    weight = (
        {"linewidth": 1.8, "markersize": 5, "zorder": 3} if ours else {"linewidth": 1, "markersize": 4, "zorder": 2}
    )
    return _LOOKS[name] | weight | dashes


def _slope_mark(panel: Any) -> None:
    """A dotted line of slope 1, for the eye: time in proportion to the length."""
    (left, right), low = panel.get_xlim(), min(min(line.get_ydata()) for line in panel.get_lines())
    start = 0.3 * low / left
    ends = ([left, right], [start * left, start * right])
    panel.plot(*ends, ":", color="#aaaaaa", linewidth=1, scalex=False)
    below = {"xytext": (-4, -10), "textcoords": "offset points", "ha": "right"}
    panel.annotate("linear", (right, start * right), fontsize=7, color="#888888", **below)


def _ratio(rows: Rows) -> Any:
    """Bars of the ratio to the PyTorch loop, a panel a pass, each at the greatest length that most of them ran."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    rows = [row for row in rows if row["ratio"] is not None]
    if not rows:
        return None
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    chosen = {which: _at_common_length([r for r in rows if r["pass"] == which]) for which in passes}
    tallest = max(map(len, chosen.values()))
    figure = Figure(figsize=(max(6.5, 5 * len(passes)), 1.2 + 0.29 * tallest))
    for panel, which in zip(figure.subplots(1, len(passes), squeeze=False)[0], passes):
        bars = sorted(chosen[which], key=lambda r: r["ratio"])
        values = [row["ratio"] for row in bars]
        labels = [IMPLEMENTATIONS[row["implementation"]].title for row in bars]
        drawn = panel.barh(labels, values, color=[_LOOKS[r["implementation"]]["color"] for r in bars], height=0.7)
        texts = [f"{v:,.0f}×" if v >= 10 else f"{v:.2g}×" for v in values]
        texts = [f"≈ {text}" if row["ratio_is_estimated"] else text for row, text in zip(bars, texts)]
        panel.bar_label(drawn, texts, padding=3, fontsize=8)
        panel.set(xscale="log", xlabel="times as fast as the PyTorch loop")
        panel.set_title(f"{_PASS_TITLES[which]}, length {bars[0]['length']:,}")
        panel.set_xlim(min(0.5, *values) * 0.8, max(values) * 6)
        panel.axvline(1, color="#bbbbbb", linewidth=0.8, zorder=0)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.10g}"))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.tick_params(axis="y", length=0)
        panel.grid(visible=False, axis="y")
    figure.suptitle(_sizes(rows), fontsize=9, color="#555555")
    return figure


def _at_common_length(rows: Rows) -> Rows:
    """The rows of one length, the greatest at which most ran, and the loop too if it ran at all."""
    measured = {r["length"] for r in rows if r["implementation"] == BASELINE} or {r["length"] for r in rows}
    counts = {length: sum(r["length"] == length for r in rows) for length in measured}
    best = max(counts, key=lambda length: (counts[length] >= 0.7 * max(counts.values()), length))
    return [r for r in rows if r["length"] == best]


def _short(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def _sizes(rows: Rows) -> str:
    row = rows[0]
    return f"batch {row['batch']}, {row['channels']} channels, {row['state']} states, {row['dtype']}"
