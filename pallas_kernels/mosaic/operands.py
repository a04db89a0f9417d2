"""The scan's inputs as the copy engine takes them: channels split into groups, widths that are whole 16 bytes, small arrays in float32.

An array whose width already fits is only reshaped. B, C, A and the states are small beside u and delta, so casting and padding those is cheap.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic.arithmetic import LOG2_E

CHANNELS = 128  # of a program: one warpgroup, a thread each
STATES = 16  # at most, of a program: more of them, with A and the sums, do not fit the registers
COPY_BYTES = 16  # strides of what the copy engine moves are multiples of this


@dataclasses.dataclass(frozen=True)
class Sizes:
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

    sizes: Sizes
    u: jax.Array  # (b, l, g, r)
    delta: jax.Array  # (b, l, g, r)
    z: jax.Array | None  # (b, l, g, r)
    B: jax.Array | None  # (b, l, g, n) float32
    C: jax.Array | None  # (b, l, g, n) float32
    channels: jax.Array  # (rows, g, r) float32: n rows of A log2(e), then D, delta_bias, and n rows each of a constant B and C
    initial_state: jax.Array  # (b, n, g, r) float32
    reset: jax.Array | None  # (b, l padded) int32
    softplus: bool

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
    """First row of each parameter of a channel, `None` for a B or C that varies over time; and how many rows there are."""

    A: int
    D: int
    delta_bias: int
    B: int | None
    C: int | None
    count: int


def state_width(n: int) -> int:
    """n as the kernels hold it: 4, 8 or 16, so that rows of states are whole 16 bytes and a whole number of steps fills a tile of 64 rows."""
    return next(width for width in (4, 8, STATES) if n <= width)


def channel_width(r: int, *arrays: jax.Array | None) -> int:
    """r as the kernels hold it: rows of every array are whole 16 bytes."""
    narrowest = min(a.dtype.itemsize for a in arrays if a is not None)
    multiple = COPY_BYTES // narrowest
    return -(-r // multiple) * multiple


def groups(B: jax.Array, C: jax.Array, constant_B: bool, constant_C: bool) -> int:
    """Number of groups of channels that share a B or C."""
    if not constant_B:
        return B.shape[2]
    return 1 if constant_C else C.shape[2]


def is_constant(projection: jax.Array, u: jax.Array) -> bool:
    """Whether B or C is the same at all times: (1, 1, d, n) beside (b, l, g, n). Of equal shapes (b = l = 1, g = d) both readings mean the same."""
    return projection.shape[:3] == (1, 1, u.shape[2])


def pack(u, delta, A, B, C, D, z, delta_bias, initial_state, reset, delta_softplus: bool) -> Operands:
    """Canonical arguments (n <= 16) in the kernels' layout."""
    constant_B, constant_C = is_constant(B, u), is_constant(C, u)
    b, l, d = u.shape
    g, n = groups(B, C, constant_B, constant_C), A.shape[1]
    sizes = Sizes(b, l, g, channel_width(d // g, u, delta, z), state_width(n))
    columns = [A.T * LOG2_E, D[None], delta_bias[None]]
    columns[0] = pad(columns[0], sizes.n, 0)
    columns += [pad(p[0, 0].T, sizes.n, 0) for p, constant in ((B, constant_B), (C, constant_C)) if constant]
    return Operands(
        sizes,
        sequence(u, sizes),
        sequence(delta, sizes),
        None if z is None else sequence(z, sizes),
        None if constant_B else pad(B.astype(jnp.float32), sizes.n, 3),
        None if constant_C else pad(C.astype(jnp.float32), sizes.n, 3),
        by_group(jnp.concatenate([c.astype(jnp.float32) for c in columns]), sizes),
        state(initial_state, sizes),
        None if reset is None else pad(reset.astype(jnp.int32), -(-l // 4) * 4, 1),
        delta_softplus,
    )


def pad(x: jax.Array, size: int, axis: int) -> jax.Array:
    """x with zeros after it, up to `size` along `axis`; x itself if it has that size."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def by_group(x: jax.Array, sizes: Sizes) -> jax.Array:
    """(..., d) -> (..., g, r), padded."""
    return pad(x.reshape(*x.shape[:-1], sizes.g, -1), sizes.r, x.ndim)


def sequence(x: jax.Array, sizes: Sizes) -> jax.Array:
    """(b, l, d) -> (b, l, g, r), padded."""
    return by_group(x, sizes)


def state(h: jax.Array, sizes: Sizes) -> jax.Array:
    """(b, d, n) -> (b, n, g, r) float32, padded."""
    return by_group(pad(jnp.swapaxes(h, 1, 2).astype(jnp.float32), sizes.n, 1), sizes)


def channels_last(x: jax.Array, d: int) -> jax.Array:
    """(..., g, r) -> (..., d), without the padding."""
    return x[..., : d // x.shape[-2]].reshape(*x.shape[:-2], d)


def state_out(h: jax.Array, d: int, n: int) -> jax.Array:
    """(b, n, g, r) -> (b, d, n), without the padding."""
    return jnp.swapaxes(channels_last(h, d)[:, :n], 1, 2)
