"""What this device can do at most, measured, and what the selective scan needs of it at least.

    floor = the largest of: bytes / bandwidth, and the arithmetic
    arithmetic = exponentials / exponential rate + other operations / FMA rate on a CPU, where the same units do both;
                 the larger of the two on a GPU, where exponentials have units of their own

What an implementation achieves, `of_limit`, is floor / time. The limits are of all devices together.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mamba_jax.bench.calls import Pass
from mamba_jax.bench.problem import Problem

ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Limits:
    """Measured rates of all devices together."""

    bandwidth_gb_per_s: float  # read and written
    exponentials_g_per_s: float  # float32
    fma_g_per_s: float  # float32 fused multiply-adds, two operations each
    shared_units: bool  # exponentials and FMAs run on the same units


@dataclasses.dataclass(frozen=True)
class Needs:
    """The least that the operation must do, whatever the implementation."""

    bytes: float
    exponentials: float
    operations: float  # vector instructions other than exponentials, each a multiply, an add, or both at once


def needs(problem: Problem, which: Pass) -> Needs:
    """Counted per element (b, l, d, n), with no (b, l, d, n) tensor in memory.

    Forward: exp(Delta A) is an exponential and a multiply; the drive B * (Delta u) a multiply; h and y an FMA each.
    Gradient: the forward pass; decay, drive and h once more; then g (an FMA and a multiply), g a h (a multiply), and an
    FMA each for dA, the two sums of dDelta and du, dB and dC.
    Bytes: each input and result moved once; for the gradient, which has two passes, u, delta, B and C twice.
    """
    b, l, d, n = problem.batch, problem.length, problem.channels, problem.state
    size = jnp.dtype(problem.dtype).itemsize
    sequences, matrices, elements = b * l * d * size, 2 * b * l * n * size, b * l * d * n
    if which == "forward":
        return Needs(bytes=3 * sequences + matrices, exponentials=elements, operations=4 * elements)
    moved = 3 * sequences + matrices  # forward: u, delta, y
    moved += 5 * sequences + 2 * matrices  # backward: u, delta, dy, du, ddelta; B, C and their gradients
    return Needs(bytes=moved, exponentials=2 * elements, operations=(4 + 3 + 3 + 5) * elements)


def floor(limits: Limits, needed: Needs) -> tuple[float, str]:
    """The least time in ms, and what bounds it: "bandwidth", "exponentials" or "arithmetic"."""
    bandwidth_ms = needed.bytes / limits.bandwidth_gb_per_s / 1e6
    exponential_ms = needed.exponentials / limits.exponentials_g_per_s / 1e6
    operation_ms = needed.operations / limits.fma_g_per_s / 1e6
    arithmetic_ms = exponential_ms + operation_ms if limits.shared_units else max(exponential_ms, operation_ms)
    if bandwidth_ms >= arithmetic_ms:
        return bandwidth_ms, "bandwidth"
    return arithmetic_ms, "exponentials" if exponential_ms >= operation_ms else "arithmetic"


def measure(scale: float = 1.0) -> Limits:
    """Measure this machine's limits, in a few seconds; `scale` below 1 does less work, for tests."""
    on_cpu = jax.default_backend() == "cpu"
    copied = int((64 if on_cpu else 512) * 2**20 * scale) // 4 + 1
    # On a CPU a tile that stays in the first-level cache; elsewhere enough threads to hide every latency, in registers.
    tile, chain, turns = (2048, 1, int(20_000 * scale) + 1) if on_cpu else (2**24, 64, 4)
    return Limits(
        bandwidth_gb_per_s=_rate(_repeated(_copy, 1, 8), copied, 8 * 8 * copied),
        exponentials_g_per_s=_rate(_repeated(_exponential, chain, turns), tile, tile * chain * turns),
        fma_g_per_s=_rate(_repeated(_fma, 16 * chain, turns), tile, tile * 16 * chain * turns),
        shared_units=on_cpu,
    )


def _copy(x: jax.Array) -> jax.Array:
    return x + jnp.float32(1)  # a copy that the compiler cannot leave out, onto memory that is there already


def _exponential(x: jax.Array) -> jax.Array:
    return jnp.exp(x) * jnp.float32(-0.5)  # stays between -0.5 and 0; the multiply is hidden behind the exponential


def _fma(x: jax.Array) -> jax.Array:
    return x * jnp.float32(0.999) + jnp.float32(0.001)


def _repeated(step: Callable[[jax.Array], jax.Array], chain: int, turns: int) -> Callable[[jax.Array], jax.Array]:
    def body(turn: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(chain):
            x = step(x)
        return x

    return lambda x: lax.fori_loop(0, turns, body, x)


def _rate(function: Callable[[jax.Array], jax.Array], size: int, work: float) -> float:
    """Work of `function` on `size` float32 on every device, in 1e9 a second: the best of some rounds, as a limit is."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("device",))
    spec = PartitionSpec("device")
    with jax.set_mesh(mesh):
        x = jax.device_put(np.full((len(devices), size), -0.25, np.float32), NamedSharding(mesh, spec))
        compiled = jax.jit(jax.shard_map(function, in_specs=spec, out_specs=spec)).lower(x).compile()
    jax.block_until_ready(compiled(x))
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        jax.block_until_ready(compiled(x))
        seconds.append(time.perf_counter() - begun)
    return work * len(devices) / min(seconds) / 1e9
