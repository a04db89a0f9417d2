"""One run of the benchmark: limits, then every pass, then table, JSON and plots."""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

from mamba_jax.bench import limits as device_limits
from mamba_jax.bench import timing
from mamba_jax.bench.implementations import IMPLEMENTATIONS
from mamba_jax.bench.problem import Problem
from mamba_jax.bench.report import Screen, write_json
from mamba_jax.bench.results import finished, machine, versions
from mamba_jax.bench.settings import Settings, UsageError
from pallas_kernels import explain


def run(settings: Settings, screen: Screen) -> int:
    """Do what `settings` ask for; returns the exit code: 1 if an implementation is wrong.

    Raises UsageError for a file or folder that cannot be written.
    """
    _check_writable(settings)
    if settings.parity:
        from mamba_jax.bench.parity import run_parity as mode
    elif settings.models:
        from mamba_jax.bench.models import run_models as mode
    else:
        mode = compare
    content, code = mode(settings, screen)
    if settings.json is not None:
        common = {"machine": machine(), "versions": versions(), "settings": dataclasses.asdict(settings)}
        write_json(settings.json, common | {"seeds": {"inputs": settings.seed}} | content)
        screen.line(f"written: {settings.json}", "dim")
    return code


def compare(settings: Settings, screen: Screen) -> tuple[dict[str, Any], int]:
    """The comparison: what goes into the JSON file, and the exit code."""
    implementations = {name: IMPLEMENTATIONS[name] for name in settings.implementations}

    @functools.lru_cache(maxsize=1)
    def problem_at(length: int) -> Problem:
        return Problem(settings.batch, length, settings.channels, settings.state, settings.dtype, settings.seed)

    budget = timing.Budget(settings.budget_s, settings.compile_budget_s, settings.repeats)
    measured: list[timing.Row] = []
    with screen.status() as say:
        say("measuring the limits of this device")
        limits = device_limits.measure(min(1.0, math.sqrt(settings.budget_s)))
        for which in settings.passes:
            measured += timing.measure(implementations, which, settings.lengths, problem_at, budget, say)
    rows = finished(measured, limits)
    screen.header(machine(), versions(), limits)
    if "pallas" in implementations:
        screen.line(f"pallas: {_kernels(settings)}", "dim")
    screen.comparison(rows, {name: implementation.title for name, implementation in implementations.items()})
    if settings.plots is not None:
        from mamba_jax.bench.plots import write_plots

        for path in write_plots(rows, Path(settings.plots)):
            screen.line(f"written: {path}", "dim")
    return {"limits": dataclasses.asdict(limits), "rows": rows}, int(any(row["wrong"] for row in rows))


def _kernels(settings: Settings) -> str:
    """Which kernels run the longest scan, and why; or why none does."""
    try:
        sizes = (settings.batch, max(settings.lengths), settings.channels, settings.state)
        return str(explain(*sizes, dtype=settings.dtype, gate=False))
    except NotImplementedError as error:
        return str(error)


def _check_writable(settings: Settings) -> None:
    """Before minutes are spent: whether the results can be kept."""
    try:
        if settings.json is not None:
            Path(settings.json).open("a").close()
        if settings.plots is not None:
            Path(settings.plots).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from None
