"""What the benchmark shows on the terminal, and its JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mamba_jax.bench.limits import Limits
from mamba_jax.bench.results import growth

Rows = Sequence[dict[str, Any]]


class Screen:
    """Standard output for results, standard error for what goes on, so that a pipe gets the results alone."""

    def __init__(self, console: Console | None = None, progress: Console | None = None) -> None:
        """Args: consoles, by default of the two standard streams; in a file or pipe nothing is folded."""
        self.console = console or Console(highlight=False)
        self._progress = progress or Console(stderr=True, highlight=False)
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, 160)

    @contextmanager
    def status(self) -> Iterator[Any]:
        """A function that says what goes on: on a terminal a line that is replaced, else lines."""
        if self._progress.is_terminal:
            with self._progress.status("") as status:
                yield lambda text: status.update(Text(text))
        else:
            yield lambda text: self._progress.print(Text(text), soft_wrap=True)

    def line(self, text: str = "", style: str = "") -> None:
        self.console.print(Text(text, style=style), soft_wrap=True)

    def error(self, message: str) -> None:
        """One line on standard error."""
        self._progress.print(Text(f"error: {message}", style="bold red"), soft_wrap=True)

    def header(self, machine: dict[str, Any], versions: dict[str, str], limits: Limits) -> None:
        """The machine, the versions, and what the device can do at most."""
        self.line(f"{machine['device']}, {machine['cores']} cores, {machine['jax_devices']} JAX device(s)", "bold")
        self.line(", ".join(f"{name} {version}" for name, version in versions.items()), "dim")
        rates = f"exponentials {limits.exponentials_g_per_s:.2f} G/s, FMAs {limits.fma_g_per_s:.1f} G/s"
        self.line(f"measured limits: memory {limits.bandwidth_gb_per_s:.1f} GB/s, {rates}", "dim")

    def comparison(self, rows: Rows, titles: dict[str, str]) -> None:
        """For each pass: time over the lengths, then all that is known at the greatest length that each ran."""
        for which in dict.fromkeys(row["pass"] for row in rows):
            chosen = [row for row in rows if row["pass"] == which]
            sizes = chosen[0]
            title = f"{which}: (b, d, n) = ({sizes['batch']}, {sizes['channels']}, {sizes['state']}), {sizes['dtype']}"
            self.line()
            self.console.print(times_table(f"{title}: milliseconds", chosen, titles))
            self.console.print(details_table(f"{title}: at the greatest length that each ran", chosen, titles))
        self._notes(rows)

    def models(self, rows: Rows, titles: dict[str, str]) -> None:
        """Whole models: for each, every pass, length and implementation."""
        for model in dict.fromkeys(row["model"] for row in rows):
            chosen = [row for row in rows if row["model"] == model and row["ms"] is not None]
            self.line()
            if chosen:
                title = f"{model}: batch {chosen[0]['batch']}, {chosen[0]['dtype']}"
                self.console.print(models_table(title, chosen, titles))
            self._notes([row for row in rows if row["model"] == model])

    def _notes(self, rows: Rows) -> None:
        """Why cells are empty, each reason once."""
        reasons: dict[tuple[str, str, str], list[int]] = {}
        for row in rows:
            if row["ms"] is None:
                reasons.setdefault((row["implementation"], row["pass"], row["note"]), []).append(row["length"])
        if reasons:
            self.line()
            self.line("Rows without a time:", "bold")
        for (name, which, note), lengths in reasons.items():
            self.line(f"  {name}, {which}, length {', '.join(map(str, lengths))}: {note}")
        if any(row.get("ratio_is_estimated") for row in rows):
            self.line("~ the loop itself was not run at this length; its time is extrapolated from shorter ones", "dim")


def times_table(title: str, rows: Rows, titles: dict[str, str]) -> Table:
    """Implementations by lengths: the median, and the spread of the rounds in percent."""
    lengths = sorted({row["length"] for row in rows})
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("implementation", no_wrap=True)
    for length in lengths:
        table.add_column(f"l = {length}", justify="right", no_wrap=True)
    table.add_column("growth", justify="right", no_wrap=True)
    cells = {(row["implementation"], row["length"]): _time_cell(row) for row in rows}
    for name in (name for name in titles if any(row["implementation"] == name for row in rows)):
        power = growth(rows, name, rows[0]["pass"]).time
        table.add_row(
            Text(titles[name], style=_style(name)),
            *(cells.get((name, length), Text("")) for length in lengths),
            "" if power is None else f"l^{power:.2f}",
        )
    return table


def details_table(title: str, rows: Rows, titles: dict[str, str]) -> Table:
    """Ratio, memory, compile time and use of the hardware, at each implementation's greatest length; fastest first."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("implementation", no_wrap=True)
    for column in ("length", "ms", "x loop", "temp MiB", "memory", "compile s", "of limit"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    greatest = {row["implementation"]: row for row in sorted(rows, key=lambda r: r["length"]) if row["ms"] is not None}
    for row in sorted(greatest.values(), key=lambda r: r["ms"] / r["length"]):
        power = growth(rows, row["implementation"], row["pass"]).memory
        table.add_row(
            Text(titles[row["implementation"]], style=_style(row["implementation"])),
            str(row["length"]),
            number(row["ms"]),
            "" if row["ratio"] is None else ("~" if row["ratio_is_estimated"] else "") + number(row["ratio"]),
            "" if row["temp_mib"] is None else number(row["temp_mib"]),
            "" if power is None else f"l^{power:.2f}",
            "" if row["compile_s"] is None else number(row["compile_s"]),
            f"{row['of_limit']:.1%}",
            row["bound"],
        )
    return table


def models_table(title: str, rows: Rows, titles: dict[str, str]) -> Table:
    """One model: time, throughput, ratio to transformers, memory and compile time."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("pass", "implementation"):
        table.add_column(column, no_wrap=True)
    for column in ("length", "ms", "tokens/s", "x transformers", "temp MiB", "compile s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        optional = (row[name] for name in ("ratio", "temp_mib", "compile_s"))
        table.add_row(
            row["pass"],
            Text(titles[row["implementation"]], style=_style(row["implementation"])),
            str(row["length"]),
            _time_cell(row),
            number(row["tokens_per_s"]),
            *("" if value is None else number(value) for value in optional),
        )
    return table


def _time_cell(row: dict[str, Any]) -> Text:
    if row["wrong"]:
        return Text("wrong", style="bold red")
    if row["ms"] is None:
        return Text("-", style="dim")
    spread = (row["high_ms"] - row["low_ms"]) / row["ms"] / 2
    return Text(f"{number(row['ms'])} ±{spread:.0%}" if row["repeats"] > 1 else number(row["ms"]))


def number(value: float) -> str:
    """Three digits that count, without exponents."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _style(implementation: str) -> str:
    return "bold cyan" if implementation.startswith(("sequential", "associative", "pallas")) else ""


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write `content`; numbers that are not finite become null, so that every reader takes the file."""
    Path(path).write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value
