"""Batches: windows of a sequence of tokens, as a pure function of (seed, step)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from train.tokens import Tokens

ALL = slice(None)


class Batch(NamedTuple):
    """One batch: what the model reads, and what it should say at each position."""

    tokens: np.ndarray  # (b, l) int32
    targets: np.ndarray  # (b, l) int32, the token after each
    segment_ids: np.ndarray | None = None  # (b, l) int32, where a row holds several sequences: which one


def take_rows(batch: Batch, rows: slice) -> Batch:
    """Some rows of a batch."""
    return Batch(*(None if part is None else part[rows] for part in batch))  # pyright: ignore[reportArgumentType]


def training_batch(
    text: Tokens,
    *,
    seed: int,
    step: int,
    batch_size: int,
    seq_len: int,
    separator: int | None = None,
    rows: slice = ALL,
) -> Batch:
    """The batch of one step: windows of the text, each place equally likely, decided by the arguments alone.

    Args:
        text: what is learned.
        seed, step: decide the places.
        batch_size, seq_len: b and l.
        separator: the token that documents begin with, if they are to be kept apart.
        rows: which of the batch's rows are wanted; no others are read.
    """
    random = np.random.default_rng((seed, step))
    return _windows(text, random.integers(0, len(text) - seq_len, size=batch_size)[rows], seq_len, separator)


def validation_batches(
    text: Tokens, *, n_batches: int, batch_size: int, seq_len: int, separator: int | None = None
) -> Iterator[Batch]:
    """Windows spread evenly over the held-out text, the same every time; they overlap only if the text is too short."""
    starts = np.linspace(0, len(text) - seq_len - 1, n_batches * batch_size).astype(np.int64)
    for rows in starts.reshape(n_batches, batch_size):
        yield _windows(text, rows, seq_len, separator)


def _windows(text: Tokens, starts: np.ndarray, seq_len: int, separator: int | None) -> Batch:
    rows = text.windows(starts, seq_len + 1)
    tokens, targets = rows[:, :-1], rows[:, 1:]
    if separator is None:
        return Batch(tokens, targets)
    # The separator belongs to the document after it: that one's first token is predicted from it alone, and the end of
    # a document, which the next separator is, from the document.
    return Batch(tokens, targets, np.cumsum(tokens == separator, axis=1, dtype=np.int32))
