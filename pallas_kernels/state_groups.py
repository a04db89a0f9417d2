"""The scan of any number of states on a GPU, by kernels (a module with `forward` and `backward`) that hold at most 16.

y is a sum over groups of states, and so are the gradients of what all states share. Each group is a scan without gate;
u and delta are widened first, so that the groups' results come in float32 and are rounded once, as a sum. The gate is
applied outside.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import Arguments
from pallas_kernels.tiling import STATES

F32 = jnp.float32


def forward(kernels: Any, arguments: Arguments, tiling: Any, *, delta_softplus: bool, keep_states: bool):
    """y (b, l, d), the last state (b, d, n), and the state before each chunk (b, chunks, n, d), or None."""
    if arguments.A.shape[1] <= STATES:
        return kernels.forward(arguments, tiling, delta_softplus=delta_softplus, keep_states=keep_states)
    return _forward_by_groups(kernels, arguments, tiling, delta_softplus, keep_states)


def backward(
    kernels: Any,
    arguments: Arguments,
    kept: jax.Array,
    dy: jax.Array,
    dlast: jax.Array,
    tiling: Any,
    *,
    delta_softplus: bool,
) -> Arguments:
    """The gradient of each argument, in its dtype; None for reset."""
    if arguments.A.shape[1] <= STATES:
        return kernels.backward(arguments, kept, dy, dlast, tiling, delta_softplus=delta_softplus)
    return _backward_by_groups(kernels, arguments, kept, dy, dlast, tiling, delta_softplus)


def _cut(n: int) -> tuple[int, int]:
    """How many groups, and of how many states each; the last may be padded."""
    count = -(-n // STATES)
    return count, -(-n // count)


class _Group(NamedTuple):
    """What belongs to one group of states, stacked over groups in front."""

    A: jax.Array  # (d, width)
    B: jax.Array  # (..., width)
    C: jax.Array  # (..., width)
    D: jax.Array  # (d,): zero but for the first group
    state: jax.Array  # (b, d, width): initial state, or cotangent of the last


def _groups(a: Arguments, state: jax.Array) -> _Group:
    count, width = _cut(a.A.shape[1])

    def stacked(x):
        x = _padded(x, count * width, x.ndim - 1)
        return jnp.moveaxis(x.reshape(*x.shape[:-1], count, width), -2, 0)

    D = jnp.zeros((count, *a.D.shape), F32).at[0].set(a.D)
    return _Group(stacked(a.A), stacked(a.B), stacked(a.C), D, stacked(state))


def _unstacked(x: jax.Array, n: int) -> jax.Array:
    """(groups, ..., width) -> (..., n)."""
    x = jnp.moveaxis(x, 0, -2)
    return x.reshape(*x.shape[:-2], -1)[..., :n]


def _forward_by_groups(kernels: Any, a: Arguments, tiling: Any, delta_softplus: bool, keep_states: bool):
    n, z = a.A.shape[1], a.z
    wide = a._replace(u=a.u.astype(F32), delta=a.delta.astype(F32), z=None)

    def one(y, group: _Group):
        part = wide._replace(A=group.A, B=group.B, C=group.C, D=group.D, initial_state=group.state)
        part_y, last, kept = kernels.forward(part, tiling, delta_softplus=delta_softplus, keep_states=keep_states)
        return y + part_y, (last, kept)

    y, (last, kept) = lax.scan(one, jnp.zeros(a.u.shape, F32), _groups(a, a.initial_state))
    if z is not None:
        y = y * jax.nn.silu(z.astype(F32))
    if keep_states:
        kept = jnp.moveaxis(kept, 0, 2)  # (b, chunks, groups, width, d)
        kept = kept.reshape(*kept.shape[:2], -1, kept.shape[-1])[:, :, :n]
    return y.astype(a.u.dtype), _unstacked(last, n), kept


def _backward_by_groups(kernels: Any, a: Arguments, kept, dy, dlast, tiling: Any, delta_softplus: bool) -> Arguments:
    n, dz = a.A.shape[1], None
    wide = a._replace(u=a.u.astype(F32), delta=a.delta.astype(F32), z=None)
    dy = dy.astype(F32)
    if a.z is not None:
        z = a.z.astype(F32)
        ungated = _forward_by_groups(kernels, wide, tiling, delta_softplus, False)[0]
        gate = jax.nn.sigmoid(z)
        dz = (dy * ungated * gate * (1 + z * (1 - gate))).astype(a.z.dtype)
        dy = dy * z * gate
    groups, cotangents = _groups(a, a.initial_state), _groups(a, dlast).state
    count, width = _cut(n)
    kept = _padded(kept, count * width, 2)
    kept = jnp.moveaxis(kept.reshape(*kept.shape[:2], count, width, kept.shape[-1]), 2, 0)

    def one(total, group_and_cotangents):
        group, group_kept, group_dlast = group_and_cotangents
        part = wide._replace(A=group.A, B=group.B, C=group.C, D=group.D, initial_state=group.state)
        g = kernels.backward(part, group_kept, dy, group_dlast, tiling, delta_softplus=delta_softplus)
        shared = (g.u, g.delta, g.delta_bias)
        return tuple(t + s for t, s in zip(total, shared, strict=True)), (g.A, g.B, g.C, g.D, g.initial_state)

    zeros = (jnp.zeros(a.u.shape, F32), jnp.zeros(a.u.shape, F32), jnp.zeros(a.D.shape, F32))
    (du, ddelta, dbias), (dA, dB, dC, dD, dinitial) = lax.scan(one, zeros, (groups, kept, cotangents))
    return Arguments(
        u=du.astype(a.u.dtype),
        delta=ddelta.astype(a.delta.dtype),
        A=_unstacked(dA, n),
        B=_unstacked(dB, n),
        C=_unstacked(dC, n),
        D=dD[0],  # the sum of dy u, the same in every group
        z=dz,
        delta_bias=dbias,
        initial_state=_unstacked(dinitial, n),
        reset=None,
    )


def _padded(x: jax.Array, size: int, axis: int) -> jax.Array:
    """x with zeros after it, up to `size` along `axis`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)
