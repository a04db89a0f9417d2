"""`python -m mamba_jax.bench --gpu-check [--json FILE] [--seconds S]`: are the kernels right on this GPU, and how fast?

Needs jax, flax, numpy and einops; PyTorch is compared with where it is installed. Sized for six minutes on an H200.
The JSON file is written anew after each section, so that a run which is cut short leaves what it had.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mamba_jax import selective_scan
from mamba_jax.bench import gpu_cases
from mamba_jax.bench.gpu_cases import Case
from mamba_jax.bench.problem import TOLERANCES, relative_error
from mamba_jax.reference.oracle import selective_scan_oracle, selective_scan_oracle_gradients
from pallas_kernels.device import target_gpu

COMPILING_AT_ONCE = 12
CALLS, ROUNDS = 10, 5  # of a timing: so many calls are queued, so that what it takes to start one does not count


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
                records = [{"ok": False, "note": _in_words(error)}]
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


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:600]}"


def check_grid(kernel: str, cases: Sequence[Case], deadline: float) -> list[dict[str, Any]]:
    """Outputs and every gradient of each case against the oracle; compiled several at a time."""
    records = []

    def compiled(case: Case) -> tuple[Any, Any]:
        inputs = gpu_cases.make_inputs(case)
        run = gpu_cases.with_gradients("pallas", inputs.options["delta_softplus"])
        arguments = (inputs.arguments, inputs.options.get("segment_ids"), inputs.dy, inputs.dlast)
        return inputs, functools.partial(run.lower(*arguments).compile(), *arguments)

    with gpu_cases.only(kernel), concurrent.futures.ThreadPoolExecutor(COMPILING_AT_ONCE) as pool:
        waiting = [(case, pool.submit(compiled, case)) for case in cases]
        for case, future in waiting:
            record: dict[str, Any] = {"case": str(case)}
            records.append(record)
            if time.perf_counter() > deadline and future.cancel():
                record["note"] = "not run: out of time"
                continue
            try:
                inputs, run = future.result()
                error, whose = gpu_cases.mistake(inputs, case.dtype, run())
                record |= {"ok": bool(error <= 1), "error_over_tolerance": round(error, 4), "worst": whose}
            except Exception as problem:  # a kernel that does not compile is a result, too
                record |= {"ok": False, "note": _in_words(problem)}
    return records


def check_same_bits(kernel: str, case: Case, deadline: float) -> list[dict[str, Any]]:
    """The same gradients ten times, bit for bit."""
    inputs = gpu_cases.make_inputs(case)
    run = gpu_cases.with_gradients("pallas", inputs.options["delta_softplus"])
    with gpu_cases.only(kernel):
        arguments = jax.device_put((inputs.arguments, None, inputs.dy, inputs.dlast))
        first = jax.tree.map(np.asarray, run(*arguments))
        for again in range(2, 11):
            same = jax.tree.map(lambda a, b: bool(np.array_equal(a, np.asarray(b))), first, run(*arguments))
            if not all(jax.tree.leaves(same)):
                return [{"case": str(case), "ok": False, "note": f"call {again} differs: {same}"}]
            if time.perf_counter() > deadline:
                return [{"case": str(case), "ok": True, "calls": again, "note": "fewer than ten: out of time"}]
    return [{"case": str(case), "ok": True, "calls": 10}]


def check_part(kernel: str, case: Case) -> list[dict[str, Any]]:
    """A scan too large for the oracle, with gradients: 8 channels of the first and the last row are compared."""
    b, l, d, n = case.b, case.l, case.d, case.n
    dtype = jnp.dtype(case.dtype)
    rows, channels = np.unique([0, b - 1]), np.unique(np.linspace(0, d - 1, 8).astype(int))

    @jax.jit
    def make(key: jax.Array) -> dict[str, jax.Array]:
        keys = iter(jax.random.split(key, 6))
        arguments = {"u": jax.random.normal(next(keys), (b, l, d), dtype)}
        arguments["delta"] = jax.random.uniform(next(keys), (b, l, d), dtype) * dtype.type(0.1)
        arguments["A"] = -jnp.tile(jnp.arange(1, n + 1, dtype=jnp.float32), (d, 1))
        arguments |= {name: jax.random.normal(next(keys), (b, l, n), dtype) for name in ("B", "C")}
        return arguments | {"D": jax.random.normal(next(keys), (d,))}

    mask = np.zeros(d, dtype)
    mask[channels] = 1  # of the loss: so that dB and dC, sums over channels, are known from these alone

    scan: Any = functools.partial(selective_scan, scan="pallas")

    def loss(arguments: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y = scan(**arguments)
        return jnp.sum((y * mask).astype(jnp.float32)), y

    with gpu_cases.only(kernel):
        arguments = make(jax.random.key(0))
        (_, y), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(arguments)

        def part(name: str, value: jax.Array) -> np.ndarray:
            value = value[rows] if value.ndim == 3 else value
            if name in ("u", "delta", "y", "D"):
                return np.asarray(value[..., channels])
            return np.asarray(value[channels] if name == "A" else value)

        inputs: dict[str, Any] = {name: part(name, value) for name, value in arguments.items()}
        got = {"y": part("y", y)} | {name: part(name, gradients[name]) for name in ("u", "delta", "B", "C")}
    want_y, _ = selective_scan_oracle(**inputs)
    want = {"y": want_y} | selective_scan_oracle_gradients(**inputs, dy=np.ones(inputs["u"].shape))
    errors = {name: relative_error(got[name], want[name]) / TOLERANCES[case.dtype] for name in got}
    return [{"case": str(case), "elements": b * l * d, "ok": all(e <= 1 for e in errors.values()), "errors": errors}]


def time_case(form: str, case: Case, which: str) -> dict[str, Any]:
    """The median time of one form, beside the least that the GPU can take."""
    inputs = gpu_cases.make_inputs(case)
    call = functools.partial(selective_scan, **inputs.options, scan=form)
    arguments, dy = jax.device_put((inputs.arguments, inputs.dy))

    def gradients(arguments: Any, dy: Any) -> Any:
        y, pull_back = jax.vjp(lambda a: call(**a), arguments)
        return y, pull_back(dy)

    function = jax.jit((lambda arguments, dy: call(**arguments)) if which == "forward" else gradients)
    begun = time.perf_counter()
    compiled = function.lower(arguments, dy).compile()
    compile_s = time.perf_counter() - begun
    jax.block_until_ready(compiled(arguments, dy))
    times_ms = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        jax.block_until_ready([compiled(arguments, dy) for _ in range(CALLS)])
        times_ms.append((time.perf_counter() - begun) * 1e3 / CALLS)
    ms, floor = float(np.median(times_ms)), gpu_cases.floor_ms(case, which)
    analysis = compiled.memory_analysis()
    return {
        "case": str(case), "pass": which, "ms": ms, "low_ms": min(times_ms), "high_ms": max(times_ms),
        "compile_s": compile_s, "temp_mib": None if analysis is None else analysis.temp_size_in_bytes / 2**20,
        "floor_ms": floor, "of_floor": None if floor is None else max(floor.values()) / ms,
    }  # fmt: skip


def time_forms(cases: Sequence[Case], deadline: float) -> list[dict[str, Any]]:
    """Each kernel and the associative form, forward and with gradients, at each size."""
    records = []
    for case in cases:
        for kernel in (*gpu_cases.kernels(), "associative"):
            for which in ("forward", "gradient"):
                if time.perf_counter() > deadline:
                    return [*records, {"note": f"not run from {kernel}, {which}, {case} on: out of time"}]
                form = "associative" if kernel == "associative" else "pallas"
                try:
                    with gpu_cases.only(kernel):
                        record = time_case(form, case, which)
                except Exception as error:  # out of memory, for one, is a result
                    record = {"case": str(case), "pass": which, "ok": False, "note": _in_words(error)}
                records.append({"implementation": kernel} | record)
                print("   ", json.dumps(records[-1]), flush=True)
    return records


def time_torch_loop(case: Case, length: int) -> list[dict[str, Any]]:
    """The PyTorch loop at a length that it can bear, on the GPU where PyTorch has one."""
    if importlib.util.find_spec("torch") is None:
        return [{"note": "PyTorch is not installed"}]
    from mamba_jax.bench.calls import TorchCall
    from mamba_jax.bench.problem import Problem
    from mamba_jax.reference.torch_rivals import loop

    records = []
    for which in ("forward", "gradient"):
        call = TorchCall(loop, Problem(case.b, length, case.d, case.n, "float32", 0), which)
        call.run()
        begun = time.perf_counter()
        call.run()
        ms = (time.perf_counter() - begun) * 1e3
        sizes = str(dataclasses.replace(case, l=length, dtype="float32", options=("D",)))
        records.append({"implementation": "torch-loop", "device": call.device, "case": sizes, "pass": which, "ms": ms})
        print("   ", json.dumps(records[-1]), flush=True)
    return records


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
    check.section(f"grid, {first}", functools.partial(check_grid, first, plan.grid), share=0.35)
    check.section("times", functools.partial(time_forms, plan.timed), share=0.5)
    check.section(f"same bits, {first}", functools.partial(check_same_bits, first, plan.repeated))
    check.section(f"beyond 2^31 elements, {first}", lambda _: check_part(first, plan.beyond_32_bits))
    for case in plan.extremes:
        check.section(f"d = {case.d}, b = {case.b}, {first}", lambda _, case=case: check_part(first, case))
    check.section("PyTorch loop", lambda _: time_torch_loop(plan.timed[0], plan.torch_length))
    for kernel in others:
        check.section(f"grid, {kernel}", functools.partial(check_grid, kernel, plan.grid), share=0.6)
        check.section(f"same bits, {kernel}", functools.partial(check_same_bits, kernel, plan.repeated))
        for case in plan.extremes:
            check.section(f"d = {case.d}, b = {case.b}, {kernel}", lambda _, c=case, k=kernel: check_part(k, c))
        check.section(f"beyond 2^31 elements, {kernel}", lambda _, k=kernel: check_part(k, plan.beyond_32_bits))
    print(f"{check.failed} wrong, {check.report['seconds']:.0f} s")
    return int(check.failed > 0)
