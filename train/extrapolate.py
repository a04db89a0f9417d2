"""`python -m train.extrapolate RUN` asks an induction-heads model at lengths far beyond those it was trained at.

Sequences are made and read piece by piece, with the model's state carried along, so that a million tokens take no more
memory than a thousand. The results are the run's `extrapolation.json` and `extrapolation.png`, drawn as table 2 of
arXiv 2312.00752 is.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from mamba_jax import MambaLM
from mamba_jax.atomic import replacing
from mamba_jax.memory import keep_freed_memory
from mamba_jax.state import MambaState
from mamba_jax.vectors import use_widest_vectors
from train.config import TrainConfig, read_toml
from train.errors import UsageError
from train.report import Report, duration, exit_code
from train.task_plots import draw_extrapolation
from train.tasks import InductionHeads, make_task

PROGRAM = "python -m train.extrapolate"
PIECE = 64
"""Tokens of each sequence that go through the model at once. All lengths are made of whole pieces: one program."""
# Stands where training has its seed: the sequences here come from other streams.
_STREAM = 2**63 + 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """How often an induction-heads model answers right, at every power of two from 64 to a million tokens."""

    run: tyro.conf.Positional[str]
    """The folder of a run of `python -m train --task induction_heads`; its newest checkpoint is asked."""
    min_length: int = 2**6
    """The shortest sequences; a power of two, 64 or more."""
    max_length: int = 2**20
    """The longest; a power of two."""
    rows: int = 128
    """Sequences of each length."""
    seed: int = 0
    """Seed of the sequences."""
    scan: Literal["auto", "sequential", "associative", "pallas"] = "auto"
    """Which form of the selective scan runs; auto chooses by platform."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code: 0 done, 1 it could not go on, 2 the user's mistake, 130 interrupted."""
    settings = tyro.cli(Settings, prog=PROGRAM, args=list(arguments))
    interrupted = "Interrupted; extrapolation.json has the lengths that were finished."
    return exit_code(
        lambda: extrapolate(settings, Report()), "Cannot extrapolate", "Extrapolation stopped", interrupted
    )  # fmt: skip


def extrapolate(settings: Settings, report: Report) -> dict[int, float]:
    """The share of right answers at each length; what is known is on disk at once, and drawn at the end.

    Raises:
        UsageError: a setting is out of its range, or `run` is no run of this task that has a checkpoint.
    """
    _check(settings)
    folder = Path(settings.run)
    config, task = _read_task(folder)
    with report.wait(f"loading {folder}"):
        try:
            lm = MambaLM.from_pretrained(folder, scan=settings.scan)
        except ValueError as error:
            raise UsageError(str(error)) from None
    lengths = [2**k for k in range(settings.min_length.bit_length() - 1, settings.max_length.bit_length())]
    width = len(f"{lengths[-1]:,}")
    shares: dict[int, float] = {}
    with report.progress(0, sum(lengths)):
        for length in lengths:
            start, done = time.perf_counter(), sum(shares)

            def show(read: int, done: int = done, length: int = length) -> None:
                report.advance(done + read, f"length {length:,}")

            shares[length] = right_answers(lm, task, length, rows=settings.rows, seed=settings.seed, on_piece=show)
            _write_json(folder / "extrapolation.json", shares)
            seconds = time.perf_counter() - start
            report.line(
                f"length {length:>{width},} | {shares[length]:7.2%} of {settings.rows} answers right | "
                f"{settings.rows * length / seconds:,.0f} tok/s | {duration(seconds)}"
            )
    title = f"induction heads: {config.n_layer} layers of width {config.d_model}"
    with report.wait("drawing extrapolation.png"):
        draw_extrapolation(shares, folder / "extrapolation.png", title, task.lengths(), 1 / task.n_answers)
    return shares


def right_answers(
    lm: MambaLM,
    task: InductionHeads,
    length: int,
    *,
    rows: int,
    seed: int,
    on_piece: Callable[[int], None] = lambda read: None,
) -> float:
    """The share of right answers to sequences of one length, in memory that does not depend on it.

    Sequences are drawn anew. Of a length that the model was trained at one may be among those that it was trained on,
    but there are 10^74 of 64 tokens of a vocabulary of 16.

    Args:
        lm: the model.
        task: whose sequences are made; its own length does not count.
        length: in tokens, a multiple of `PIECE`.
        rows: how many sequences.
        seed: of the sequences.
        on_piece: called now and then with the tokens of each sequence that have been read.
    """
    graphdef, params = nnx.split(lm)
    places, answers = task.questions(np.random.default_rng((_STREAM, seed, length)), rows, length)
    state, logits = lm.init_state(rows), jnp.zeros((rows, task.vocab_size))
    for start in range(0, length, PIECE):
        random = np.random.default_rng((_STREAM, seed, length, start))
        tokens = task.piece(random, places, answers, length, slice(start, start + PIECE))
        # Made while the last piece is read, but no further ahead: those to come would fill the memory.
        logits.block_until_ready()
        on_piece(start)
        state, logits = _read(graphdef, params, tokens, state)
    return float(np.mean(np.argmax(logits, axis=-1) == answers))


@functools.partial(jax.jit, static_argnames="graphdef", donate_argnames="state")
def _read(
    graphdef: nnx.GraphDef, params: Any, tokens: jax.Array, state: MambaState
) -> tuple[MambaState, jax.Array]:  # fmt: skip
    """The state after a piece, and the logits (rows, vocab) at its last token."""
    lm = nnx.merge(graphdef, params)
    hidden, state = lm.hidden(tokens, state=state, return_state=True)
    return state, lm.head(hidden[:, -1])


def _check(settings: Settings) -> None:
    for name in ("min_length", "max_length"):
        value = getattr(settings, name)
        if value < PIECE or value & (value - 1):
            raise UsageError(f"--{name.replace('_', '-')} {value}: a power of two of at least {PIECE} is wanted")
    if settings.min_length > settings.max_length:
        raise UsageError(f"--min-length {settings.min_length} is above --max-length {settings.max_length}")
    if settings.rows < 1:
        raise UsageError(f"--rows {settings.rows}: 1 or more is wanted")
    if not 0 <= settings.seed < 2**63:
        raise UsageError(f"--seed {settings.seed}: a number from 0 to 2**63 - 1 is wanted")


def _read_task(folder: Path) -> tuple[TrainConfig, InductionHeads]:
    """The settings of a run, and the task that it learned."""
    if not (folder / "config.toml").exists():
        raise UsageError(f"{folder} is not a run's folder: it has no config.toml")
    config = dataclasses.replace(TrainConfig(), **read_toml(folder / "config.toml"))
    task = None if config.task == "lm" else make_task(config)
    if not isinstance(task, InductionHeads):
        raise UsageError(f"{folder} is a run of --task {config.task}; one of induction_heads is wanted")
    return config, task


def _write_json(path: Path, shares: dict[int, float]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(shares, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    keep_freed_memory()
    use_widest_vectors()
    sys.exit(main(sys.argv[1:]))
