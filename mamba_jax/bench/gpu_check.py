"""`python -m mamba_jax.bench --gpu-check [--json FILE] [--seconds S]`: are the kernels right on this GPU, and how fast?

Needs jax, flax and numpy; PyTorch is compared with where it is installed. Sized for six minutes on an H200.
The JSON file is written anew after each section, so that a run which is cut short leaves what it had.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from mamba_jax.bench import gpu_cases
from mamba_jax.bench import gpu_sections as sections
from mamba_jax.bench.gpu_cases import Case
from pallas_kernels.device import target_gpu


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    grid: tuple[Case, ...]
    repeated: Case
    beyond_32_bits: Case
    extremes: tuple[Case, ...]
    timed: tuple[Case, ...]
    torch_length: int


def _timed(sizes: Sequence[tuple[int, int, int]]) -> tuple[Case, ...]:
    options = ("D", "z", "delta_bias", "delta_softplus")
    return tuple(Case(b, l, d, 16, dtype, options) for b, l, d in sizes for dtype in ("bfloat16", "float32"))


FULL = Plan(
    grid=tuple(gpu_cases.grid()),
    repeated=Case(8, 2048, 2048, 16, "bfloat16"),
    beyond_32_bits=Case(9, 131_072, 2048, 16, "bfloat16", ("D",)),
    extremes=(Case(1, 40, 80_000, 4, "float32"), Case(65_537, 4, 8, 4, "float32")),
    timed=_timed([(8, 2048, 2048), (1, 2048, 1536), (1, 65_536, 2048)]),
    torch_length=256,
)
SMALL = Plan(
    grid=tuple(gpu_cases.grid((8, 16), 3)),
    repeated=Case(2, 20, 8, 4, "bfloat16"),
    beyond_32_bits=Case(3, 24, 8, 4, "bfloat16", ("D",)),
    extremes=(Case(1, 4, 300, 4, "float32"), Case(33, 3, 8, 4, "float32")),
    timed=_timed([(1, 32, 16)])[:1],
    torch_length=8,
)
"""For a machine without a GPU: the same code in seconds."""


class Check:
    """A run: sections one after the other until the time is up, each a list of records, kept in a JSON file."""

    def __init__(self, plan: Plan, seconds: float, path: str | None) -> None:
        self.plan, self._path = plan, path
        self._begun = time.perf_counter()
        self._end = self._begun + seconds
        gpu = target_gpu()
        self.report: dict[str, Any] = {
            "device": jax.devices()[0].device_kind,
            "capability": None if gpu is None else gpu.capability,
            "jax": jax.__version__,
            "kernels": gpu_cases.kernels(),
            "sections": {},
        }

    @property
    def failed(self) -> int:
        """How many records say that something is wrong."""
        return sum(r.get("ok") is False for s in self.report["sections"].values() for r in s["records"])

    def section(self, name: str, run: Callable[[float], list[dict[str, Any]]], share: float = 1.0) -> None:
        """Run one section, which may use `share` of what time is left; an exception is a record, not the end."""
        begun = time.perf_counter()
        left = self._end - begun
        if left < 5:
            records: list[dict[str, Any]] = [{"note": "not run: the time is up"}]
        else:
            try:
                records = run(begun + share * left)
            except Exception as error:  # whatever a compiler or driver raises; the other sections shall still run
                records = [{"ok": False, "note": sections.in_words(error)}]
        seconds = time.perf_counter() - begun
        self.report["sections"][name] = {"seconds": round(seconds, 1), "records": records}
        wrong = sum(r.get("ok") is False for r in records)
        print(f"{name}: {len(records)} records, {wrong} wrong, {seconds:.0f} s", flush=True)
        for record in records:
            if record.get("ok") is False or "note" in record:
                print("   ", json.dumps(record), flush=True)
        self.report |= {"seconds": round(time.perf_counter() - self._begun, 1), "failed": self.failed}
        if self._path is not None:
            Path(self._path).write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")


def _check_sizes_and_bits(check: Check, kernel: str) -> None:
    """The same bits ten times, sizes beyond 32 bits and beyond what an axis of a grid holds."""
    plan = check.plan
    check.section(f"same bits, {kernel}", functools.partial(sections.check_same_bits, kernel, plan.repeated))
    check.section(f"beyond 2^31 elements, {kernel}", lambda _: sections.check_part(kernel, plan.beyond_32_bits))
    for case in plan.extremes:
        name = f"d = {case.d}, b = {case.b}, {kernel}"
        check.section(name, lambda _, case=case: sections.check_part(kernel, case))


def command(arguments: Sequence[str]) -> int:
    """Run the check; returns its exit code: 0 all right, 1 something is wrong, 2 there is no GPU (or a wrong flag)."""
    parser = argparse.ArgumentParser(prog="python -m mamba_jax.bench --gpu-check", description=__doc__)
    parser.add_argument("--gpu-check", action="store_true", required=True)
    parser.add_argument("--json", help="write the results to this file")
    parser.add_argument("--seconds", type=float, default=340, help="begin nothing after so many seconds")
    parser.add_argument("--small", action="store_true", help="tiny sizes, which also run without a GPU")
    flags = parser.parse_args(arguments)
    if jax.default_backend() != "gpu" and not flags.small:
        print(
            "error: JAX sees no GPU; --small runs the same checks at tiny sizes through the interpreter",
            file=sys.stderr,
        )
        return 2
    plan = SMALL if flags.small else FULL
    check = Check(plan, flags.seconds, flags.json)
    print(f"{check.report['device']}, jax {jax.__version__}, kernels: {', '.join(gpu_cases.kernels())}", flush=True)
    first, *others = gpu_cases.kernels()
    check.section(f"grid, {first}", functools.partial(sections.check_grid, first, plan.grid), share=0.35)
    check.section("times", functools.partial(sections.time_forms, plan.timed), share=0.5)
    _check_sizes_and_bits(check, first)
    check.section("PyTorch loop", lambda _: sections.time_torch_loop(plan.timed[0], plan.torch_length))
    for kernel in others:
        check.section(f"grid, {kernel}", functools.partial(sections.check_grid, kernel, plan.grid), share=0.6)
        _check_sizes_and_bits(check, kernel)
    print(f"{check.failed} wrong, {check.report['seconds']:.0f} s")
    return int(check.failed > 0)
