"""From measured rows to what is reported: ratio to the PyTorch loop, share of the device's limit, growth."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from mamba_jax.bench.implementations import BASELINE
from mamba_jax.bench.limits import Limits, floor, needs
from mamba_jax.bench.problem import Problem
from mamba_jax.bench.timing import SIZES, Row, exponent, predicted

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers", "mambapy", "mamba_ssm")


@dataclasses.dataclass(frozen=True)
class Growth:
    """How one implementation's pass grows with the length: powers of it, from 512 on; None below two lengths."""

    time: float | None
    memory: float | None


def finished(rows: Sequence[Row], limits: Limits) -> list[dict[str, Any]]:
    """The rows as JSON has them: with `ratio` (how many times as fast as the PyTorch loop), `of_limit` and `bound`.

    Where the loop was not run at a length, its time is extrapolated from shorter ones and `ratio_is_estimated` is true.
    """
    loop_ms: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.implementation == BASELINE and row.ms is not None:
            loop_ms.setdefault(row.which, {})[row.length] = row.ms
    return [_finished(row, loop_ms.get(row.which, {}), limits) for row in rows]


def _finished(row: Row, loop_ms: dict[int, float], limits: Limits) -> dict[str, Any]:
    sizes = {name: getattr(row, name) for name in SIZES}
    ratio, estimated, of_limit, bound, note = None, False, None, None, row.note
    if row.ms is not None:
        needed = needs(Problem(**sizes, seed=0), "forward" if row.which == "forward" else "gradient")
        floor_ms, bound = floor(limits, needed)
        of_limit = floor_ms / row.ms
        estimated = row.length not in loop_ms
        baseline = predicted(sorted((l, ms) for l, ms in loop_ms.items() if l < row.length), row.length)
        baseline = loop_ms.get(row.length, baseline)
        ratio = baseline / row.ms if baseline else None
        estimated = estimated and ratio is not None
        if estimated:
            note = "; ".join(filter(None, [note, f"ratio to a loop that would take about {baseline / 1e3:.0f} s"]))
    return {
        "implementation": row.implementation, "pass": row.which, **sizes, "ms": row.ms, "low_ms": row.low_ms,
        "high_ms": row.high_ms, "repeats": row.repeats, "ratio": ratio, "ratio_is_estimated": estimated,
        "temp_mib": row.temp_mib, "compile_s": row.compile_s, "of_limit": of_limit, "bound": bound, "wrong": row.wrong,
        "note": note,
    }  # fmt: skip


def model_rows(model: str, baseline: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of whole models as JSON has them: `ratio` is to `baseline`, `tokens_per_s` counts the whole batch."""
    baseline_ms = {row.length: row.ms for row in rows if row.implementation == baseline and row.ms is not None}
    finished = []
    for row in rows:
        content = dataclasses.asdict(row)
        content["pass"] = content.pop("which")
        ms = row.ms
        content["ratio"] = None if ms is None or row.length not in baseline_ms else baseline_ms[row.length] / ms
        content["tokens_per_s"] = None if ms is None else row.batch * row.length / ms * 1e3
        finished.append({"model": model} | content)
    return finished


def growth(rows: Iterable[dict[str, Any]], implementation: str, which: str) -> Growth:
    """The exponents of time and of temporary memory over the length."""
    chosen = [r for r in rows if r["implementation"] == implementation and r["pass"] == which and r["ms"] is not None]
    return Growth(
        time=exponent([(r["length"], r["ms"]) for r in chosen]),
        memory=exponent([(r["length"], r["temp_mib"]) for r in chosen if r["temp_mib"] is not None]),
    )


def machine() -> dict[str, Any]:
    """Where this was measured: processor or accelerator, cores, memory, system."""
    device = jax.devices()[0]
    return {
        "device": _processor() if device.platform == "cpu" else device.device_kind,
        "platform": device.platform,
        "jax_devices": len(jax.devices()),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Versions of the packages that matter here, of those that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
