"""`python -m mamba_jax.generate --model RUN_OR_FOLDER_OR_HUB_NAME --prompt TEXT` writes on; `--score FILE` measures.

The text goes to standard output as it comes, everything else to standard error. `--help` lists every flag.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro

from mamba_jax.generation import generate_stream, split_model, warm_up
from mamba_jax.model import MambaLM
from mamba_jax.pretrained import checkpoint_folder
from mamba_jax.sampling import make_sampling
from mamba_jax.scoring import score
from mamba_jax.text import TOKENIZER, Bytes, Tokenizer, load_tokenizer

PROGRAM = "python -m mamba_jax.generate"
NEOX_VOCABULARIES = (50277, 50280)
"""Sizes of the vocabulary of the published `state-spaces/mamba-*`, which come without their tokenizer, GPT-NeoX's."""


class UsageError(ValueError):
    """A mistake that the user can mend; the command says what it is and ends with exit code 2."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Continue a text with a Mamba language model; or, with --score, measure how well it predicts one."""

    model: str
    """A run of `python -m train`, the folder of a checkpoint, or OWNER/MODEL on the Hugging Face hub."""
    prompt: str | None = None
    """The text to continue."""
    prompt_file: str | None = None
    """Instead of --prompt: a UTF-8 file that holds it."""
    score: str | None = None
    """Instead of a prompt: a file of any size; print perplexity and bits per byte of its text."""
    tokenizer: str | None = None
    """A tokenizer.json, its folder, a hub model that has one, or "bytes". By default the one beside the weights; bytes
    for a training run and for a vocabulary of 256."""

    max_new_tokens: int = 128
    """How many tokens to write at most."""
    temperature: float = 0.8
    """The logits are divided by it; 0 always takes the most probable token."""
    top_k: int | None = None
    """Choose from the k most probable tokens."""
    top_p: float | None = None
    """Choose from the fewest tokens that together have this probability."""
    min_p: float | None = None
    """Choose from tokens that are at least this times as probable as the best one."""
    repetition_penalty: float = 1.0
    """Above 1: tokens that the text has already are less likely."""
    stop: tuple[str, ...] = ()
    """End at any of these tokens, each given as its text. By default at the model's own end of text."""
    ignore_eos: bool = False
    """Write on after the model's own end of text."""
    seed: int = 0
    """The same seed gives the same text."""

    scan: Literal["auto", "sequential", "associative", "pallas"] = "auto"
    """Form of the selective scan in which the prompt is read."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the activations."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code: 0 done, 2 the user's mistake, 130 interrupted."""
    settings = tyro.cli(Settings, prog=PROGRAM, args=list(arguments))
    try:
        _check(settings)
        return _score(settings) if settings.score is not None else _generate(settings)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130


def _check(settings: Settings) -> None:
    given = [settings.prompt, settings.prompt_file, settings.score]
    if sum(value is not None for value in given) != 1:
        raise UsageError("exactly one of --prompt, --prompt-file and --score is wanted")
    if settings.max_new_tokens < 0:
        raise UsageError(f"--max-new-tokens must be 0 or more, got {settings.max_new_tokens}")


def _generate(settings: Settings) -> int:
    """Write the prompt and its continuation."""
    try:
        sampling = make_sampling(
            settings.temperature, settings.top_k, settings.top_p, settings.min_p, settings.repetition_penalty
        )
        prompt = settings.prompt
        if settings.prompt_file is not None:
            prompt = Path(settings.prompt_file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a file that is not UTF-8 is a ValueError, too
        raise UsageError(_one_line(error, settings.prompt_file)) from None
    lm, tokenizer, stop = _load(settings)
    tokens = np.asarray([tokenizer.encode(prompt or "")], np.int32)
    if tokens.size == 0:
        # Nothing to go on from: a new text begins after the end of another, or on a new line.
        tokens = np.asarray([stop[:1] or tokenizer.encode("\n")], np.int32)
    if tokens.max() >= lm.config.vocab_size:
        raise UsageError(
            f"the tokenizer has token {tokens.max()}, but the model's vocabulary is {lm.config.vocab_size}: not its own"
        )

    begun = time.perf_counter()
    model, key = split_model(lm), jax.random.key(settings.seed)
    warm_up(model, 1, tokens.shape[1], sampling, key)
    _say(f"compiled in {time.perf_counter() - begun:.1f} s")
    times_s, counts = [time.perf_counter()], []
    decoder = tokenizer.decoder()
    _write(prompt or "")
    for new in generate_stream(model, tokens, settings.max_new_tokens, sampling, key=key, eos_token_id=stop or None):
        times_s.append(time.perf_counter())
        counts.append(new.shape[1])
        ended = np.flatnonzero(np.isin(new[0], stop))
        _write(decoder.push(new[0, : ended[0] if ended.size else None].tolist()))
    _write(decoder.finish() + "\n")
    _report(tokens.shape[1], times_s, counts)
    return 0


def _report(prompt_length: int, times_s: list[float], counts: list[int]) -> None:
    """Tokens/s from the moments at which the parts of the text came; the first part is a token, after the prompt."""
    if len(times_s) > 1:
        prefill_s = times_s[1] - times_s[0]
        _say(f"prefill: {prompt_length} tokens in {prefill_s:.2f} s, {prompt_length / prefill_s:.1f} tokens/s")
    if len(times_s) > 2:
        decoding_s, count = times_s[-1] - times_s[1], sum(counts[1:])
        _say(f"decoding: {count} tokens in {decoding_s:.2f} s, {count / decoding_s:.1f} tokens/s")


def _score(settings: Settings) -> int:
    """Print how well the model predicts a file."""
    path = Path(settings.score or "")
    try:
        path.open("rb").close()  # before a model is loaded
        lm, tokenizer, _ = _load(settings)
        begun = time.perf_counter()
        result = score(lm, tokenizer.read(path))
    except UsageError:
        raise
    except (OSError, ValueError) as error:
        raise UsageError(_one_line(error, str(path))) from None
    taken_s = time.perf_counter() - begun
    print(f"tokens predicted: {result.tokens}, {result.n_bytes} bytes of text")
    print(f"perplexity: {result.perplexity:.4f} per token")
    print(f"bits per byte: {result.bits_per_byte:.4f}")
    _say(f"{result.tokens / taken_s:.1f} tokens/s")
    return 0


def _load(settings: Settings) -> tuple[MambaLM, Tokenizer, list[int]]:
    """The model, its tokenizer, and the tokens at which a text ends."""
    try:
        folder = checkpoint_folder(settings.model)
        # The tokenizer first: without one a large model would be read for nothing.
        tokenizer = _tokenizer(settings, folder)
        stop = _stop_tokens(settings, folder, tokenizer)
        return MambaLM.from_pretrained(folder, scan=settings.scan, dtype=settings.dtype), tokenizer, stop
    except UsageError:
        raise
    except (ImportError, OSError, ValueError) as error:
        raise UsageError(str(error)) from None


def _tokenizer(settings: Settings, folder: Path) -> Tokenizer:
    if settings.tokenizer == "bytes":
        return Bytes()
    if settings.tokenizer is not None:
        return load_tokenizer(settings.tokenizer)
    if (folder / TOKENIZER).exists():
        return load_tokenizer(folder)
    vocab_size = _json(folder / "config.json").get("vocab_size")
    if vocab_size == 256 or (folder / "config.toml").exists():
        return Bytes()
    example = "EleutherAI/gpt-neox-20b" if vocab_size in NEOX_VOCABULARIES else "FILE_OR_FOLDER_OR_HUB_NAME"
    raise UsageError(f"{settings.model} has no {TOKENIZER}; name one with --tokenizer, such as --tokenizer {example}")


def _stop_tokens(settings: Settings, folder: Path, tokenizer: Tokenizer) -> list[int]:
    if settings.stop:
        tokens = [tokenizer.encode(text) for text in settings.stop]
        for text, token in zip(settings.stop, tokens):
            if len(token) != 1:
                raise UsageError(f"--stop {text!r} must be one token, it is {len(token)}")
        return [token[0] for token in tokens]
    if settings.ignore_eos:
        return []
    for name in ("generation_config.json", "config.json"):
        eos = _json(folder / name).get("eos_token_id")
        if eos is not None:
            return list(eos) if isinstance(eos, list) else [int(eos)]
    return []


def _json(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing if there is no such file. What is wrong with it is for the loader to say."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _one_line(error: Exception, path: str | None) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return f"{path} is not UTF-8 text: {error.reason}" if isinstance(error, UnicodeDecodeError) else str(error)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character that the model writes
    sys.exit(main(sys.argv[1:]))
