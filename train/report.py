"""What a run says on the screen: a banner, what is waited for, progress, validation, a sample, and mistakes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from train.errors import TrainingStopped, UsageError


class Report:
    """The lines of a run on standard output: coloured above a live bar on a terminal, plain otherwise."""

    def __init__(self, console: Console | None = None) -> None:
        """Args: `console`, by default one for standard output."""
        self._console = console or Console(highlight=False)
        self._bar: Progress | None = None
        self._line_is_open = False  # what is waited for stands there, and its time is to follow on the same line

    def silence(self) -> None:
        """Say nothing from now on."""
        self._console.quiet = True

    def line(self, text: str = "", style: str = "") -> None:
        """One line, never wrapped."""
        if self._line_is_open:
            self._console.print()
            self._line_is_open = False
        self._console.print(Text(text, style=style), soft_wrap=True)

    def table(self, rows: Mapping[str, str]) -> None:
        """Names and what they stand for, in two columns between empty lines."""
        width = max(map(len, rows))
        self.line()
        for name, value in rows.items():
            self._console.print(Text.assemble((f"{name:<{width}}  ", "bold cyan"), value), soft_wrap=True)
        self.line()

    @contextlib.contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """Say what is waited for, and then how long it took; on a terminal the seconds are seen going by."""
        start = time.perf_counter()
        if self._console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            with Progress(*columns, console=self._console, transient=True) as progress:
                progress.add_task(f"{what} ...")
                yield
        else:
            self._console.print(Text(f"{what} ... "), soft_wrap=True, end="")
            self._line_is_open = True
            yield
        taken = duration(time.perf_counter() - start)
        if self._line_is_open:
            self._line_is_open = False
            self.line(taken)
        else:
            self.line(f"{what} ... {taken}", style="dim")

    @contextlib.contextmanager
    def progress(self, first: int, total: int) -> Iterator[None]:
        """The live bar over the steps, on a terminal only."""
        if not self._console.is_terminal:
            yield
            return
        columns = (BarColumn(bar_width=None), TaskProgressColumn(), TextColumn("{task.description}", markup=False))
        with Progress(*columns, console=self._console, transient=True) as bar:
            self._bar, self._task = bar, bar.add_task("", total=total, completed=first)
            try:
                yield
            finally:
                self._bar = None

    def step(self, record: Mapping[str, Any], total: int, eta_s: float, score: str, *, printed: bool) -> None:
        """One training step: the bar moves, and every few steps a line stays; `score` says how the model stands."""
        self.advance(record["step"], f"step {record['step']}/{total}   {score}   ETA {duration(eta_s)}")
        if printed:
            self.line(
                f"step {record['step']:>{len(str(total))}}/{total} | loss {record['loss']:.4f} | "
                f"{score} | lr {record['lr']:.2e} | grad norm {record['grad_norm']:.2f} | "
                f"{record['step_ms']:.0f} ms | {record['tokens_per_s']:,.0f} tok/s | "
                f"{_use(record)} | ETA {duration(eta_s)}"
            )

    def advance(self, completed: int, description: str) -> None:
        """The bar moves."""
        if self._bar is not None:
            self._bar.update(self._task, completed=completed, description=description)

    def validation(self, record: Mapping[str, Any], seconds: float) -> None:
        """The model's score on held-out text, beside the bigram model's where there is one."""
        parts = [f"validation at step {record['step']}", _score(record, "val_")]
        if "bigram_bpb" in record:
            parts += [f"bigram_bpb {record['bigram_bpb']:.3f}", compared(record["val_bpb"], record["bigram_bpb"])]
        better = "bigram_bpb" not in record or record["val_bpb"] < record["bigram_bpb"]
        self.line(" | ".join([*parts, duration(seconds)]), style="bold green" if better else "bold yellow")

    def accuracy(self, record: Mapping[str, Any], chance: float, seconds: float) -> None:
        """The share of right answers on held-out sequences, and what guessing would have."""
        self.line(
            f"validation at step {record['step']} | val_accuracy {record['val_accuracy']:.2%} | "
            f"by chance {chance:.1%} | val_loss {record['val_loss']:.2e} | {duration(seconds)}",
            style="bold green" if record["val_accuracy"] > 0.99 else "bold yellow",
        )

    def sample(self, text: bytes) -> None:
        """A sample, in which bytes that are no UTF-8 or would move the cursor show as a mark."""
        shown = text.decode("utf-8", "replace").expandtabs(4)
        shown = "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in shown)
        self._console.rule("sample", style="cyan", align="left")
        self._console.print(Text(shown.strip("\n")), soft_wrap=True)
        self._console.rule(style="cyan")


class ReportHandler(logging.Handler):
    """Lets what the libraries log appear among the lines of a report."""

    def __init__(self, report: Report) -> None:
        """Args: `report`, where the lines go."""
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        """One line, without the name of the library's module in front."""
        self._report.line(record.getMessage(), style="yellow")


def exit_code(command: Callable[[], object], cannot: str, stopped: str, interrupted: str) -> int:
    """Run a command and answer for it: 0 done, 1 it could not go on, 2 the user's mistake, 130 interrupted.

    Args:
        command: what is to be done.
        cannot: the title above a mistake of the user's.
        stopped: the title above what ended it otherwise.
        interrupted: what to say of a Ctrl-C.
    """
    try:
        command()
    except UsageError as error:
        print_error(cannot, str(error))
        return 2
    except TrainingStopped as error:
        print_error(stopped, str(error))
        return error.exit_code
    except OSError as error:
        print_error(stopped, f"{error.filename or 'a file'}: {error.strerror or error}")
        return 1
    except KeyboardInterrupt:
        print_error(stopped, interrupted)
        return 130
    return 0


def print_error(title: str, message: str) -> None:
    """A mistake in a box on standard error, as tyro shows its own."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        # In a file nothing is broken across lines.
        console.width = max(len(title) + 6, *(len(line) + 4 for line in message.splitlines()))
    box = Panel(
        Text(message), title=Text(title, style="bold red"), title_align="left", border_style="red", expand=False
    )
    console.print(box)


def score_in_words(record: Mapping[str, Any]) -> str:
    """A validation's score, and how it stands beside the bigram model's where there is one."""
    if "val_bpt" in record:
        return f"{record['val_bpt']:.3f} bits per token on held-out text"
    words = f"{record['val_bpb']:.3f} bits per byte on held-out text"
    return f"{words}, {compared(record['val_bpb'], record['bigram_bpb'])}" if "bigram_bpb" in record else words


def _use(record: Mapping[str, Any]) -> str:
    """How well and how much the device is used, where that is known."""
    mfu, memory = record["mfu"], record["memory_gib"]
    return " | ".join(
        [
            "mfu n/a" if mfu is None else f"mfu {mfu:.1%}",
            "mem n/a" if memory is None else f"mem {memory:.1f} GiB",
        ]
    )


def _score(record: Mapping[str, Any], prefix: str = "") -> str:
    name = f"{prefix}bpb" if f"{prefix}bpb" in record else f"{prefix}bpt"
    return f"{name} {record[name]:.3f}"


def compared(val_bpb: float, bigram_bpb: float) -> str:
    """How the model stands beside the bigram model, in words."""
    return f"{abs(bigram_bpb - val_bpb):.3f} {'below' if val_bpb < bigram_bpb else 'above'} the bigram model"


def duration(seconds: float) -> str:
    """A length of time as people read it: 0.4 s, 12 s, 3m 05s, 2h 07m."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}m {seconds:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"
