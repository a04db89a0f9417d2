"""How fast the scans are beside their baseline, on a quiet machine: `pytest -m slow tests/test_speed.py`."""

import time

import cases
import jax
import jax.numpy as jnp
import pytest

from mamba_jax import selective_scan
from mamba_jax.reference.plain_scan import plain_scan

ROUNDS = 15


def quickest_ms(functions, arguments):
    """Milliseconds of each function's quickest call, in turn: what else the machine does can only add to them.

    Each turn is two calls, of which the second counts: the first brings back the memory and threads that the last one
    in turn let go.
    """
    times_ms = {name: [] for name in functions}
    for _ in range(ROUNDS):
        for name, function in functions.items():
            jax.block_until_ready(function(arguments))
            begun = time.perf_counter()
            jax.block_until_ready(function(arguments))
            times_ms[name].append((time.perf_counter() - begun) * 1e3)
    return {name: min(values) for name, values in times_ms.items()}


@pytest.mark.slow
def test_sequential_beside_the_plain_scan():
    """At (2, 1024, 1536, 16) float32 on a CPU: forward at least 1.5 times, forward and backward 2.5 times as fast."""
    problem = cases.make_problem(cases.Case(length=1024, batch=2, dim=1536, state=16))
    names = ("u", "delta", "A", "B", "C")
    cpu = jax.devices("cpu")[0]
    arguments = {name: jax.device_put(jnp.asarray(problem.arguments[name]), cpu) for name in names}
    forward = {
        "sequential": jax.jit(lambda a: selective_scan(**a, scan="sequential")),
        "plain": jax.jit(lambda a: plain_scan(**a)),
    }
    backward = {
        name: jax.jit(jax.grad(lambda a, function=function: jnp.sum(function(a) * problem.dy)))
        for name, function in forward.items()
    }
    forward_ms, backward_ms = quickest_ms(forward, arguments), quickest_ms(backward, arguments)
    print(f"forward {forward_ms}, forward and backward {backward_ms}")
    assert forward_ms["plain"] >= 1.5 * forward_ms["sequential"], forward_ms
    assert backward_ms["plain"] >= 2.5 * backward_ms["sequential"], backward_ms
