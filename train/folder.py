"""A run's folder: which one it is, and that no run is ever written over another."""

from __future__ import annotations

from pathlib import Path

from train.errors import UsageError

RUNS = Path("runs")
_WRITTEN = ("config.toml", "metrics.jsonl", "loss.png", "sample.txt", "checkpoints")


def new_folder(run_dir: str | None, name: str) -> Path:
    """Make the folder of a new run: `run_dir`, or else the first of runs/NAME-1, runs/NAME-2, ... that is free.

    Raises:
        UsageError: if it already holds a run, or cannot be made.
    """
    if run_dir is None:
        number = 1
        while True:
            folder = RUNS / f"{name}-{number}"
            try:
                folder.mkdir(parents=True)
                return folder
            except FileExistsError:
                if not RUNS.is_dir():
                    raise UsageError(f"{RUNS} is a file; name another folder with --run-dir") from None
                number += 1
            except OSError as error:
                raise UsageError(f"{folder}: {error.strerror}; name another folder with --run-dir") from None
    folder = Path(run_dir)
    if any((folder / written).exists() for written in _WRITTEN):
        raise UsageError(f"--run-dir {folder} already holds a run: add --resume to go on with it, or name another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--run-dir {folder}: {error.strerror}") from None
    return folder


def resumed_folder(run_dir: str | None) -> Path:
    """The folder of the run that --resume means: `run_dir`, or else the newest run under runs/.

    Raises:
        UsageError: if there is none.
    """
    if run_dir is not None:
        if not Path(run_dir).is_dir():
            raise UsageError(f"--resume: there is no folder {run_dir}; to begin a new run there, leave --resume out")
        return Path(run_dir)
    settings = list(RUNS.glob("*/config.toml"))
    if not settings:
        raise UsageError(f"--resume: there is no run under {RUNS}/; name its folder with --run-dir")
    return max(settings, key=lambda path: path.stat().st_mtime_ns).parent
