"""The selective scan as one function: check the arguments, put them into canonical form, choose a form, run it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from mamba_jax.scan import associative, pallas, sequential
from mamba_jax.scan.chunked import skip_and_gate
from mamba_jax.scan.inputs import ScanInputs, wide_dtype
from mamba_jax.scan.sharded import over_shards, vary_alike
from mamba_jax.scan.validate import check_arguments
from pallas_kernels.choice import LEAST_CAPABILITY
from pallas_kernels.device import Gpu, target_gpu

Scan = Literal["auto", "sequential", "associative", "pallas"]
"""The names that `selective_scan(scan=...)` takes."""

logger = logging.getLogger(__name__)


def selective_scan(
    u: jax.Array,
    delta: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array | None = None,
    z: jax.Array | None = None,
    delta_bias: jax.Array | None = None,
    *,
    delta_softplus: bool = False,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    return_last_state: bool = False,
    scan: Scan = "auto",
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The selective scan of Mamba, in the form that `scan` names; every form gives the same values and gradients.

        Delta = delta + delta_bias;  if delta_softplus: Delta = softplus(Delta)
        h_t = exp(Delta_t A) * h_{t-1} + Delta_t B_t u_t,   h_{-1} = initial_state or 0
        y_t = sum_n C_t[n] h_t[n] + D u_t;   y_t = y_t * silu(z_t) if z is given

    Source: Mamba (arXiv 2312.00752), sections 3.2 and 3.3; `selective_scan_fn` of mamba_ssm, there with axes (b, d, l).

    Args:
        u: (b, l, d), the input; float32, bfloat16, float16, or float64 under x64, in any mixture with the others.
        delta: (b, l, d), the step sizes before the bias and softplus.
        A: (d, n), real, or complex64: then B, C and the state may be complex, and y takes 2 Re(C h); not with "pallas".
        B: (b, l, n), or (b, l, g, n) for g groups of d / g consecutive channels each, or (d, n) constant over time.
        C: as B.
        D: (d,), the skip.
        z: (b, l, d), the gate.
        delta_bias: (d,), added to delta.
        delta_softplus: whether softplus follows.
        initial_state: (b, d, n), the state before the first step.
        segment_ids: (b, l) integers; the state is set to zero wherever the id changes, so that packed documents do not
            see each other. The initial state enters the first one, the last state is the last one's.
        return_last_state: whether to return the state after the last step as well.
        scan: "sequential", "associative", "pallas"; or "auto": sequential on a CPU, pallas on GPUs of compute
            capability 8.0 and more where it supports the arguments, associative elsewhere.

    Returns:
        y (b, l, d) in u's dtype; with `return_last_state` a pair (y, last_state), last_state (b, d, n) float32, or
        float64 if any real input is, or complex with A. Both are differentiable. To pad, let Delta be 0: delta = -1e4
        under softplus, 0 without.

    Raises:
        ValueError: an argument's shape, dtype or name is wrong; the message names it, what it is and what it should be.
        NotImplementedError: the form named by `scan` cannot do this; the message names one that can.
    """
    inputs = checked_inputs(
        scan, u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias, initial_state=initial_state,
        segment_ids=segment_ids, delta_softplus=delta_softplus,
    )  # fmt: skip
    # Pallas' calls know nothing of check_vma, and "auto" may hold one.
    y, last_state = over_shards(functools.partial(run_form, scan), inputs, check_vma=scan in XLA_FORMS)
    return (y, last_state) if return_last_state else y


def checked_inputs(scan: Scan, *, delta_softplus: bool, **arguments: Any) -> ScanInputs:
    """The canonical record of the arguments of `selective_scan`, all of them, which raises what that function does."""
    arrays = {name: None if v is None else jnp.asarray(v) for name, v in arguments.items()}
    check_arguments(**arrays)
    if scan not in FORMS:
        raise ValueError(f"`scan` is {scan!r}; expected one of {', '.join(map(repr, FORMS))}")
    inputs = canonical(**arrays, delta_softplus=delta_softplus)
    if scan == "pallas":
        pallas.check_supported(inputs)
    return inputs


def canonical(*, u, delta, A, B, C, D, z, delta_bias, initial_state, segment_ids, delta_softplus) -> ScanInputs:
    """The record that every form takes (see `ScanInputs`), from arguments that have been checked."""
    (b, l, d), n = u.shape, A.shape[1]
    wide = wide_dtype(u, delta, A, B, C, D, z, delta_bias, initial_state)
    state = jnp.promote_types(A.dtype, wide)
    B, C = (m[None, None] if m.ndim == 2 else m[:, :, None] if m.ndim == 3 else m for m in (B, C))
    reset = None
    if segment_ids is not None:
        reset = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))[:, :l]
    inputs = ScanInputs(
        u=u,
        delta=delta,
        A=A.astype(state),
        B=B,
        C=C,
        D=jnp.zeros((d,), wide) if D is None else D.astype(wide),
        z=z,
        delta_bias=jnp.zeros((d,), wide) if delta_bias is None else delta_bias.astype(wide),
        initial_state=jnp.zeros((b, d, n), state) if initial_state is None else initial_state.astype(state),
        reset=reset,
        delta_softplus=delta_softplus,
    )
    varying = {name: m for name, m in (("B", B), ("C", C)) if not inputs.is_constant(m)}
    g = math.lcm(*(m.shape[2] for m in varying.values()))  # B and C may come in different numbers of groups
    unequal = {name: m for name, m in varying.items() if m.shape[2] != g}
    return dataclasses.replace(inputs, **{k: jnp.repeat(m, g // m.shape[2], axis=2) for k, m in unequal.items()})


def run_form(scan: Scan, inputs: ScanInputs) -> tuple[jax.Array, jax.Array]:
    """One shard, or everything on one device; where there is no state or no time, without the form."""
    inputs = vary_alike(inputs)
    if inputs.initial_state.size == 0 or inputs.u.shape[1] == 0:
        u = inputs.u.astype(inputs.D.dtype)
        return skip_and_gate(jnp.zeros_like(u), u, inputs.z, inputs.D).astype(inputs.u.dtype), inputs.initial_state
    return FORMS[scan](inputs)


def _auto(inputs: ScanInputs) -> tuple[jax.Array, jax.Array]:
    """The fastest form for the platform that the program is lowered for, and on a GPU for its compute capability."""
    gpu = target_gpu()
    on_cuda = pallas.scan if gpu is not None and pallas.is_best(inputs, gpu) else associative.scan
    if gpu is not None and gpu.capability < LEAST_CAPABILITY:
        _say_that_gpu_is_old(gpu)
    return lax.platform_dependent(inputs, cpu=sequential.scan, cuda=on_cuda, default=associative.scan)


@functools.cache
def _say_that_gpu_is_old(gpu: Gpu) -> None:
    logger.warning(
        '%s has compute capability %.1f; scan="pallas" needs 8.0 or more, so "auto" takes the associative form',
        gpu.name,
        gpu.capability / 10,
    )


Form = Callable[[ScanInputs], tuple[jax.Array, jax.Array]]

FORMS: dict[str, Form] = {
    "auto": _auto,
    "sequential": sequential.scan,
    "associative": associative.scan,
    "pallas": pallas.scan,
}
XLA_FORMS = ("sequential", "associative")
