"""Which files `--data` means."""

from __future__ import annotations

import glob
import sysconfig
from pathlib import Path

from train.errors import UsageError

# Packages that happen to be installed inside its folder, and its tests, which not every system ships.
_NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def find_files(data: str | None) -> list[Path]:
    """The files that `--data` means, sorted by path: a file, those in a folder but hidden ones, or a glob's matches.

    None means the source of Python's standard library, without its tests and without installed packages.

    Raises:
        UsageError: if there are none.
    """
    if data == "":
        raise UsageError("--data is empty: a file, a folder or a pattern is wanted")
    if data is None:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in root.rglob("*.py") if not _NOT_STANDARD_LIBRARY & set(path.relative_to(root).parts)]
    elif Path(data).is_dir():
        root = Path(data)
        paths = [path for path in root.rglob("*") if not _is_hidden(path.relative_to(root))]
    elif Path(data).exists():
        paths = [Path(data)]
    else:
        paths = [Path(match) for match in glob.glob(data, recursive=True)]
        if not paths:
            raise UsageError(f"--data {data}: no such file or folder, and no file matches it as a pattern")
    files = sorted((path for path in paths if path.is_file()), key=lambda path: path.as_posix())
    if not files:
        raise UsageError(f"--data {data or sysconfig.get_path('stdlib')}: there is no file in it")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
