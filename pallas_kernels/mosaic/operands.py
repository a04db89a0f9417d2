"""The scan's inputs as the copy engine takes them: channels split into groups, widths that are whole 16 bytes, small
arrays in float32.

An array whose width already fits is only reshaped. B, C, A and the states are small beside u and delta, so casting
and padding those is cheap.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import Arguments
from pallas_kernels.mosaic.arithmetic import LOG2_E
from pallas_kernels.tiling import CHANNELS, state_width

COPY_BYTES = 16  # strides of what the copy engine moves are multiples of this


@dataclasses.dataclass(frozen=True)
class PaddedSizes:
    """Sizes after padding: b batch rows, l steps, g groups of r channels, n states."""

    b: int
    l: int
    g: int
    r: int
    n: int

    @property
    def blocks(self) -> int:
        """Channel blocks in a group."""
        return -(-self.r // CHANNELS)


@dataclasses.dataclass(frozen=True)
class Operands:
    """What the kernels read. `None` where there is no gate, no reset, or where B or C is a row of `channels`."""

    sizes: PaddedSizes
    u: jax.Array  # (b, l, g, r)
    delta: jax.Array  # (b, l, g, r)
    z: jax.Array | None  # (b, l, g, r)
    B: jax.Array | None  # (b, l, g, n) float32
    C: jax.Array | None  # (b, l, g, n) float32
    channels: (
        jax.Array
    )  # (rows, g, r) float32: n rows of A log2(e), then D, delta_bias, and n rows each of a constant B and C
    initial_state: jax.Array  # (b, n, g, r) float32
    reset: jax.Array | None  # (b, l padded) float32: -inf where a document begins, else 0
    softplus: bool

    def arrays(self, *names: str) -> dict[str, jax.Array]:
        """Those of the named inputs that are there."""
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def rows(self) -> ChannelRows:
        """Where the rows of `channels` lie."""
        n = self.sizes.n
        B = n + 2 if self.B is None else None
        end = n + 2 if B is None else B + n
        C = end if self.C is None else None
        return ChannelRows(A=0, D=n, delta_bias=n + 1, B=B, C=C, count=end if C is None else C + n)


@dataclasses.dataclass(frozen=True)
class ChannelRows:
    """First row of each parameter of a channel, `None` for a B or C that varies over time; and how many rows there
    are.
    """

    A: int
    D: int
    delta_bias: int
    B: int | None
    C: int | None
    count: int


def channel_width(r: int, *arrays: jax.Array | None) -> int:
    """r as the kernels hold it: rows of every array are whole 16 bytes."""
    narrowest = min(a.dtype.itemsize for a in arrays if a is not None)
    multiple = COPY_BYTES // narrowest
    return -(-r // multiple) * multiple


def pack(a: Arguments, delta_softplus: bool) -> Operands:
    """The arguments (n <= 16) in the kernels' layout."""
    b, l, d = a.u.shape
    g, n = a.sizes.g, state_width(a.A.shape[1])
    sizes = PaddedSizes(b, l, g, channel_width(d // g, a.u, a.delta, a.z), n)
    constant = [p[0, 0] for p, is_constant in ((a.B, a.constant_B), (a.C, a.constant_C)) if is_constant]
    states = [pad(p.T.astype(jnp.float32), n, 0) for p in (a.A * LOG2_E, *constant)]
    return Operands(
        sizes,
        by_group(a.u, sizes),
        by_group(a.delta, sizes),
        None if a.z is None else by_group(a.z, sizes),
        None if a.constant_B else pad(a.B.astype(jnp.float32), n, 3),
        None if a.constant_C else pad(a.C.astype(jnp.float32), n, 3),
        by_group(jnp.concatenate([states[0], a.D[None], a.delta_bias[None], *states[1:]]), sizes),
        pack_state(a.initial_state, sizes),
        None if a.reset is None else pad(jnp.where(a.reset, -jnp.inf, 0.0).astype(jnp.float32), -(-l // 4) * 4, 1),
        delta_softplus,
    )


def pad(x: jax.Array, size: int, axis: int) -> jax.Array:
    """x with zeros after it, up to `size` along `axis`; x itself if it has that size."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def by_group(x: jax.Array, sizes: PaddedSizes) -> jax.Array:
    """(..., d) -> (..., g, r), padded."""
    return pad(x.reshape(*x.shape[:-1], sizes.g, -1), sizes.r, x.ndim)


def pack_state(h: jax.Array, sizes: PaddedSizes) -> jax.Array:
    """(b, d, n) -> (b, n, g, r), padded."""
    return by_group(pad(jnp.swapaxes(h, 1, 2), sizes.n, 1), sizes)


def unpack_state(h: jax.Array, d: int, n: int) -> jax.Array:
    """(b, n, g, r) -> (b, d, n), without the padding."""
    return jnp.swapaxes(all_channels(h, d)[:, :n], 1, 2)


def all_channels(x: jax.Array, d: int) -> jax.Array:
    """(..., g, r) -> (..., d), without the padding."""
    return x[..., : d // x.shape[-2]].reshape(*x.shape[:-2], d)
