"""A long sequence of tokens, in memory or in memory-mapped files, of which only what is asked for is read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train.errors import TrainingStopped, UsageError

SUFFIX = ".bin"
# Of each array so many places are read, to tell one text from another and a token file from any other file.
_SAMPLES, _SAMPLE_TOKENS = 64, 4096


@dataclasses.dataclass(frozen=True)
class Part:
    """An array of tokens; if it is a file's, a file that must stay as it is."""

    tokens: np.ndarray  # (k,) of any unsigned type
    path: Path | None = None
    n_bytes: int = 0  # of the file

    def check(self) -> None:
        """Whether the file is still as long as it was: reading beyond its end would kill the process.

        Raises:
            TrainingStopped: it is not.
        """
        if self.path is None:
            return
        try:
            n_bytes = self.path.stat().st_size
        except OSError as error:
            raise TrainingStopped(f"--data: {self.path} can no longer be read: {error.strerror}.") from None
        if n_bytes < self.n_bytes:
            raise TrainingStopped(
                f"--data: {self.path} shrank from {self.n_bytes:,} to {n_bytes:,} bytes while in use."
            )


class Tokens:
    """Parts one after the other, as one sequence."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """Args: `parts`, in order."""
        self.parts = tuple(part for part in parts if len(part.tokens))
        self._ends = np.cumsum([len(part.tokens) for part in self.parts])

    def __len__(self) -> int:
        """Number of tokens."""
        return int(self._ends[-1]) if self.parts else 0

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """(k,) places -> (k, length) int32: the tokens from each place on.

        Raises:
            TrainingStopped: a file is no longer what it was.
        """
        first = np.searchsorted(self._ends, starts, side="right")
        last = np.searchsorted(self._ends, starts + length - 1, side="right")
        for number in np.unique(np.concatenate([first, last])):
            self.parts[number].check()
        rows = np.empty((len(starts), length), np.int32)
        for row, start, number in zip(rows, starts, first):
            done = 0
            while done < length:
                part = self.parts[number].tokens
                here = part[start + done - (self._ends[number] - len(part)) :][: length - done]
                row[done : done + len(here)] = here
                done, number = done + len(here), number + 1
        return rows

    def split(self, place: int) -> tuple[Tokens, Tokens]:
        """The first `place` tokens and the rest."""
        before, after, end = [], [], 0
        for part in self.parts:
            cut = min(max(place - end, 0), len(part.tokens))
            before.append(dataclasses.replace(part, tokens=part.tokens[:cut]))
            after.append(dataclasses.replace(part, tokens=part.tokens[cut:]))
            end += len(part.tokens)
        return Tokens(before), Tokens(after)

    def largest(self) -> int:
        """The largest token among samples of every part; a text in memory is small enough to be read whole."""
        return max((int(piece.max()) for part in self.parts for piece in _samples(part)), default=0)

    def fingerprint(self) -> str:
        """A digest of the lengths of all parts, and of samples of their tokens."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(f"{len(part.tokens)} {part.tokens.dtype}\n".encode())
            for piece in _samples(part):
                digest.update(piece.tobytes())
        return digest.hexdigest()


def open_token_file(path: Path, dtype: str) -> Tokens:
    """A file of tokens one after the other, as nanoGPT writes them: little-endian, with nothing before or between them.

    Args:
        path: the file.
        dtype: "uint16" or "uint32"; "auto" is what the file NAME.json beside it says, or else uint16.

    Raises:
        UsageError: it cannot be such a file.
    """
    record = read_record(path)
    if dtype == "auto":
        dtype = record.get("dtype", "uint16")
    if dtype not in ("uint16", "uint32"):
        raise UsageError(f"{record_path(path)}: its dtype is {dtype!r}; uint16 or uint32 is wanted")
    size = np.dtype(dtype).itemsize
    try:
        n_bytes = path.stat().st_size
        if n_bytes % size:
            raise UsageError(f"--data: {path} has {n_bytes:,} bytes, no multiple of {size}: no file of {dtype} tokens")
        tokens = np.memmap(path, f"<u{size}", "r") if n_bytes else np.empty(0, dtype)
    except OSError as error:
        raise UsageError(f"--data: cannot read {path}: {error.strerror or error}") from None
    if record.get("n_tokens", len(tokens)) != len(tokens):
        raise UsageError(
            f"--data: {path} has {len(tokens):,} tokens, but {record_path(path).name} says {record['n_tokens']:,}: "
            "it is not whole"
        )
    head = tokens[:_SAMPLE_TOKENS]
    if dtype == "uint16" and len(head) > 1 and head[::2].any() and not head[1::2].any():
        raise UsageError(f"--data: every other token of {path} is 0, as if it held uint32: try --token-dtype uint32")
    return Tokens([Part(tokens, path, n_bytes)])


def record_path(path: Path) -> Path:
    """Where `python -m train.tokenize` says what it has put into a token file."""
    return path.with_suffix(".json")


def read_record(path: Path) -> dict[str, Any]:
    """What is said of a token file: dtype, n_tokens, n_bytes, separator, vocab_size; nothing of one from elsewhere.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return dict(json.loads(record_path(path).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"--data: cannot read {record_path(path)}: {error.strerror or error}") from None
    except (ValueError, TypeError):
        raise UsageError(f"--data: {record_path(path)} is no JSON object") from None


def _samples(part: Part) -> list[np.ndarray]:
    tokens = part.tokens
    if part.path is None or len(tokens) <= _SAMPLES * _SAMPLE_TOKENS:
        return [tokens] if len(tokens) else []
    starts = np.linspace(0, len(tokens) - _SAMPLE_TOKENS, _SAMPLES).astype(np.int64)
    return [tokens[start : start + _SAMPLE_TOKENS] for start in starts]
