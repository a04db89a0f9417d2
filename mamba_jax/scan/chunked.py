"""What the two XLA forms share: channels in blocks, time in rematerialised chunks, what surrounds the recurrence.

A form supplies only `advance`, the recurrence over one chunk of one block. All of it is plain JAX, so that every
transformation works. A block may hold several groups of channels: a B or C is broadcast to its group, never repeated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from mamba_jax.scan.inputs import ScanInputs
from pallas_kernels.device import target_platform

Advance = Callable[..., tuple[jax.Array, jax.Array]]
"""advance(h, Delta, drive, A, B, C, reset) -> (y, h), over one chunk of t steps of one block:

    h_t = exp(Delta_t A) * h_{t-1} + B_t drive_t,   y_t = sum_n C_t[n] h_t[n]

h, A (n, c); Delta, drive = Delta * u, and y (t, c); B, C (t, n k) or, if constant, (1, n, c), both for
`times`; reset (t,) or None.
"""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the channels are cut: `groups` of `channels` at a time."""

    groups: int
    channels: int
    in_turn: bool  # one block after the other, each small enough for the first-level cache; or all at once


def choose_blocks(d: int, g: int) -> Blocks:
    """On a CPU blocks of at most 128 channels, in turn; elsewhere the whole width at once.

    128 channels by 16 states in float32 are 8 KiB: they stay in the first-level cache, and a step fuses into one loop.
    Measured on 2 cores at (2, 1024, 1536, 16), 2026-12-02: with gradients, blocks of 64 and of 256 channels are slower.
    """
    r = d // g
    if target_platform() != "cpu":
        return Blocks(groups=g, channels=r, in_turn=False)
    if r <= 128:
        return Blocks(groups=min(g, 128 // r), channels=r, in_turn=True)
    even = -(-r // -(-r // 128))  # blocks of equal size, so that little is padded; whole vectors of 8 floats
    return Blocks(groups=1, channels=-(-even // 8) * 8, in_turn=True)


def chunked_scan(x: ScanInputs, advance: Advance, *, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Run `advance` over every chunk of every block: y (b, l, d) in u's dtype, last_state (b, d, n).

    Between chunks only the state is kept; the backward pass recomputes a chunk from the state before it.
    """
    # Widened before they are shared out: the parts of the gradients of B and C are summed wide, and rounded once.
    x = dataclasses.replace(x, B=x.B.astype(x.A.dtype), C=x.C.astype(x.A.dtype))
    l = x.u.shape[1]
    full = l - l % chunk
    if full in (0, l):
        return _scan_chunks(x, advance, chunk=min(l, chunk))
    y, h = _scan_chunks(_between(x, 0, full), advance, chunk=chunk)
    rest = dataclasses.replace(_between(x, full, l), initial_state=h)
    y_rest, h = _scan_chunks(rest, advance, chunk=l - full)
    return jnp.concatenate([y, y_rest], axis=1), h


def _between(x: ScanInputs, start: int, stop: int) -> ScanInputs:
    """The steps from `start` to `stop` of all that varies over time."""
    varying = {"u": x.u, "delta": x.delta, "z": x.z, "reset": x.reset}
    varying |= {name: m for name, m in (("B", x.B), ("C", x.C)) if not x.is_constant(m)}
    return dataclasses.replace(x, **jax.tree.map(lambda v: v[:, start:stop], varying))


def _scan_chunks(x: ScanInputs, advance: Advance, *, chunk: int) -> tuple[jax.Array, jax.Array]:
    """`chunked_scan` for a length that is a multiple of `chunk`: blocks in turn or at once, in each its chunks."""
    (b, l, d), g = x.u.shape, x.groups
    blocks = choose_blocks(d, g)
    rows, columns = -(-g // blocks.groups), -(-(d // g) // blocks.channels)  # blocks of groups, blocks within a group
    # Batch row b and block (i, j) of it; chunk q and step t of it; group k, channel c and state n of a block.
    size = {"b": b, "i": rows, "j": columns, "q": l // chunk, "t": chunk}
    size |= {"k": blocks.groups, "c": blocks.channels, "n": x.A.shape[1]}
    rearrange = functools.partial(_rearrange, size=size)

    def cut(v: jax.Array, axes: str, blocked: str) -> jax.Array:
        """v with `axes`, the channels d among them padded to whole blocks, rearranged to the axes `blocked`."""
        at = axes.split().index("d")
        v = v.reshape(*v.shape[:at], g, d // g, *v.shape[at + 1 :])
        v = _pad(_pad(v, at, rows * blocks.groups), at + 1, columns * blocks.channels)
        v = rearrange(v, axes.replace("d", "ik jc"), blocked)
        return _copied_once(v) if blocks.in_turn else v

    def join(v: jax.Array, blocked: str, axes: str) -> jax.Array:
        """`cut` undone."""
        at = axes.split().index("d")
        v = rearrange(v, blocked, axes.replace("d", "ik jc"))
        v = lax.slice_in_dim(lax.slice_in_dim(v, 0, g, axis=at), 0, d // g, axis=at + 1)
        return v.reshape(*v.shape[:at], d, *v.shape[at + 2 :])

    constants = {"A": cut(x.A, "d n", "bij n kc")}
    constants |= {"D": cut(x.D, "d", "bij kc"), "delta_bias": cut(x.delta_bias, "d", "bij kc")}
    varying = jax.tree.map(lambda v: cut(v, "b qt d", "bij q t kc"), {"u": x.u, "delta": x.delta, "z": x.z})
    varying["reset"] = None if x.reset is None else rearrange(x.reset, "b qt", "bij q t")
    for name, m in (("B", x.B), ("C", x.C)):
        if x.is_constant(m):
            constants[name] = cut(m[0, 0], "d n", "bij n kc")[:, None]
        else:  # repeated for each block of a group: an n-th of 128 of u's size
            varying[name] = rearrange(_pad(m, 2, rows * blocks.groups), "b qt ik n", "bij q t nk")
    h = cut(x.initial_state, "b d n", "bij n kc")

    def run_block(block):
        varying, constants, h = block
        run_chunk = functools.partial(_run_chunk, advance, x.delta_softplus, constants)
        return lax.scan(jax.checkpoint(run_chunk, prevent_cse=False), h, varying)

    over_blocks = functools.partial(lax.map, run_block) if blocks.in_turn else jax.vmap(run_block)
    h, y = over_blocks((varying, constants, h))
    return join(y, "bij q t kc", "b qt d"), join(h, "bij n kc", "b d n")


def _rearrange(v: jax.Array, before: str, after: str, *, size: Mapping[str, int]) -> jax.Array:
    """v with the axes `before` as one with the axes `after`: "bij" is one axis, made of b, i and j in that order.

    Along names that are new in `after` v is repeated. Axes of one take no part: XLA for CPUs gives them odd places in
    memory, and then copies everything: a third of the time of a forward pass.
    """
    old, new = ([name for name in axes.replace(" ", "") if size[name] != 1] for axes in (before, after))
    v = v.reshape([size[name] for name in old])
    v = v.transpose([old.index(name) for name in new if name in old])
    v = lax.broadcast_in_dim(v, [size[name] for name in new], [new.index(name) for name in new if name in old])
    return v.reshape([math.prod(size[name] for name in axis) for axis in after.split()])


def _copied_once(v: jax.Array) -> jax.Array:
    """v, with nothing left to be done to its order in memory.

    XLA for CPUs copies a sequence of one row twice: as it is, and again to put its axes in order for the loop. Where
    the first two axes are made one for a moment, the first copy must put them in order. Jax 0.10.2 to 0.12.0.1.
    """
    if v.ndim < 3:
        return v
    return lax.optimization_barrier(v.reshape(-1, *v.shape[2:])).reshape(v.shape)


def times(m: jax.Array, v: jax.Array, n: int) -> jax.Array:
    """B or C times v, (..., n, c): m (..., n k) of k groups, each for c / k neighbours, or (..., n, c) if constant.

    v is (..., n, c) or (..., 1, c). m is not broadcast by itself, or its broadcast would be kept for the backward pass.
    """
    if m.ndim == v.ndim:
        return m * v
    k = m.shape[-1] // n
    if k == 1:  # apart, as an axis of one is laid out oddly here too
        return m[..., None] * v
    product = m.reshape(*m.shape[:-1], n, k, 1) * v.reshape(*v.shape[:-1], k, v.shape[-1] // k)
    return product.reshape(*product.shape[:-2], v.shape[-1])


def _run_chunk(advance: Advance, delta_softplus: bool, constants: dict, h: jax.Array, varying: dict):
    """Delta, the recurrence, the skip and the gate for one chunk; arithmetic in the dtype of D, the result in u's."""
    x = constants | varying
    u, delta, z, B, C, D = (x[name] for name in ("u", "delta", "z", "B", "C", "D"))
    wide = D.dtype
    u_wide, Delta = u.astype(wide), delta.astype(wide) + x["delta_bias"]
    if delta_softplus:
        Delta = jax.nn.softplus(Delta)
    y, h = advance(h, Delta, Delta * u_wide, x["A"], B, C, x["reset"])
    return h, skip_and_gate(y, u_wide, z, D).astype(u.dtype)


def skip_and_gate(y: jax.Array, u: jax.Array, z: jax.Array | None, D: jax.Array) -> jax.Array:
    """(y + D u) silu(z), or without the gate where z is None; y and u in the dtype of D."""
    y = y + D * u
    return y if z is None else y * jax.nn.silu(z.astype(D.dtype))


def _pad(v: jax.Array, axis: int, size: int) -> jax.Array:
    """Zeros at the end of `axis` up to `size`; a channel of zeros stays at zero."""
    if v.shape[axis] == size:
        return v
    return jnp.pad(v, [(0, size - v.shape[axis] if i == axis else 0) for i in range(v.ndim)])
