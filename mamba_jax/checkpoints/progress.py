"""How far the reading of a checkpoint is: for a caller's function, or for a bar on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mamba_jax.checkpoints.tensors import Tensor

Progress = Callable[[int, int], None]  # bytes read, and all there are


@contextmanager
def reading(tensors: dict[str, Tensor], folder: Path, progress: Progress | None) -> Iterator[Callable[[str], None]]:
    """Gives a function that counts a tensor as read: for `progress`, or for a bar if there is a terminal for one."""
    total, done, seen = sum(tensor.nbytes for tensor in tensors.values()), 0, set()
    with ExitStack() as stack:
        if progress is None:
            progress = stack.enter_context(_bar(folder)) if sys.stderr.isatty() else _no_progress

        def on_read(name: str) -> None:
            nonlocal done
            if name not in seen:  # several devices may each read a part of it
                seen.add(name)
                done += tensors[name].nbytes
                progress(done, total)

        yield on_read
        progress(total, total)  # a tied head is not read again


@contextmanager
def _bar(folder: Path) -> Iterator[Progress]:
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"loading {folder.name}")
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _no_progress(done: int, total: int) -> None:
    """Tells nobody."""
