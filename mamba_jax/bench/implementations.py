"""The implementations that are compared, by name: ours, the PyTorch loop, its remedies, and other packages."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax

from mamba_jax import selective_scan
from mamba_jax.bench.calls import Call, JaxCall, Pass, TorchCall, Unavailable
from mamba_jax.bench.problem import Problem
from mamba_jax.bench.settings import Name
from mamba_jax.bench.timing import Implementation
from mamba_jax.reference.plain_scan import plain_scan
from mamba_jax.scan.api import Scan


def _jax(function: Callable[..., Any]) -> Callable[[Problem, Pass], Call]:
    return lambda problem, which: JaxCall(function, problem, which)


def _form(scan: Scan) -> Callable[..., Any]:
    return functools.partial(selective_scan, scan=scan)


def _on_all_devices(function: Callable[..., Any]) -> Callable[[Problem, Pass], Call]:
    """The batch split over as many devices as divide it: on a CPU one device is one core."""

    def prepare(problem: Problem, which: Pass) -> Call:
        devices = max(k for k in range(1, len(jax.devices()) + 1) if problem.batch % k == 0)
        if devices == 1:
            raise Unavailable(f"a batch of {problem.batch} cannot be split over {len(jax.devices())} device(s)")
        return JaxCall(function, problem, which, devices)

    return prepare


def _torch(name: str, *, needs: str = "torch", makes: bool = False, cuda: bool = False, warm_ups: int = 0):
    """The function `name` of `reference.torch_rivals`, or what it `makes`; with `needs` installed, on CUDA if so."""

    def prepare(problem: Problem, which: Pass) -> Call:
        for package in ("torch", needs):
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"{package} is not installed")
        import torch

        if cuda and not torch.cuda.is_available():
            raise Unavailable("PyTorch sees no CUDA GPU")
        function = getattr(importlib.import_module("mamba_jax.reference.torch_rivals"), name)
        try:
            function = function() if makes else function
        except ImportError as error:
            raise Unavailable(f"this {needs} lacks what is needed: {error}") from error
        return TorchCall(function, problem, which, warm_ups)

    return prepare


BASELINE: Name = "torch-loop"

_SPLIT = "batch split over devices"

IMPLEMENTATIONS: dict[Name, Implementation] = {
    BASELINE: Implementation("PyTorch loop (mamba-minimal)", _torch("loop"), rival=True),
    "torch-compile": Implementation(
        "the loop, torch.compile", _torch("compiled_loop", makes=True, warm_ups=1), rival=True, unrolled=True
    ),
    "torch-script": Implementation(
        # Three calls: TorchScript watches the first, and compiles in the second and third.
        "the loop, step fused by TorchScript",
        _torch("fused_step_loop", makes=True, warm_ups=3),
        rival=True,
    ),
    "torch-transposed": Implementation("the loop, layout (b, d, l, n)", _torch("transposed_loop"), rival=True),
    "mambapy": Implementation(
        "mambapy, parallel scan", _torch("mambapy_scan", needs="mambapy", makes=True), rival=True
    ),
    "transformers": Implementation(
        "transformers, slow path", _torch("transformers_scan", needs="transformers", makes=True), rival=True
    ),
    "mamba_ssm": Implementation(
        "mamba_ssm, CUDA kernel", _torch("mamba_ssm_scan", needs="mamba_ssm", makes=True, cuda=True), rival=True
    ),
    "plain-scan": Implementation("JAX lax.scan, nothing more", _jax(plain_scan)),
    "sequential": Implementation("ours, sequential", _jax(_form("sequential"))),
    "associative": Implementation("ours, associative", _jax(_form("associative"))),
    "pallas": Implementation("ours, pallas", _jax(_form("pallas"))),
    "sequential-split": Implementation(f"ours, sequential, {_SPLIT}", _on_all_devices(_form("sequential"))),
    "associative-split": Implementation(f"ours, associative, {_SPLIT}", _on_all_devices(_form("associative"))),
    "pallas-split": Implementation(f"ours, pallas, {_SPLIT}", _on_all_devices(_form("pallas"))),
}
