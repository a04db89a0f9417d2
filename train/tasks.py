"""The Mamba paper's two synthetic tasks: sequences with an answer, as pure functions of (seed, step).

Source: arXiv 2312.00752, sections 3.1 and 4.1, appendix E.1.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import numpy as np

from train.config import TrainConfig
from train.data import Batch
from train.errors import UsageError
from train.loss import NOT_ASKED

# The sequences whose hash begins with so many zero bits are held out: one of 16.
_HELD_OUT_BITS = 4
# With fewer different sequences, training would soon have seen all that are not held out.
_LEAST_SEQUENCES = 10**5
# Stands where training has its seed and step: which held-out sequences are drawn depends on no setting of the run.
_VALIDATION = (2**63, 0)


@dataclasses.dataclass(frozen=True)
class SyntheticTask:
    """A task whose sequences are drawn at random, and split by a hash into those to learn from and those held out."""

    seq_len: int  # tokens that the model reads, those at which it answers among them
    vocab_size: int
    min_seq_len: int | None = None  # the shortest sequences of training; None: all have seq_len
    name: ClassVar[str]

    def draw(self, random: np.random.Generator, rows: int) -> Batch:
        """Some sequences, (rows, seq_len); targets are `NOT_ASKED` but where an answer stands."""
        raise NotImplementedError

    @property
    def n_sequences(self) -> int:
        """How many different sequences there are."""
        raise NotImplementedError

    @property
    def n_answers(self) -> int:
        """How many different answers there are to each question; all are equally likely."""
        raise NotImplementedError

    def describe(self) -> str:
        """The task in a line."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """A digest of the task and its sizes: a resumed run must learn the same."""
        return hashlib.sha256(f"{self.name} {dataclasses.asdict(self)}".encode()).hexdigest()

    def identity(self) -> dict[str, Any]:
        """What a checkpoint keeps of the task."""
        return {"text_sha256": self.fingerprint()}

    def is_the_one(self, meta: dict[str, Any]) -> bool:
        """Whether this is the task of a checkpoint's record."""
        return meta["text_sha256"] == self.fingerprint()

    def training_batch(self, *, seed: int, step: int, batch_size: int) -> Batch:
        """The batch of one step, decided by the arguments alone; none of its sequences is held out.

        With `min_seq_len` each row is of sequences of one length, drawn from `lengths`, and `segment_ids` tells them
        apart; what is left of a row is one more, of which nothing is asked.
        """
        random = np.random.default_rng((seed, step))
        lengths = self.lengths()
        if len(lengths) == 1:
            return self._draw_part(random, batch_size, held_out=False)
        rows = [self._packed_row(random, length) for length in random.choice(lengths, size=batch_size)]
        return Batch(*map(np.stack, zip(*rows, strict=True)))

    def lengths(self) -> list[int]:
        """The lengths of training sequences: seq_len, half of it, and so on, down to min_seq_len."""
        lengths = [self.seq_len]
        while lengths[-1] // 2 >= (self.min_seq_len or self.seq_len):
            lengths.append(lengths[-1] // 2)
        return lengths

    def of_length(self, seq_len: int) -> Self:
        """The same task with sequences of this length alone."""
        return dataclasses.replace(self, seq_len=seq_len, min_seq_len=None)

    def validation_batches(self, *, n_batches: int, batch_size: int) -> Iterator[Batch]:
        """Held-out sequences, the same every time."""
        random = np.random.default_rng(_VALIDATION)
        for _ in range(n_batches):
            yield self._draw_part(random, batch_size, held_out=True)

    def _packed_row(self, random: np.random.Generator, length: int) -> Batch:
        """(seq_len,) tokens, targets and segment ids of as many sequences of this length as fit."""
        batch = self.of_length(length)._draw_part(random, self.seq_len // length, held_out=False)
        rest = (0, self.seq_len % length)
        return Batch(
            tokens=np.pad(batch.tokens.ravel(), rest),
            targets=np.pad(batch.targets.ravel(), rest, constant_values=NOT_ASKED),
            segment_ids=np.arange(self.seq_len, dtype=np.int32) // np.int32(length),
        )

    def _draw_part(self, random: np.random.Generator, rows: int, *, held_out: bool) -> Batch:
        batch = self.draw(random, rows)
        while (wrong := np.flatnonzero(is_held_out(batch.tokens) != held_out)).size:
            again = self.draw(random, wrong.size)
            batch.tokens[wrong], batch.targets[wrong] = again.tokens, again.targets
        return batch


@dataclasses.dataclass(frozen=True)
class SelectiveCopying(SyntheticTask):
    """Say again, in order, the few data tokens that stood at random places among noise.

        0 0 5 0 0 0 9 0 3 0 0 0 0 | M M M   ->   5 9 3

    Token 0 is noise, the last of the vocabulary, M, asks for the next data token; all others are data.
    """

    memorize_tokens: int = 16
    name = "selective copying"

    def draw(self, random: np.random.Generator, rows: int) -> Batch:
        k = self.memorize_tokens
        context = self.seq_len - k
        places = np.argpartition(random.random((rows, context)), k - 1, axis=1)[:, :k]
        places.sort(axis=1)
        data = random.integers(1, self.vocab_size - 1, size=(rows, k), dtype=np.int32)
        tokens = np.zeros((rows, self.seq_len), np.int32)
        np.put_along_axis(tokens, places, data, axis=1)
        tokens[:, context:] = self.vocab_size - 1
        targets = np.full_like(tokens, NOT_ASKED)
        targets[:, context:] = data
        return Batch(tokens, targets)

    @property
    def n_sequences(self) -> int:
        k = self.memorize_tokens
        return math.comb(self.seq_len - k, k) * self.n_answers**k

    @property
    def n_answers(self) -> int:
        return self.vocab_size - 2

    def describe(self) -> str:
        k = self.memorize_tokens
        return f"{self.name}: {k} of {self.n_answers} data tokens among {self.seq_len - 2 * k} of noise, said in order"


@dataclasses.dataclass(frozen=True)
class InductionHeads(SyntheticTask):
    """Say what stood after a special token when that token comes again, at the end.

        4 1 7 S 3 0 5 5 2 6 1 0 S   ->   3

    S is the last token of the vocabulary; all others are drawn independently, and S stands at any place with the same
    probability.
    """

    name = "induction heads"

    def draw(self, random: np.random.Generator, rows: int) -> Batch:
        places, answers = self.questions(random, rows, self.seq_len)
        tokens = self.piece(random, places, answers, self.seq_len, slice(0, self.seq_len))
        targets = np.full_like(tokens, NOT_ASKED)
        targets[:, -1] = answers
        return Batch(tokens, targets)

    def questions(self, random: np.random.Generator, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Where S stands first in sequences of any length, and what follows it: (rows,) each."""
        places = random.integers(0, length - 2, size=rows)
        return places, random.integers(0, self.n_answers, size=rows, dtype=np.int32)

    def piece(
        self, random: np.random.Generator, places: np.ndarray, answers: np.ndarray, length: int, part: slice
    ) -> np.ndarray:
        """The tokens `part` of sequences of any length, (rows, part) int32.

        Args:
            random: for the tokens between.
            places, answers: what `questions` returned.
            length: of the whole sequences.
            part: of them, from `start` to `stop`.
        """
        at = np.arange(part.start, part.stop)
        tokens = random.integers(0, self.n_answers, size=(len(places), len(at)), dtype=np.int32)
        tokens = np.where(at == places[:, None] + 1, answers[:, None], tokens)
        return np.where((at == places[:, None]) | (at == length - 1), np.int32(self.vocab_size - 1), tokens)

    @property
    def n_sequences(self) -> int:
        return (self.seq_len - 2) * self.n_answers ** (self.seq_len - 2)

    @property
    def n_answers(self) -> int:
        return self.vocab_size - 1

    def describe(self) -> str:
        return f"{self.name}: what followed the special token among {self.n_answers} others, when it comes again"


def make_task(config: TrainConfig) -> SyntheticTask:
    """The task that the settings describe.

    Raises:
        UsageError: a setting does not fit it, or there would be too few different sequences.
    """
    if config.data is not None:
        raise UsageError(f"--data is for --task lm: {config.task} makes its own sequences")
    names = ("seq_len", "vocab_size", "min_seq_len")
    least = {"seq_len": 4, "min_seq_len": 4, "vocab_size": 3}
    if config.task == "selective_copying":
        names += ("memorize_tokens",)
        least = {"seq_len": 2 * config.memorize_tokens, "min_seq_len": 2 * config.memorize_tokens, "vocab_size": 4}
    sizes = {name: getattr(config, name) for name in names}
    for name, value in least.items():
        if sizes[name] is not None and sizes[name] < value:
            raise UsageError(f"--{name.replace('_', '-')} {sizes[name]}: {config.task} needs at least {value}")
    if config.min_seq_len is not None and config.min_seq_len > config.seq_len:
        raise UsageError(f"--min-seq-len {config.min_seq_len} is above --seq-len {config.seq_len}")
    task = TASKS[config.task](**sizes)
    shortest = min(task.lengths())
    n_sequences = task.of_length(shortest).n_sequences
    if n_sequences < _LEAST_SEQUENCES:
        raise UsageError(
            f"--task {config.task}: there are only {n_sequences:,} different sequences of length {shortest}, too few "
            "to hold some out; longer ones, or a larger --vocab-size, make more"
        )
    return task


def is_held_out(tokens: np.ndarray) -> np.ndarray:
    """Whether each row belongs to the held-out sequences: (rows, l) int -> (rows,) bool.

    Multiply-shift hashing: the first bits of a sum of the tokens times fixed odd numbers, modulo 2^64. So the two parts
    share no sequence, whatever is drawn.
    """
    factors = np.random.default_rng(0).integers(0, 2**64, size=tokens.shape[1], dtype=np.uint64) | np.uint64(1)
    sums = (tokens.astype(np.uint64) + np.uint64(1)) @ factors
    return sums >> np.uint64(64 - _HELD_OUT_BITS) == 0


TASKS: dict[str, type[SyntheticTask]] = {"selective_copying": SelectiveCopying, "induction_heads": InductionHeads}
