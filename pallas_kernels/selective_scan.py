"""The selective scan with its gradients, as the kernels compute it: custom_vjp, and the choice of kernel."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import choice, compat, device, portable, state_groups, tiling
from pallas_kernels.arguments import Arguments

_OTHER_FORMS = 'use scan="sequential" or scan="associative" instead'
_NO_KERNEL = "the Pallas kernels run on CPUs and NVIDIA GPUs only"


def selective_scan(
    u: jax.Array,
    delta: jax.Array,
    A: jax.Array,
    B: jax.Array,
    C: jax.Array,
    D: jax.Array,
    z: jax.Array | None,
    delta_bias: jax.Array,
    initial_state: jax.Array,
    reset: jax.Array | None,
    *,
    delta_softplus: bool,
) -> tuple[jax.Array, jax.Array]:
    """The selective scan, run by Pallas kernels; differentiable once, in reverse mode, in every floating argument.

        Delta_t = softplus(delta_t + delta_bias)                       (the sum alone without `delta_softplus`)
        h_t = exp(Delta_t A) h_{t-1} + Delta_t B_t u_t                 (h_{t-1} taken as 0 where `reset` is True)
        y_t = (sum_n C_t h_t + D u_t) silu(z_t)                        (no gate without z)

    "wide" is float32, or float64 on a CPU under x64. Gradients have their argument's dtype, and the same bits every
    run.

    Args:
        u, delta, z: (b, l, d), float32, bfloat16, float16, or float64 on a CPU, in any mixture; z may be None.
        A: (d, n), wide.
        B, C: (b, l, g, n), a group for d / g consecutive channels, in any of these dtypes, or (1, 1, d, n) if constant
            over time.
        D, delta_bias: (d,), wide.
        initial_state: (b, d, n), wide.
        reset: (b, l) bool, True where a document begins; or None.
        delta_softplus: whether Delta passes through softplus.

    Returns:
        y (b, l, d) in u's dtype, and the state after the last step (b, d, n), wide.

    Source: Mamba, arXiv 2312.00752, section 3.3; `selective_scan_fn` of mamba_ssm.

    Raises:
        NotImplementedError: for complex arguments, for float64 on a GPU, on other platforms than CPU and CUDA, in
            forward mode, and for second derivatives.
    """
    if jnp.iscomplexobj(A) or jnp.iscomplexobj(B) or jnp.iscomplexobj(C) or jnp.iscomplexobj(initial_state):
        raise NotImplementedError(f"the Pallas kernels take real arguments only; {_OTHER_FORMS}")
    if 0 in (*u.shape, A.shape[1]):
        return _without_states(u, D, z), initial_state
    return _scan(Arguments(u, delta, A, B, C, D, z, delta_bias, initial_state, reset), delta_softplus)


def _without_states(u: jax.Array, D: jax.Array, z: jax.Array | None) -> jax.Array:
    """y where there is no state, or nothing at all."""
    y = D * u
    return (y if z is None else y * jax.nn.silu(z.astype(y.dtype))).astype(u.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scan(arguments: Arguments, delta_softplus: bool):
    y, last_state, _ = _forward(arguments, delta_softplus, False)
    return y, last_state


def _scan_forward(arguments: Arguments, delta_softplus: bool):
    y, last_state, boundaries = _forward(arguments, delta_softplus, True)
    return (y, last_state), (arguments, boundaries)


def _scan_backward(delta_softplus: bool, residuals, cotangents):
    arguments, boundaries = residuals
    return (_backward((arguments, boundaries, *cotangents), delta_softplus),)


_scan.defvjp(_scan_forward, _scan_backward)


def _differentiable_once(function):
    """Differentiating `function(arrays, *static)` ends in one clear error, instead of one from inside a kernel."""
    static = tuple(range(1, function.__code__.co_argcount))
    guarded = jax.custom_jvp(jax.jit(function, static_argnums=static), nondiff_argnums=static)

    @guarded.defjvp
    def _refuse(*_):
        raise NotImplementedError(f"the Pallas kernels have no second derivatives and no forward mode; {_OTHER_FORMS}")

    return guarded


@_differentiable_once
def _forward(arguments: Arguments, delta_softplus: bool, keep_states: bool):
    """y (b, l, d), the last state (b, d, n), and the states before each chunk (b, chunks, n, d) or None."""
    options = {"delta_softplus": delta_softplus, "keep_states": keep_states}

    def interpreted(arguments: Arguments):
        cut = choice.on_cpu(arguments.sizes).tiling
        return portable.forward(_prepared(arguments, _say_interpreted), cut, **options)

    def on_gpu(arguments: Arguments):
        if reason := choice.gpu_lacks(arguments.A.dtype, device.target_gpu()):
            return nowhere(arguments, reason)
        kernels, cut, arguments = _gpu_kernels(arguments)
        return state_groups.forward(kernels, arguments, cut, **options)

    def nowhere(arguments: Arguments, reason: str = _NO_KERNEL):
        kept = jnp.zeros(tiling.boundaries_shape(arguments.sizes), arguments.A.dtype) if keep_states else None
        refused = _prepared(arguments, functools.partial(_refuse_to_lower, reason))
        return refused.u + refused.A[0, 0].astype(refused.u.dtype), refused.initial_state + refused.A, kept

    return _without_mesh(lax.platform_dependent)(arguments, cpu=interpreted, cuda=on_gpu, default=nowhere)


@_differentiable_once
def _backward(residuals, delta_softplus: bool) -> Arguments:
    """The gradient of each argument, from (arguments, boundaries, cotangent of y, cotangent of the last state)."""

    def interpreted(arguments: Arguments, boundaries, dy, dlast):
        cut = choice.on_cpu(arguments.sizes).tiling
        ready = _prepared(arguments, _say_interpreted)
        return portable.backward(ready, boundaries, dy, dlast, cut, delta_softplus=delta_softplus)

    def on_gpu(arguments: Arguments, boundaries, dy, dlast):
        if reason := choice.gpu_lacks(arguments.A.dtype, device.target_gpu()):
            return nowhere(arguments, reason=reason)
        kernels, cut, arguments = _gpu_kernels(arguments)
        return state_groups.backward(kernels, arguments, boundaries, dy, dlast, cut, delta_softplus=delta_softplus)

    def nowhere(arguments: Arguments, *_, reason: str = _NO_KERNEL):
        return _prepared(arguments, functools.partial(_refuse_to_lower, reason))._replace(reset=None)

    return _without_mesh(lax.platform_dependent)(*residuals, cpu=interpreted, cuda=on_gpu, default=nowhere)


def _gpu_kernels(arguments: Arguments):
    """The kernels for the GPU at hand, how they cut the scan up, and the arguments to call them with."""
    z = arguments.z
    itemsizes = arguments.u.dtype.itemsize, arguments.delta.dtype.itemsize, 0 if z is None else z.dtype.itemsize
    chosen = choice.on_gpu(arguments.sizes, itemsizes, device.target_gpu())
    if chosen.kernels == "mosaic":
        from pallas_kernels import mosaic  # only now: jax 0.10 has other layouts

        return mosaic, chosen.tiling, arguments
    return portable, chosen.tiling, _prepared(arguments, compat.accept_triton_deprecation)


def _without_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    """On a mesh with explicit axes, run the function with them automatic, and its results on all devices.

    Pallas' interpreter mixes arrays of its own, which have no sharding, with ours. Split arrays do not come here:
    whoever splits them calls the scan under `shard_map`, as `mamba_jax.selective_scan` does.
    """
    if jax.sharding.AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return function
    return jax.sharding.auto_axes(function, out_sharding=jax.sharding.PartitionSpec())


# -- what happens when a platform's branch is lowered ------------------------------------------------------------------


def _prepared(arguments: Arguments, action) -> Arguments:
    """The same arguments; `action` runs when what is computed from them is lowered."""
    return arguments._replace(A=compat.at_lowering(arguments.A, action))


@functools.cache
def _say_interpreted() -> None:
    """Once per process."""
    logging.getLogger(__name__).warning("the Pallas kernels run through Pallas' interpreter, as this is a CPU")


def _refuse_to_lower(reason: str) -> None:
    raise NotImplementedError(f"{reason}; {_OTHER_FORMS}")
