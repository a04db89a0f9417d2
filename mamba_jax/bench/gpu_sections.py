"""What the sections of `--gpu-check` do: each returns records, which the command keeps in its JSON file."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import importlib.util
import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mamba_jax import selective_scan
from mamba_jax.bench import gpu_cases
from mamba_jax.bench.gpu_cases import Case
from mamba_jax.bench.problem import TOLERANCES, relative_error
from mamba_jax.reference.oracle import selective_scan_oracle, selective_scan_oracle_gradients

COMPILING_AT_ONCE = 12
CALLS, ROUNDS = 10, 5  # of a timing: so many calls are queued, so that what it takes to start one does not count


def in_words(error: Exception) -> str:
    """An exception as a record's note."""
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
                record |= {"ok": False, "note": in_words(problem)}
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
                    record = {"case": str(case), "pass": which, "ok": False, "note": in_words(error)}
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
