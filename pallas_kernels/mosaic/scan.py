"""The Mosaic scan of up to 16 states: puts the inputs into the kernels' layout, and undoes that layout."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arguments
from pallas_kernels.mosaic import operands, split
from pallas_kernels.mosaic.backward import backward as run_backward
from pallas_kernels.mosaic.forward import forward as run_forward
from pallas_kernels.mosaic.operands import Operands
from pallas_kernels.tiling import MosaicTiling


def forward(arguments: Arguments, tiling: MosaicTiling, *, delta_softplus: bool, keep_states: bool):
    """y (b, l, d), the last state (b, d, n), and the state before each tile (b, tiles, n, d), or None."""
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
