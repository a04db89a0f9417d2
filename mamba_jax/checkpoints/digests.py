"""Digests of a checkpoint's files, so that what has changed since it was written is found before it is used.

orbax notices a damaged index, but not a bit that has changed in the arrays' data: other numbers come back, without a
word (tried with orbax 0.12.8).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from mamba_jax.atomic import replacing

DIGESTS = "digests.json"


def write_digests(folder: Path) -> None:
    """Write `digests.json`: the SHA-256 of each file in the folders of a checkpoint (its items), by its path.

    The files beside those folders are orbax's own, which it rewrites when it gives the checkpoint its name.
    """
    digests = {path.relative_to(folder).as_posix(): _digest(path) for path in _files(folder)}
    with replacing(folder / DIGESTS) as temporary:
        temporary.write_text(json.dumps(digests, indent=0), encoding="utf-8")


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in a few words; None if every file is as it was written."""
    try:
        digests = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
        if not isinstance(digests, dict):
            return f"{DIGESTS} is not what was written"
        for name, digest in digests.items():
            if not (folder / name).is_file():
                return f"{name} is missing"
            if _digest(folder / name) != digest:
                return f"{name} is not what was written"
    except FileNotFoundError:
        return f"{DIGESTS} is missing"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    except ValueError:
        return f"{DIGESTS} is not what was written"
    return None


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/**/*") if path.is_file())


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
