"""The flags of `python -m mamba_jax.bench`, and their checks."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Sequence
from typing import Literal

PROGRAM = "python -m mamba_jax.bench"
DTYPES = ("float32", "bfloat16", "float16")
PASSES = ("forward", "gradient")

Name = Literal[
    "torch-loop", "torch-compile", "torch-script", "torch-transposed", "mambapy", "transformers", "mamba_ssm",
    "plain-scan", "sequential", "associative", "pallas", "sequential-split", "associative-split", "pallas-split",
]  # fmt: skip
DEFAULT: tuple[Name, ...] = typing.get_args(Name)[:-2]


class UsageError(ValueError):
    """A mistake that the user can mend; the command says it in one line and ends with exit code 2."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Compare implementations of the selective scan, each checked against a float64 oracle and then timed."""

    lengths: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    """Lengths of the sequence."""
    batch: int = 2
    """Rows of the batch."""
    channels: int = 512
    """Channels; mamba-130m has 1536."""
    state: int = 16
    """States a channel."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the sequences u, delta, B and C."""
    passes: tuple[Literal["forward", "gradient"], ...] = PASSES
    """What to time: y alone, or y and all gradients."""
    implementations: tuple[Name, ...] = DEFAULT
    """Which to compare; the -split ones use all CPU cores, as so many devices over which the batch is split."""

    repeats: int = 5
    """Rounds in which every implementation takes its turn; the median of them is reported."""
    budget_s: float = 6.0
    """Seconds for the repeats of one row; a call that would take longer than this is not begun."""
    compile_budget_s: float = 20.0
    """Compiling that would take longer than this is not begun."""
    seed: int = 0
    """Of the inputs."""
    keep_memory: bool = False
    """Keep freed memory in the process (glibc only): times are then without the system's paging."""
    widest_vectors: bool = True
    """Vectors of 512 bits for XLA where the CPU has them, as PyTorch takes; otherwise XLA takes 256."""
    json: str | None = None
    """Write machine, versions, limits and rows to this file."""
    plots: str | None = None
    """Write the plots into this folder, as PNG."""

    parity: bool = False
    """Instead: the largest errors of each form and dtype against the oracle and against PyTorch."""
    models: bool = False
    """Instead: whole models (forward, training step, decoding) beside transformers."""
    gpu_check: bool = False
    """Instead: six minutes of checks and times on a GPU. It takes --json, --seconds and --small besides."""


def parse(arguments: Sequence[str]) -> Settings:
    """Settings from the command line.

    Raises:
        UsageError: a value is out of its range or a name unknown.
        SystemExit: tyro's own, with exit code 2, for a wrong flag; 0 after --help.
    """
    import tyro

    settings = tyro.cli(Settings, prog=PROGRAM, args=list(arguments))
    check(settings)
    return settings


def check(settings: Settings) -> None:
    """Raise UsageError for the first value that is out of its range."""
    for name in ("batch", "channels", "state", "repeats"):
        if getattr(settings, name) < 1:
            raise UsageError(f"--{name} {getattr(settings, name)}: 1 or more is wanted")
    for name in ("budget_s", "compile_budget_s"):
        if not getattr(settings, name) > 0:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(settings, name)}: a number above 0 is wanted")
    if settings.seed < 0:
        raise UsageError(f"--seed {settings.seed}: 0 or more is wanted")
    if not settings.lengths or min(settings.lengths) < 1 or len(set(settings.lengths)) != len(settings.lengths):
        given = " ".join(map(str, settings.lengths))
        raise UsageError(f"--lengths {given}: different lengths of 1 or more are wanted")
    if len(set(settings.passes)) != len(settings.passes) or not settings.passes:
        raise UsageError(f"--passes {' '.join(settings.passes)}: one or both of {', '.join(PASSES)} are wanted")
    if settings.parity and settings.models:
        raise UsageError("--parity and --models exclude each other")
