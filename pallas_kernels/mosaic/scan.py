"""The Mosaic scan for any n: puts the inputs into the kernels' layout, loops over groups of 16 states, and undoes the
layout.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import Arguments
from pallas_kernels.mosaic import operands, split
from pallas_kernels.mosaic.backward import backward as run_backward
from pallas_kernels.mosaic.forward import forward as run_forward
from pallas_kernels.mosaic.operands import Operands
from pallas_kernels.tiling import STATES, MosaicTiling

F32 = jnp.float32


def forward(arguments: Arguments, tiling: MosaicTiling, *, delta_softplus: bool, keep_states: bool):
    """y (b, l, d), the last state (b, d, n), and the state before each tile (b, tiles, n, d), or None."""
    if arguments.A.shape[1] > STATES:
        return _forward_by_groups(arguments, tiling, delta_softplus, keep_states)
    d, n = arguments.A.shape
    x = operands.pack(arguments, delta_softplus)
    results = run_forward(x, split.entering_states(x, tiling), tiling, keep_states=keep_states)
    kept = None if results.kept is None else operands.all_channels(results.kept, d)[:, :, :n]
    return operands.all_channels(results.y, d), operands.unpack_state(results.last_states[:, -1], d, n), kept


def backward(
    arguments: Arguments,
    kept: jax.Array,
    dy: jax.Array,
    dlast: jax.Array,
    tiling: MosaicTiling,
    *,
    delta_softplus: bool,
) -> Arguments:
    """The gradient of each argument, in its dtype; None for reset."""
    if arguments.A.shape[1] > STATES:
        return _backward_by_groups(arguments, kept, dy, dlast, tiling, delta_softplus)
    x = operands.pack(arguments, delta_softplus)
    s, d = x.sizes, arguments.A.shape[0]
    kept = operands.by_group(operands.pad(kept, s.n, 2), s)
    dy = operands.by_group(dy, s)
    leaving = split.leaving_gradients(x, dy, operands.pack_state(dlast, s), tiling)
    g = run_backward(x, kept, dy, leaving, tiling)
    sums, rows, n = operands.all_channels(jnp.sum(g.channels, (0, 1)), d), x.rows, arguments.A.shape[1]
    return Arguments(
        u=operands.all_channels(g.u, d),
        delta=operands.all_channels(g.delta, d),
        A=sums[:n].T,
        B=_projection(g.B, sums, rows.B, x).astype(arguments.B.dtype)[..., :n],
        C=_projection(g.C, sums, rows.C, x).astype(arguments.C.dtype)[..., :n],
        D=sums[rows.D],
        z=None if g.z is None else operands.all_channels(g.z, d),
        delta_bias=sums[rows.delta_bias],
        initial_state=operands.unpack_state(g.entering[:, 0], d, n),
        reset=None,
    )


def _projection(partial: jax.Array | None, sums: jax.Array, row: int | None, x: Operands) -> jax.Array:
    """The gradient of B or C: the sum over channel blocks, always in the same order; or rows of the channels' sums."""
    s = x.sizes
    if partial is None:
        return sums[row : (row or 0) + s.n].T[None, None]
    total = jnp.sum(partial.reshape(s.b, s.g, s.blocks, -1, s.n), axis=2)
    return jnp.swapaxes(total[:, :, : s.l], 1, 2)


# -- more than 16 states -----------------------------------------------------------------------------------------------
#
# y is a sum over groups of states, and so are the gradients of what all states share. Each group is a scan without
# gate; u and delta are widened first, so that the groups' results come in float32 and are rounded once, as a sum. The
# gate is applied outside.


class _Group(NamedTuple):
    """What belongs to one group of states, stacked over groups in front."""

    A: jax.Array  # (d, 16)
    B: jax.Array  # (..., 16)
    C: jax.Array  # (..., 16)
    D: jax.Array  # (d,): zero but for the first group
    state: jax.Array  # (b, d, 16): initial state, or cotangent of the last


def _groups(a: Arguments, state: jax.Array) -> _Group:
    n = a.A.shape[1]
    count = -(-n // STATES)

    def stacked(x):
        x = operands.pad(x, count * STATES, x.ndim - 1)
        return jnp.moveaxis(x.reshape(*x.shape[:-1], count, STATES), -2, 0)

    D = jnp.zeros((count, *a.D.shape), F32).at[0].set(a.D)
    return _Group(stacked(a.A), stacked(a.B), stacked(a.C), D, stacked(state))


def _unstacked(x: jax.Array, n: int) -> jax.Array:
    """(groups, ..., 16) -> (..., n)."""
    x = jnp.moveaxis(x, 0, -2)
    return x.reshape(*x.shape[:-2], -1)[..., :n]


def _forward_by_groups(a: Arguments, tiling: MosaicTiling, delta_softplus: bool, keep_states: bool):
    n, z = a.A.shape[1], a.z
    wide = a._replace(u=a.u.astype(F32), delta=a.delta.astype(F32), z=None)

    def one(y, group: _Group):
        part = wide._replace(A=group.A, B=group.B, C=group.C, D=group.D, initial_state=group.state)
        part_y, last, kept = forward(part, tiling, delta_softplus=delta_softplus, keep_states=keep_states)
        return y + part_y, (last, kept)

    y, (last, kept) = lax.scan(one, jnp.zeros(a.u.shape, F32), _groups(a, a.initial_state))
    if z is not None:
        y = y * jax.nn.silu(z.astype(F32))
    if keep_states:
        kept = jnp.moveaxis(kept, 0, 2)  # (b, tiles, groups, 16, d)
        kept = kept.reshape(*kept.shape[:2], -1, kept.shape[-1])[:, :, :n]
    return y.astype(a.u.dtype), _unstacked(last, n), kept


def _backward_by_groups(a: Arguments, kept, dy, dlast, tiling: MosaicTiling, delta_softplus: bool) -> Arguments:
    n, dz = a.A.shape[1], None
    wide = a._replace(u=a.u.astype(F32), delta=a.delta.astype(F32), z=None)
    dy = dy.astype(F32)
    if a.z is not None:
        z = a.z.astype(F32)
        ungated = _forward_by_groups(wide, tiling, delta_softplus, False)[0]
        gate = jax.nn.sigmoid(z)
        dz = (dy * ungated * gate * (1 + z * (1 - gate))).astype(a.z.dtype)
        dy = dy * z * gate
    groups, cotangents = _groups(a, a.initial_state), _groups(a, dlast).state
    count = cotangents.shape[0]
    kept = operands.pad(kept, count * STATES, 2)
    kept = jnp.moveaxis(kept.reshape(*kept.shape[:2], count, STATES, kept.shape[-1]), 2, 0)

    def one(total, group_and_cotangents):
        group, group_kept, group_dlast = group_and_cotangents
        part = wide._replace(A=group.A, B=group.B, C=group.C, D=group.D, initial_state=group.state)
        g = backward(part, group_kept, dy, group_dlast, tiling, delta_softplus=delta_softplus)
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
