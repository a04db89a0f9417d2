"""The Mosaic scan for any n: prepares the inputs, loops over groups of 16 states, and puts the results into the callers' shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic import backward as backward_kernel
from pallas_kernels.mosaic import forward as forward_kernel
from pallas_kernels.mosaic import operands
from pallas_kernels.mosaic.launch import Pieces
from pallas_kernels.arguments import Arguments


def forward(a: Arguments, tiles, *, delta_softplus: bool, keep_states: bool):
    x = operands.pack(*a, delta_softplus)
    r = forward_kernel.run(x, x.initial_state[:, None], forward_kernel.Config(tiles[0], tiles[1], tiles[3]), Pieces(1, a.u.shape[1]), a.u.dtype, keep_states)
    d, n = a.A.shape
    kept = operands.channels_last(r["kept"], d)[:, :, :n] if keep_states else None
    return operands.channels_last(r["y"], d), operands.state_out(r["last"][:, -1], d, n), kept


def backward(a: Arguments, kept, dy, dlast, tiles, *, delta_softplus: bool) -> Arguments:
    x = operands.pack(*a, delta_softplus)
    s = x.sizes
    d, n = a.A.shape
    kept = operands.by_group(operands.pad(kept, s.n, 2), s)
    r = backward_kernel.run(x, kept, operands.sequence(dy, s), operands.state(dlast, s)[:, None], backward_kernel.Config(tiles[3], tiles[2]), Pieces(1, s.l), None)
    sums = operands.channels_last(r["sums"].sum((0, 1)), d)
    rows = x.rows

    def projection(name, row):
        like = getattr(a, name)
        if row is not None:
            return sums[row : row + n].T[None, None].astype(like.dtype)
        p = r["d" + name].reshape(s.b, s.g, s.blocks, -1, s.n).sum(2)
        return jnp.swapaxes(p[:, :, : s.l, :n], 1, 2).astype(like.dtype)

    return Arguments(
        operands.channels_last(r["du"], d),
        operands.channels_last(r["ddelta"], d),
        sums[:n].T,
        projection("B", rows.B),
        projection("C", rows.C),
        sums[rows.D],
        None if a.z is None else operands.channels_last(r["dz"], d),
        sums[rows.delta_bias],
        operands.state_out(r["dinitial"][:, 0], d, n),
        None,
    )
