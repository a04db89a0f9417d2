"""Text in, batches out: which files are read, what is held out, and batches as a pure function of (seed, step)."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from train.errors import UsageError

# Packages that happen to be installed inside its folder, and its tests, which not every system ships.
_NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class Batch(NamedTuple):
    """One batch: what the model reads, and what it should say at each position."""

    tokens: np.ndarray  # (b, l) int32
    targets: np.ndarray  # (b, l) int32, the token after each
    segment_ids: np.ndarray | None = None  # (b, l) int32, where a row holds several sequences: which one


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as bytes, in two parts that share nothing."""

    name: str
    train: np.ndarray  # (bytes,) uint8
    validation: np.ndarray  # (bytes,) uint8
    n_train_files: int
    n_validation_files: int
    n_left_out: int  # files that are not UTF-8

    def fingerprint(self) -> str:
        """A digest of the training text: a resumed run must read the same."""
        return hashlib.sha256(self.train.tobytes()).hexdigest()


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


def load_corpus(data: str | None, val_fraction: float, seq_len: int) -> Corpus:
    """Read every file that is UTF-8, in order, and hold out the end.

    Raises:
        UsageError: if nothing can be read, or either part is shorter than one sequence.
    """
    texts, n_left_out = [], 0
    for path in find_files(data):
        try:
            text = path.read_bytes()
            text.decode("utf-8")
        except UnicodeDecodeError:
            n_left_out += 1
        except OSError as error:
            raise UsageError(f"--data: cannot read {path}: {error.strerror or error}") from None
        else:
            if text:
                texts.append(text)
    if not texts:
        reason = f"none of its {n_left_out} files is UTF-8 text" if n_left_out else "there is no text in it"
        source = "Python's standard library" if data is None else f"--data {data}"
        raise UsageError(f"{source}: {reason}")
    train, validation = split_files(texts, val_fraction)
    corpus = Corpus(
        name="Python's standard library" if data is None else data,
        train=np.frombuffer(b"\n".join(train), np.uint8),
        validation=np.frombuffer(b"\n".join(validation), np.uint8),
        n_train_files=len(train),
        n_validation_files=len(validation),
        n_left_out=n_left_out,
    )
    for part, tokens in (("training", corpus.train), ("validation", corpus.validation)):
        if len(tokens) < seq_len + 1:
            raise UsageError(
                f"--data {corpus.name}: its {part} part has {len(tokens)} bytes, but one sequence takes {seq_len + 1}, "
                f"--seq-len {seq_len} and the byte after it.\n"
                f"Give more text, a smaller --seq-len, or another --val-fraction than {val_fraction}."
            )
    return corpus


def split_files(texts: list[bytes], val_fraction: float) -> tuple[list[bytes], list[bytes]]:
    """Hold out as many whole files from the end as fit into the fraction; if the last is larger than that, its tail."""
    budget = int(sum(map(len, texts)) * val_fraction)
    first, held_out = len(texts), 0
    while first > 0 and held_out + len(texts[first - 1]) <= budget:
        first -= 1
        held_out += len(texts[first])
    if held_out:
        return texts[:first], texts[first:]
    cut = len(texts[-1]) - budget
    return [*texts[:-1], texts[-1][:cut]], [texts[-1][cut:]]


def training_batch(text: np.ndarray, *, seed: int, step: int, batch_size: int, seq_len: int) -> Batch:
    """The batch of one step: windows of the text, each place equally likely, decided by the arguments alone."""
    random = np.random.default_rng((seed, step))
    return _windows(text, random.integers(0, len(text) - seq_len, size=batch_size), seq_len)


def validation_batches(text: np.ndarray, *, n_batches: int, batch_size: int, seq_len: int) -> Iterator[Batch]:
    """Windows spread evenly over the held-out text, the same every time; they overlap only if the text is too short."""
    starts = np.linspace(0, len(text) - seq_len - 1, n_batches * batch_size).astype(np.int64)
    for rows in starts.reshape(n_batches, batch_size):
        yield _windows(text, rows, seq_len)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _windows(text: np.ndarray, starts: np.ndarray, seq_len: int) -> Batch:
    rows = text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)
    return Batch(tokens=rows[:, :-1], targets=rows[:, 1:])
