"""What `--gpu-check` runs: cases, a call of the scan with all its gradients, comparison with the oracle, floors.

Axis legend: b batch, l length, d channels, n state, g groups of channels.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mamba_jax import selective_scan
from mamba_jax.bench.problem import TOLERANCES, relative_error
from mamba_jax.reference.oracle import selective_scan_oracle, selective_scan_oracle_gradients
from pallas_kernels import compat
from pallas_kernels.device import target_gpu

GRID_LENGTHS = (8, 16, 32, 64, 128, 256, 372, 512, 784, 1024, 1134, 2048, 4096)
DTYPES = ("float32", "float16", "bfloat16")
OPTIONS = (
    "D",
    "z",
    "delta_bias",
    "delta_softplus",
    "initial_state",
    "segment_ids",
    "grouped",
    "constant_B",
    "constant_C",
)
CASES = 40


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: sizes, the dtype of the sequences, and the names of the options that are on."""

    b: int
    l: int
    d: int
    n: int
    dtype: str
    options: tuple[str, ...] = ("D", "z", "delta_bias", "delta_softplus", "initial_state")

    def __str__(self) -> str:
        return f"({self.b}, {self.l}, {self.d}, {self.n}) {self.dtype} {'+'.join(self.options) or 'plain'}"


def grid(lengths: tuple[int, ...] = GRID_LENGTHS, count: int = CASES) -> list[Case]:
    """The test grid of mamba_ssm's CUDA kernel, its commented-out parts too: lengths by dtypes, options at random."""
    rng = np.random.default_rng(0)
    cells = [(l, dtype) for dtype in DTYPES for l in lengths]
    cells = [cells[i % len(cells)] for i in range(count)]
    return [Case(2, l, 4, 8, dtype, tuple(o for o in OPTIONS if rng.random() < 0.5)) for l, dtype in cells]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments that have a gradient, those that have none, and the cotangents of y and the last state; in NumPy."""

    arguments: dict[str, np.ndarray]
    options: dict[str, Any]
    dy: np.ndarray
    dlast: np.ndarray


@functools.lru_cache(maxsize=1)
def make_inputs(case: Case) -> Inputs:
    """Drawn as mamba_ssm's tests draw them: A = -0.5 rand, delta = 0.5 rand, the rest randn."""
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    b, l, d, n = case.b, case.l, case.d, case.n
    on, sequence = case.options, jnp.dtype(case.dtype)

    def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    def matrix(constant: bool) -> np.ndarray:
        if constant:
            return normal(d, n)
        return normal(b, l, 2, n, dtype=sequence) if "grouped" in on and d % 2 == 0 else normal(b, l, n, dtype=sequence)

    arguments = {
        "u": normal(b, l, d, dtype=sequence),
        "delta": (0.5 * rng.random((b, l, d), np.float32)).astype(sequence),
        "A": -0.5 * rng.random((d, n), np.float32),
        "B": matrix("constant_B" in on),
        "C": matrix("constant_C" in on),
    }
    extra = {
        "D": lambda: normal(d),
        "z": lambda: normal(b, l, d, dtype=sequence),
        "delta_bias": lambda: 0.5 * rng.random(d, np.float32),
        "initial_state": lambda: normal(b, d, n),
    }
    arguments |= {name: make() for name, make in extra.items() if name in on}
    options: dict[str, Any] = {"delta_softplus": "delta_softplus" in on}
    if "segment_ids" in on:
        options["segment_ids"] = np.cumsum(rng.random((b, l)) < 4 / l, axis=1).astype(np.int32)
    return Inputs(arguments, options, normal(b, l, d, dtype=sequence), normal(b, d, n))


def with_gradients(scan: Any, delta_softplus: bool) -> Any:
    """A jitted function (arguments, segment_ids, dy, dlast) -> ((y, last state), gradients by name)."""
    call = functools.partial(selective_scan, delta_softplus=delta_softplus, return_last_state=True, scan=scan)

    @jax.jit
    def run(arguments: Any, segment_ids: Any, dy: Any, dlast: Any) -> Any:
        results, pull_back = jax.vjp(lambda a: call(**a, segment_ids=segment_ids), arguments)
        return results, pull_back((dy, dlast))[0]

    return run


def mistake(inputs: Inputs, dtype: str, results: Any) -> tuple[float, str]:
    """The largest error over its tolerance, and whose it is: above 1 is wrong, and so is NaN."""
    (y, last_state), gradients = results
    want_y, want_last = selective_scan_oracle(**inputs.arguments, **inputs.options)
    want = selective_scan_oracle_gradients(**inputs.arguments, **inputs.options, dy=inputs.dy, dlast=inputs.dlast)
    got = {"y": y, "last_state": last_state} | {f"d{name}": g for name, g in gradients.items()}
    want = {"y": want_y, "last_state": want_last} | {f"d{name}": want[name] for name in gradients}
    errors = {name: relative_error(np.asarray(got[name]), want[name]) / TOLERANCES[dtype] for name in got}
    worst = max(errors, key=lambda name: np.inf if np.isnan(errors[name]) else errors[name])
    return errors[worst], worst


def kernels() -> tuple[str, ...]:
    """The kernels that this device can run: both GPU kernels on Hopper and Blackwell; on a CPU the interpreter."""
    gpu = target_gpu()
    if gpu is None or jax.default_backend() == "cpu":
        return ("interpreted",)
    return ("mosaic", "portable") if 90 <= gpu.capability < 110 and compat.HAS_MOSAIC else ("portable",)


@contextlib.contextmanager
def only(kernel: str) -> Iterator[None]:
    """Within it, `scan="pallas"` means this kernel; programs traced before are forgotten."""
    had = compat.HAS_MOSAIC
    compat.HAS_MOSAIC = had and kernel != "portable"
    jax.clear_caches()
    try:
        yield
    finally:
        compat.HAS_MOSAIC = had
        jax.clear_caches()


# Data sheet of the H200: GB/s, GHz; elsewhere no floor is given. 4 schedulers a multiprocessor, each issues one
# instruction of a warp a cycle, and the exponential unit takes a warp in 8 cycles.
_RATES = {90: (4800.0, 1.98)}
# Instructions and special operations a step and channel, float32, n = 16, from the table of `pallas_kernels.mosaic`.
_ISSUED = {"forward": 130, "gradient": 130 + 419}
_EXPONENTIALS = {"forward": 19, "gradient": 19 + 33}


def floor_ms(case: Case, which: str) -> dict[str, float] | None:
    """The least time by instruction issue, by the exponential unit and by bytes; None for an unknown GPU."""
    gpu = target_gpu()
    if gpu is None or gpu.capability not in _RATES or case.n != 16:
        return None
    gb_per_s, ghz = _RATES[gpu.capability]
    warp_steps = case.b * case.l * case.d / 32
    per_ms = gpu.multiprocessors * 4 * ghz * 1e6  # scheduler cycles
    sequences = 4 if which == "forward" else 4 + 7  # u, delta, z, y; then u, delta, z, dy, du, ddelta, dz
    moved = case.b * case.l * case.d * jnp.dtype(case.dtype).itemsize * sequences
    if which == "gradient":
        moved += 2 * case.b * case.l * case.d * case.n * 4 / 16  # states kept every 16 steps, written and read
    return {
        "issue": warp_steps * _ISSUED[which] / per_ms,
        "exponentials": warp_steps * _EXPONENTIALS[which] * 8 / per_ms,
        "bytes": moved / gb_per_s / 1e6,
    }
