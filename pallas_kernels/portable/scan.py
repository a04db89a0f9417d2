"""The portable kernels on a caller's arrays: channels split into groups, states in front of channels, and the open sums of the gradients closed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arguments
from pallas_kernels.portable.backward import backward as run_backward
from pallas_kernels.portable.forward import forward as run_forward
from pallas_kernels.portable.stages import Plan, Values
from pallas_kernels.tiling import Sizes, Tiling


def forward(
    arguments: Arguments, tiling: Tiling, *, delta_softplus: bool, keep_states: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """y (b, l, d), the last state (b, d, n), and the states before each chunk (b, chunks, n, d) if they are to be kept."""
    s, plan = arguments.sizes, _plan(arguments, tiling, delta_softplus)
    results = run_forward(_values(arguments), plan, keep_states=keep_states)
    boundaries = results.boundaries
    if boundaries is not None:
        boundaries = boundaries.reshape(s.b, -1, s.n, s.d)
    return results.y.reshape(s.b, s.l, s.d), _state_last(results.last_state, s), boundaries


def backward(
    arguments: Arguments,
    boundaries: jax.Array,
    dy: jax.Array,
    dlast: jax.Array,
    tiling: Tiling,
    *,
    delta_softplus: bool,
) -> Arguments:
    """The gradient of each argument, in its dtype; None for `reset`."""
    s, plan = arguments.sizes, _plan(arguments, tiling, delta_softplus)
    grouped = boundaries.reshape(s.b, -1, s.n, s.g, s.r)
    gradients = run_backward(_values(arguments), grouped, _grouped(dy, s), _state_first(dlast, s), plan)

    def projection(partial: jax.Array, argument: jax.Array, constant: bool) -> jax.Array:
        if constant:
            summed = _rows_of_channels(partial.sum(0), s)[None, None]
        else:
            summed = jnp.swapaxes(partial.sum(2), 1, 2)
        return summed.reshape(argument.shape).astype(argument.dtype)

    return Arguments(
        u=gradients.u.reshape(s.b, s.l, s.d),
        delta=gradients.delta.reshape(s.b, s.l, s.d),
        A=_rows_of_channels(gradients.A.sum(0), s),
        B=projection(gradients.B, arguments.B, plan.constant_B),
        C=projection(gradients.C, arguments.C, plan.constant_C),
        D=gradients.D.sum(0).reshape(s.d),
        z=None if gradients.z is None else gradients.z.reshape(s.b, s.l, s.d),
        delta_bias=gradients.delta_bias.sum(0).reshape(s.d),
        initial_state=_state_last(gradients.initial_state, s),
        reset=None,  # pyright: ignore[reportArgumentType]
    )


def _plan(arguments: Arguments, tiling: Tiling, delta_softplus: bool) -> Plan:
    return Plan(
        sizes=arguments.sizes,
        tiling=tiling,
        wide=arguments.A.dtype,
        constant_B=arguments.constant_B,
        constant_C=arguments.constant_C,
        softplus=delta_softplus,
    )


def _values(arguments: Arguments) -> Values:
    s = arguments.sizes

    def constant(matrix: jax.Array) -> jax.Array:
        return matrix.reshape(s.d, s.n).T.reshape(s.n, s.g, s.r)

    return Values(
        u=_grouped(arguments.u, s),
        delta=_grouped(arguments.delta, s),
        A=constant(arguments.A),
        B=constant(arguments.B) if arguments.constant_B else arguments.B,
        C=constant(arguments.C) if arguments.constant_C else arguments.C,
        D=arguments.D.reshape(s.g, s.r),
        z=None if arguments.z is None else _grouped(arguments.z, s),
        delta_bias=arguments.delta_bias.reshape(s.g, s.r),
        initial_state=_state_first(arguments.initial_state, s),
        reset=None if arguments.reset is None else arguments.reset.astype(jnp.int32),
    )


def _grouped(sequence: jax.Array, s: Sizes) -> jax.Array:
    """(b, l, d) -> (b, l, g, r)"""
    return sequence.reshape(s.b, s.l, s.g, s.r)


def _state_first(state: jax.Array, s: Sizes) -> jax.Array:
    """(b, d, n) -> (b, n, g, r)"""
    return jnp.swapaxes(state, 1, 2).reshape(s.b, s.n, s.g, s.r)


def _state_last(state: jax.Array, s: Sizes) -> jax.Array:
    """(b, n, g, r) -> (b, d, n)"""
    return jnp.swapaxes(state.reshape(s.b, s.n, s.d), 1, 2)


def _rows_of_channels(parameter: jax.Array, s: Sizes) -> jax.Array:
    """(n, g, r) -> (d, n)"""
    return parameter.reshape(s.n, s.d).T
