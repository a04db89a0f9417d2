"""An implementation made ready for one problem and one pass: compiled, inputs on the device, for `timing` to call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mamba_jax.bench.memory import peak_of_torch_call
from mamba_jax.bench.problem import ARGUMENTS, Problem

Pass = Literal["forward", "gradient"]
"""y alone; or y and the gradients of all six arguments, forward pass included."""

MIB = 2**20


class Unavailable(Exception):
    """An implementation cannot run here; the message says why."""


class Call(Protocol):
    """What is timed."""

    compile_s: float | None  # tracing and compiling; None where nothing is compiled
    temp_mib: float | None  # taken beyond arguments and results

    def run(self) -> None:
        """One call with dense dy, until its results are there."""
        ...

    def checked_results(self) -> dict[str, np.ndarray]:
        """y and, of the gradient pass, the gradients for the masked dy, by name."""
        ...


class JaxCall:
    """A JAX function (u, delta, A, B, C, D) -> y, compiled ahead of time; over `devices` devices the batch is split."""

    def __init__(self, function: Callable[..., jax.Array], problem: Problem, which: Pass, devices: int = 1) -> None:
        self._which = which
        mesh = jax.make_mesh((devices,), ("batch",), devices=jax.devices()[:devices]) if devices > 1 else None

        def put(name: str, value: np.ndarray) -> jax.Array:
            if mesh is None:
                return jnp.asarray(value)
            spec = PartitionSpec() if name in ("A", "D") else PartitionSpec("batch")
            return jax.device_put(value, NamedSharding(mesh, spec))

        self._arguments = tuple(put(name, problem.arguments[name]) for name in ARGUMENTS)
        with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            begun = time.perf_counter()
            if which == "forward":
                self._cotangents = self._checked = ()
                self._compiled = jax.jit(function).lower(*self._arguments).compile()
            else:
                self._cotangents, self._checked = (put("dy", problem.dy),), (put("dy", problem.masked_dy),)
                lowered = jax.jit(_with_gradient(function)).lower(*self._arguments, *self._cotangents)
                self._compiled = lowered.compile()
            self.compile_s: float | None = time.perf_counter() - begun
        analysis = self._compiled.memory_analysis()
        self.temp_mib: float | None = None if analysis is None else analysis.temp_size_in_bytes * devices / MIB

    def run(self) -> None:
        jax.block_until_ready(self._compiled(*self._arguments, *self._cotangents))

    def checked_results(self) -> dict[str, np.ndarray]:
        results = self._compiled(*self._arguments, *self._checked)
        if self._which == "forward":
            return {"y": np.asarray(results)}
        y, gradients = results
        return {"y": np.asarray(y)} | {f"d{name}": np.asarray(g) for name, g in zip(ARGUMENTS, gradients)}


def _with_gradient(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    def value_and_gradients(*arguments: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        *inputs, dy = arguments
        y, pull_back = jax.vjp(function, *inputs)
        return y, pull_back(dy)

    return value_and_gradients


class TorchCall:
    """A PyTorch function (u, delta, A, B, C, D) -> y, on the GPU where PyTorch has one; `warm_ups` calls compile it."""

    def __init__(self, function: Callable[..., Any], problem: Problem, which: Pass, warm_ups: int = 0) -> None:
        import torch

        self._torch, self._which, self._function = torch, which, function
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._arguments = [self._put(problem.arguments[name]) for name in ARGUMENTS]
        self._dy = self._masked_dy = None
        if which == "gradient":
            self._arguments = [v.requires_grad_() for v in self._arguments]
            self._dy, self._masked_dy = self._put(problem.dy), self._put(problem.masked_dy)
        self.compile_s: float | None = None
        self.temp_mib: float | None = None
        if warm_ups:
            begun = time.perf_counter()
            for _ in range(warm_ups):
                self.run()
            ready = time.perf_counter()
            self.run()
            self.compile_s = max(0.0, ready - begun - warm_ups * (time.perf_counter() - ready))

    def _put(self, value: np.ndarray) -> Any:
        tensor = self._torch.from_numpy(value.astype(np.float32))  # NumPy's bfloat16 is unknown to PyTorch
        return tensor.to(self.device, getattr(self._torch, value.dtype.name))

    def run(self) -> None:
        self._call(self._dy)
        if self.device == "cuda":
            self._torch.cuda.synchronize()

    def _call(self, dy: Any) -> list[Any]:
        if self._which == "forward":
            with self._torch.no_grad():
                return [self._function(*self._arguments)]
        y = self._function(*self._arguments)
        return [y.detach(), *self._torch.autograd.grad(y, self._arguments, dy)]

    def checked_results(self) -> dict[str, np.ndarray]:
        results, peak = peak_of_torch_call(lambda: self._call(self._masked_dy), self.device)
        if peak is not None:
            own = sum(v.numel() * v.element_size() for v in results)
            self.temp_mib = max(0, peak - own) / MIB
        names = ["y", *(f"d{name}" for name in ARGUMENTS)]
        return {name: v.float().cpu().numpy() for name, v in zip(names, results)}
