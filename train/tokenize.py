"""`python -m train.tokenize --data PATH --tokenizer TOKENIZER --out data/text.bin` makes a token file of texts.

It holds tokens one after the other, as nanoGPT writes them; beside it come NAME.json, which says what they are, and the
tokenizer. Texts are cut where white space begins, and all cores encode the pieces.
"""

from __future__ import annotations

import codecs
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from train.errors import UsageError
from train.files import find_files
from train.tokens import SUFFIX, record_path

if TYPE_CHECKING:
    from mamba_jax.text import Subwords

PROGRAM = "python -m train.tokenize"
# Pieces of up to 64 KiB that are encoded in one call: enough to keep many cores busy, and a few megabytes of text.
_PIECES = 256
_BLOCK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Settings:
    """Turn texts into a file of tokens for `python -m train --data`."""

    tokenizer: str
    """A tokenizer.json, its folder, or a hub model that has one."""
    out: str
    """The file to write, named *.bin; NAME.json and tokenizer.json come to lie beside it."""
    data: str | None = None
    """A text file, a folder, or a quoted glob; by default the source of Python's standard library."""
    separator: int | None = None
    """The token after each file; by default the tokenizer's end of text."""


class _Encoded(NamedTuple):
    tokens: np.ndarray
    n_bytes: int  # of text


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code: 0 done, 1 something failed, 2 the user's mistake, 130 interrupted."""
    import tyro

    from train.report import exit_code

    settings = tyro.cli(Settings, prog=PROGRAM, args=list(arguments))
    interrupted = "Interrupted; nothing has been written."
    return exit_code(lambda: tokenize(settings), "Cannot tokenise", "Tokenising stopped", interrupted)


def tokenize(settings: Settings) -> None:
    """Write the token file, its record and the tokenizer.

    Raises:
        UsageError: a text or the tokenizer cannot be read; nothing has been written then.
        OSError: the file cannot be written; what was there before is as it was.
    """
    from mamba_jax.atomic import replacing
    from mamba_jax.text import TOKENIZER, load_tokenizer

    out = Path(settings.out)
    if out.suffix != SUFFIX:
        raise UsageError(f"--out {out}: a name that ends in {SUFFIX} is wanted")
    texts = [path for path in find_files(settings.data) if _is_text(path)]
    if not texts:
        raise UsageError(f"--data {settings.data}: none of its files is UTF-8 text")
    try:
        tokenizer = load_tokenizer(settings.tokenizer)
    except (ValueError, ImportError) as error:
        raise UsageError(f"--tokenizer: {error}") from None
    separator = tokenizer.end_of_text() if settings.separator is None else settings.separator
    dtype = "uint16" if max(tokenizer.n_tokens - 1, separator or 0) < 2**16 else "uint32"
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as temporary:
        with temporary.open("wb") as file:
            n_tokens, n_bytes = _write(file, texts, tokenizer, separator, dtype)
            file.flush()
            os.fsync(file.fileno())
        record = {
            "dtype": dtype,
            "n_tokens": n_tokens,
            "n_bytes": n_bytes,
            "n_documents": len(texts),
            "separator": separator,
            "vocab_size": tokenizer.n_tokens,
        }
        tokenizer.save(out.parent / TOKENIZER)
        record_path(out).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(
        f"{out}: {n_tokens:,} {dtype} tokens of {n_bytes:,} bytes from {len(texts)} files, "
        f"{n_bytes / max(1, n_tokens):.2f} bytes a token\n"
        f"python -m train --data {out} --vocab-size {tokenizer.n_tokens}"
    )


def _write(
    file: BinaryIO, texts: Sequence[Path], tokenizer: Subwords, separator: int | None, dtype: str
) -> tuple[int, int]:
    """Encode all texts into a file, and show how far it is; returns how many tokens of how many bytes it has."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    total, n_tokens, n_bytes, said, start = sum(path.stat().st_size for path in texts), 0, 0, 0, time.perf_counter()
    console = Console(stderr=True, highlight=False)
    columns = TextColumn("tokenising"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("tokenising", total=total)
        for encoded in _encode(texts, tokenizer, separator):
            encoded.tokens.astype(np.dtype(dtype).newbyteorder("<")).tofile(file)
            n_tokens, n_bytes = n_tokens + len(encoded.tokens), n_bytes + encoded.n_bytes
            progress.update(task, completed=n_bytes)
            if not console.is_terminal and 10 * n_bytes // total > said:
                said = 10 * n_bytes // total
                speed = n_bytes / (time.perf_counter() - start) / 1e6
                console.print(f"tokenising: {said}0% of {total:,} bytes, {speed:.1f} MB/s", soft_wrap=True)
    return n_tokens, n_bytes


def _encode(texts: Iterable[Path], tokenizer: Subwords, separator: int | None) -> Iterator[_Encoded]:
    """The tokens of all texts, many pieces at a time, with the separator after each text."""
    end = [] if separator is None else [separator]
    pieces = _pieces(texts)
    while batch := list(itertools.islice(pieces, _PIECES)):
        encoded = iter(tokenizer.encode_batch([piece for piece in batch if piece is not None]))
        tokens = [end if piece is None else next(encoded) for piece in batch]
        n_bytes = sum(len(piece.encode()) for piece in batch if piece is not None)
        yield _Encoded(np.fromiter(itertools.chain.from_iterable(tokens), np.uint32), n_bytes)


def _pieces(texts: Iterable[Path]) -> Iterator[str | None]:
    """The pieces of each text, and None after its last."""
    from mamba_jax.text import cut_at_spaces

    for path in texts:
        yield from cut_at_spaces(path)
        yield None


def _is_text(path: Path) -> bool:
    """Whether a file is UTF-8, however large it is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise UsageError(f"--data: cannot read {path}: {error.strerror or error}") from None
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
