"""What a run learns from: texts as bytes or as a tokenizer's tokens, or token files; and what of it is held out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from train.data import Batch
from train.errors import TrainingStopped, UsageError
from train.files import find_files
from train.tokens import SUFFIX, Part, Tokens, open_token_file, read_record

if TYPE_CHECKING:
    from mamba_jax.text import Subwords
    from train.config import TrainConfig
    from train.report import Report

# Between two texts as bytes: a line's end; where documents are kept apart, a byte that no text has.
_JOINT, _BYTE_SEPARATOR = b"\n", b"\0"
_VALIDATION_NAMES = ("val", "valid", "validation")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokens in two parts that share nothing."""

    name: str
    unit: str  # "bytes" or "tokens"
    train: Tokens
    validation: Tokens
    n_train_files: int
    n_validation_files: int
    n_left_out: int = 0  # files that are not UTF-8, or no token files beside some that are
    bytes_per_token: float | None = 1.0  # of the held-out text; None if nobody knows
    separator: int | None = None  # the token that documents begin with, where they are kept apart
    tokenizer: Subwords | None = None  # of the tokens, where it is known

    def identity(self) -> dict[str, Any]:
        """What a checkpoint keeps of the training part: a resumed run must read the same."""
        return {"text_sha256": self.train.fingerprint(), "text_length": len(self.train)}

    def is_the_one(self, meta: dict[str, Any]) -> bool:
        """Whether this is the text of a checkpoint's record.

        Raises:
            UsageError: it is shorter.
        """
        if len(self.train) < meta["text_length"]:
            raise UsageError(
                f"--resume: {self.name} shrank: {meta['text_length']:,} {self.unit} to learn when the run began, "
                f"{len(self.train):,} now. Bring the data back, or begin anew with --init-from."
            )
        return meta["text_sha256"] == self.train.fingerprint()

    def check(self, batch: Batch, vocab_size: int) -> None:
        """Whether the model has every token of a batch.

        Raises:
            TrainingStopped: it has not.
        """
        largest = max(batch.tokens.max(), batch.targets.max())
        if largest >= vocab_size:
            raise TrainingStopped(f"--data {self.name} has the token {largest}, but --vocab-size is {vocab_size}.")


class _Texts(NamedTuple):
    train: list[bytes]
    validation: list[bytes]
    n_left_out: int


def load_corpus(config: TrainConfig, report: Report, tokenizer: Subwords | None = None) -> Corpus:
    """Read or map what `config.data` means, and hold out the end of it.

    Raises:
        UsageError: nothing can be read, either part is shorter than one sequence, or the model lacks tokens.
    """
    files = find_files(config.data)
    token_files = [path for path in files if path.suffix == SUFFIX]
    if token_files:
        corpus = _from_token_files(config, token_files, len(files))
    else:
        with report.wait("reading the text"):
            texts = _read_texts(config, files)
        corpus = _from_texts(config, texts, tokenizer, report)
    _check_lengths(corpus, config)
    _check_vocabulary(corpus, config, tokenizer)
    return dataclasses.replace(corpus, tokenizer=tokenizer)


def _from_token_files(config: TrainConfig, paths: list[Path], n_files: int) -> Corpus:
    """Files named val.bin, or so, are held out; if none is, the end of the last ones."""
    opened = {path: open_token_file(path, config.token_dtype) for path in paths}
    held_out = [path for path in paths if path.stem.split("_")[0].split("-")[0].lower() in _VALIDATION_NAMES]
    learned = [path for path in paths if path not in held_out]

    def joined(paths: list[Path]) -> Tokens:
        return Tokens([part for path in paths for part in opened[path].parts])

    if held_out and learned:
        train, validation = joined(learned), joined(held_out)
    else:
        every = joined(paths)
        train, validation = every.split(len(every) - int(len(every) * config.val_fraction))
        learned = held_out = paths
    records = [read_record(path) for path in held_out]
    known = all("n_bytes" in record and record.get("n_tokens") for record in records)
    n_bytes, n_tokens = (sum(record[name] for record in records) if known else 0 for name in ("n_bytes", "n_tokens"))
    return Corpus(
        name=_name(config),
        unit="tokens",
        train=train,
        validation=validation,
        n_train_files=len(learned),
        n_validation_files=len(held_out),
        n_left_out=n_files - len(paths),
        bytes_per_token=n_bytes / n_tokens if known else None,
        separator=_separator(config, read_record(paths[0]).get("separator")),
    )


def _from_texts(config: TrainConfig, texts: _Texts, tokenizer: Subwords | None, report: Report) -> Corpus:
    """Texts as a tokenizer's tokens, or as bytes."""
    if tokenizer is None:
        joint, separator = _BYTE_SEPARATOR if config.documents else _JOINT, _BYTE_SEPARATOR[0]
        train, validation = (_in_memory(np.frombuffer(joint.join(part), np.uint8)) for part in texts[:2])
        bytes_per_token = 1.0
    else:
        separator = config.separator if config.separator is not None else tokenizer.end_of_text()
        with report.wait("tokenising the text"):
            train, validation = (_encode(part, tokenizer, separator) for part in texts[:2])
        bytes_per_token = sum(map(len, texts.validation)) / max(1, len(validation))
    return Corpus(
        name=_name(config),
        unit="bytes" if tokenizer is None else "tokens",
        train=train,
        validation=validation,
        n_train_files=len(texts.train),
        n_validation_files=len(texts.validation),
        n_left_out=texts.n_left_out,
        bytes_per_token=bytes_per_token,
        separator=_separator(config, separator),
    )


def _encode(texts: list[bytes], tokenizer: Subwords, separator: int | None) -> Tokens:
    """Each text's tokens, and the separator after each, as token files have it."""
    end = [] if separator is None else [separator]
    encoded = tokenizer.encode_batch([text.decode() for text in texts])
    return _in_memory(np.concatenate([np.asarray([*ids, *end], np.uint32) for ids in encoded]))


def _in_memory(tokens: np.ndarray) -> Tokens:
    return Tokens([Part(tokens)])


def _separator(config: TrainConfig, known: int | None) -> int | None:
    """The token that begins a document; None if documents are not to be kept apart."""
    if not config.documents:
        return None
    separator = known if config.separator is None else config.separator
    if separator is None:
        raise UsageError("--documents: which token is between two documents is not known; name it with --separator")
    return separator


def _read_texts(config: TrainConfig, files: list[Path]) -> _Texts:
    texts, n_left_out = [], 0
    for path in files:
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
        reason = "there is no text in it"
        if n_left_out:
            reason = f"none of its {n_left_out} files is UTF-8 text; token files are named *{SUFFIX}"
        source = _name(config) if config.data is None else f"--data {config.data}"
        raise UsageError(f"{source}: {reason}")
    return _Texts(*split_files(texts, config.val_fraction), n_left_out)


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


def _name(config: TrainConfig) -> str:
    return "Python's standard library" if config.data is None else config.data


def _check_lengths(corpus: Corpus, config: TrainConfig) -> None:
    for part, tokens in (("training", corpus.train), ("validation", corpus.validation)):
        if len(tokens) < config.seq_len + 1:
            raise UsageError(
                f"--data {corpus.name}: its {part} part has {len(tokens)} {corpus.unit}, but one sequence takes "
                f"{config.seq_len + 1}, --seq-len {config.seq_len} and the one after it.\n"
                f"Give more text, a smaller --seq-len, or another --val-fraction than {config.val_fraction}."
            )


def _check_vocabulary(corpus: Corpus, config: TrainConfig, tokenizer: Subwords | None) -> None:
    if corpus.unit == "bytes":
        if config.vocab_size < 256:
            raise UsageError(f"--vocab-size {config.vocab_size}: 256 or more, one for each byte, is wanted")
        return
    if tokenizer is not None and tokenizer.n_tokens > config.vocab_size:
        raise UsageError(
            f"--vocab-size {config.vocab_size}: the tokenizer has {tokenizer.n_tokens} tokens; "
            f"--vocab-size {tokenizer.n_tokens} has room for them"
        )
    largest = max(corpus.train.largest(), corpus.validation.largest())
    if largest >= config.vocab_size:
        raise UsageError(
            f"--data {corpus.name} has the token {largest}, but --vocab-size is {config.vocab_size}: "
            "another tokenizer's tokens, another --token-dtype than theirs, or no token file at all"
        )
