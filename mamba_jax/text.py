"""From text to tokens and back: bytes, or a `tokenizer.json`; text of any length, and text that arrives in parts."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

TOKENIZER = "tokenizer.json"
READ_BYTES = 1 << 16
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""GPT-2's and GPT-NeoX's, Llama 3's, Llama's and T5's, Gemma's."""


class Piece(NamedTuple):
    """A part of a text: its tokens (k,) int32, and how many bytes they stand for.

    The text's first token, which nothing predicts, is among the tokens, and its bytes are not counted.
    """

    tokens: np.ndarray
    n_bytes: int


class Decoder(Protocol):
    """Text from tokens as they come; what is not yet a whole character waits."""

    def push(self, tokens: Iterable[int]) -> str:
        """The text that these tokens complete."""
        ...

    def finish(self) -> str:
        """What still waited, with a replacement character for what never became one."""
        ...


class Tokenizer(Protocol):
    """What the command needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones around it."""
        ...

    def decoder(self) -> Decoder:
        """A decoder for one continuation."""
        ...

    def read(self, path: Path) -> Iterator[Piece]:
        """Tokens of a UTF-8 file, a piece at a time; raises ValueError or OSError if it cannot be read."""
        ...


class Bytes:
    """A token for each byte of UTF-8. Tokens from 256 on stand for nothing."""

    def encode(self, text: str) -> list[int]:
        """As `Tokenizer` says."""
        return list(text.encode())

    def decoder(self) -> Decoder:
        """As `Tokenizer` says."""
        return _ByteDecoder()

    def read(self, path: Path) -> Iterator[Piece]:
        """As `Tokenizer` says; any file will do."""
        first = 1
        with path.open("rb") as file:
            while data := file.read(READ_BYTES):
                yield Piece(np.frombuffer(data, np.uint8).astype(np.int32), len(data) - first)
                first = 0


class Subwords:
    """A `tokenizers.Tokenizer`."""

    def __init__(self, tokenizer: Any):
        """Args: `tokenizer`, a `tokenizers.Tokenizer`."""
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """As `Tokenizer` says."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    @property
    def n_tokens(self) -> int:
        """One more than the largest token."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def end_of_text(self) -> int | None:
        """The token that ends a text, by the names that it has in the tokenizers in use; None if it has none."""
        tokens = (self._tokenizer.token_to_id(name) for name in END_OF_TEXT)
        return next((token for token in tokens if token is not None), None)

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Tokens of many texts, on all cores."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def save(self, path: Path) -> None:
        """Write it as a `tokenizer.json`."""
        self._tokenizer.save(str(path))

    def decoder(self) -> Decoder:
        """As `Tokenizer` says."""
        return _SubwordDecoder(self._tokenizer)

    def read(self, path: Path) -> Iterator[Piece]:
        """As `Tokenizer` says.

        The text is cut where white space begins. A byte-level BPE (GPT-2's, GPT-NeoX's) never has a token across that
        place, so that the tokens are those of the whole text.
        """
        first = True
        for text in cut_at_spaces(path):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            if not encoding.ids:
                continue
            n_bytes = len(text.encode())
            if first:
                n_bytes -= len(text[: encoding.offsets[0][1]].encode())
                first = False
            yield Piece(np.asarray(encoding.ids, np.int32), n_bytes)


def load_tokenizer(where: str | os.PathLike[str]) -> Subwords:
    """The tokenizer in a `tokenizer.json`, or in a folder or hub model that has one.

    Raises:
        ValueError: there is none, or it cannot be read.
        ImportError: the `tokenizers` library is missing.
    """
    try:
        import tokenizers
    except ImportError:
        raise ImportError(
            "a tokenizer.json needs the tokenizers library: pip install 'mamba-jax[pretrained]'"
        ) from None
    path = Path(where).expanduser()
    try:
        if path.is_dir():
            path = path / TOKENIZER
        if path.is_file():
            return Subwords(tokenizers.Tokenizer.from_file(str(path)))
        if path.name != TOKENIZER and str(where).count("/") == 1:
            return Subwords(tokenizers.Tokenizer.from_pretrained(str(where)))
    except (
        Exception
    ) as error:  # the library raises bare Exceptions, for a damaged file and for a hub out of reach alike
        raise ValueError(f"no tokenizer in {where}: {_first_line(error)}") from None
    raise ValueError(f"no tokenizer in {where}: there is no {path}")


class _ByteDecoder:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Iterable[int]) -> str:
        return self._utf8.decode(bytes(token for token in tokens if token < 256))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _SubwordDecoder:
    """Decodes the latest tokens together: a token's text depends on its neighbours, and may end within a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []  # already told, kept because a token's text may depend on the one before
        self._waiting: list[int] = []

    def push(self, tokens: Iterable[int]) -> str:
        told = ""
        for token in tokens:
            self._waiting.append(token)
            text = self._new_text()
            # No character has more than 4 bytes: what is longer and ends in none never becomes one.
            if (text and not text.endswith("\ufffd")) or len(self._waiting) > 4:
                told += text
                self._context, self._waiting = self._waiting, []
        return told

    def finish(self) -> str:
        text, self._waiting = self._new_text(), []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._context)
        return self._tokenizer.decode(self._context + self._waiting)[len(before) :]


def cut_at_spaces(path: Path) -> Iterator[str]:
    """The text of a UTF-8 file in parts, each beginning where white space does; a part without any is cut anywhere."""
    rest = ""
    try:
        # newline="": line ends as they are, or the bytes would be miscounted.
        with path.open(encoding="utf-8", newline="") as file:
            while text := file.read(READ_BYTES):
                text = rest + text
                cut = _last_space_after_text(text)
                if cut == 0 and len(text) > 16 * READ_BYTES:
                    cut = len(text)
                if cut:
                    yield text[:cut]
                rest = text[cut:]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start} of a part") from None
    if rest:
        yield rest


def _last_space_after_text(text: str) -> int:
    """The last place where white space follows something else; 0 if there is none."""
    for place in range(len(text) - 1, 0, -1):
        if text[place].isspace() and not text[place - 1].isspace():
            return place
    return 0


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
