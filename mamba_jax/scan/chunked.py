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

h, A (n, ...), where ... are the channels of a block, (c,) or (groups, c); Delta, drive = Delta * u (t, 1, ...);
y (t, ...); B, C (t, n, 1) or (t, n, groups, 1), but (1, n, ...) if constant; reset (t,) or None.
All as the recurrence takes it, so that what it keeps for the backward pass are its inputs and not reshaped copies.
"""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the channels are cut: `groups` of `channels` at a time."""

    groups: int
    channels: int
    in_turn: bool  # one block after the other, each small enough for the first-level cache; or all at once


def choose_blocks(d: int, g: int, *, widest: int = 128) -> Blocks:
    """On a CPU blocks of at most `widest` channels, in turn; elsewhere the whole width at once.

    128 channels by 16 states in float32 are 8 KiB: they stay in the first-level cache, and a step fuses into one loop.
    Measured on 2 cores at (2, 1024, 1536, 16), 2026-12-02: with gradients, blocks of 64 and of 256 channels are slower.
    """
    r = d // g
    if target_platform() != "cpu":
        return Blocks(groups=g, channels=r, in_turn=False)
    if r <= widest:
        return Blocks(groups=min(g, widest // r), channels=r, in_turn=True)
    even = -(-r // -(-r // widest))  # blocks of equal size, so that little is padded; whole vectors of 8 floats
    return Blocks(groups=1, channels=-(-even // 8) * 8, in_turn=True)


def chunked_scan(x: ScanInputs, advance: Advance, *, chunk: int, widest: int = 128) -> tuple[jax.Array, jax.Array]:
    """Run `advance` over every chunk of every block: y (b, l, d) in u's dtype, last_state (b, d, n).

    Between chunks only the state is kept; the backward pass recomputes a chunk from the state before it.
    `widest` is that of `choose_blocks`.
    """
    scan_chunks = functools.partial(_scan_chunks, advance=advance, widest=widest)
    # Widened before they are shared out: the parts of the gradients of B and C are summed wide, and rounded once.
    x = dataclasses.replace(x, B=x.B.astype(x.A.dtype), C=x.C.astype(x.A.dtype))
    l = x.u.shape[1]
    full = l - l % chunk
    if full in (0, l):
        return scan_chunks(x, chunk=min(l, chunk))
    y, h = scan_chunks(_between(x, 0, full), chunk=chunk)
    rest = dataclasses.replace(_between(x, full, l), initial_state=h)
    y_rest, h = scan_chunks(rest, chunk=l - full)
    return jnp.concatenate([y, y_rest], axis=1), h


def _between(x: ScanInputs, start: int, stop: int) -> ScanInputs:
    """The steps from `start` to `stop` of all that varies over time."""
    varying = {"u": x.u, "delta": x.delta, "z": x.z, "reset": x.reset}
    varying |= {name: m for name, m in (("B", x.B), ("C", x.C)) if not x.is_constant(m)}
    return dataclasses.replace(x, **jax.tree.map(lambda v: v[:, start:stop], varying))


def _scan_chunks(x: ScanInputs, *, advance: Advance, chunk: int, widest: int) -> tuple[jax.Array, jax.Array]:
    """`chunked_scan` for a length that is a multiple of `chunk`: the blocks of a chunk in turn, or at once.

    A chunk is cut into blocks when its turn comes: to cut the whole sequence beforehand takes as much memory again as
    the inputs and y, and took a third of the time of a forward pass at (2, 2048, 1536, 16) on 2 cores, 2026-12-02.
    """
    (b, l, d), g = x.u.shape, x.groups
    blocks = choose_blocks(d, g, widest=widest)
    rows, columns = -(-g // blocks.groups), -(-(d // g) // blocks.channels)  # blocks of groups, blocks within a group
    # Batch row b; step t of a chunk; block (i, j) of the channels; group k, channel c and state n of a block.
    size = {"b": b, "t": chunk, "i": rows, "j": columns, "k": blocks.groups, "c": blocks.channels}
    size |= {"n": x.A.shape[1], "1": 1}
    channels, one_of_a_group = ("c", "1") if blocks.groups == 1 else ("k c", "k 1")
    rearrange = functools.partial(_rearrange, size=size)

    def cut(v: jax.Array, axes: str, blocked: str) -> jax.Array:
        """v with `axes`, the channels d among them padded to whole blocks, rearranged to the axes `blocked`."""
        at = axes.split().index("d")
        v = v.reshape(*v.shape[:at], g, d // g, *v.shape[at + 1 :])
        v = _pad(_pad(v, at, rows * blocks.groups), at + 1, columns * blocks.channels)
        return rearrange(v, axes.replace("d", "ik jc"), f"{blocked} {channels}")

    def join(v: jax.Array, blocked: str, axes: str) -> jax.Array:
        """`cut` undone."""
        at = axes.split().index("d")
        v = rearrange(v, f"{blocked} {channels}", axes.replace("d", "ik jc"))
        v = lax.slice_in_dim(lax.slice_in_dim(v, 0, g, axis=at), 0, d // g, axis=at + 1)
        return v.reshape(*v.shape[:at], d, *v.shape[at + 2 :])

    varying = {"u": x.u, "delta": x.delta, "z": x.z, "reset": x.reset}
    constants = {"A": cut(x.A, "d n", "i j n")}
    for name, m in (("B", x.B), ("C", x.C)):
        if x.is_constant(m):
            constants[name] = cut(m[0, 0], "d n", "i j n")[:, :, None]
        else:
            varying[name] = m
    over_blocks = lax.map if blocks.in_turn else _at_once

    def run_chunk(h: jax.Array, chunk: dict) -> tuple[jax.Array, jax.Array]:
        """h (i, j, n, ...) and a chunk of all that varies -> the next h, and y (t, d)."""
        u, z, reset = (chunk[name] for name in ("u", "z", "reset"))
        u_wide, Delta = u.astype(x.D.dtype), chunk["delta"].astype(x.D.dtype) + x.delta_bias
        if x.delta_softplus:
            Delta = jax.nn.softplus(Delta)
        own = {"Delta": cut(Delta, "t d", "i j t"), "drive": cut(Delta * u_wide, "t d", "i j t")}
        shared = {name: _pad(chunk[name], 1, rows * blocks.groups) for name in ("B", "C") if name in chunk}
        shared = {name: rearrange(m, "t ik n", f"i t n {one_of_a_group}") for name, m in shared.items()}

        def run_row(row: tuple) -> tuple[jax.Array, jax.Array]:
            """The blocks that share their B and C."""
            h, own, shared = row

            def run_block(block: tuple) -> tuple[jax.Array, jax.Array]:
                h, own = block
                v = shared | own
                y, h = advance(h, v["Delta"][:, None], v["drive"][:, None], v["A"], v["B"], v["C"], reset)
                return h, y

            return over_blocks(jax.checkpoint(run_block, prevent_cse=False), (h, own))

        h, y = over_blocks(run_row, (h, own | constants, shared))
        return h, skip_and_gate(join(y, "i j t", "t d"), u_wide, z, x.D).astype(u.dtype)

    run_chunk = jax.checkpoint(run_chunk, prevent_cse=False)
    h = cut(x.initial_state, "b d n", "b i j n")
    if blocks.in_turn:
        h, y = _rows_in_turn(run_chunk, h, jax.tree.map(lambda v: v.reshape(-1, chunk, *v.shape[2:]), varying))
    else:
        varying = jax.tree.map(lambda v: v.reshape(b, -1, chunk, *v.shape[2:]), varying)
        h, y = jax.vmap(functools.partial(lax.scan, run_chunk))(h, varying)
    return y.reshape(b, l, d), join(h, "b i j n", "b d n")


def _at_once(run: Callable, blocks: tuple) -> tuple[jax.Array, jax.Array]:
    """`lax.map`, but all at the same time."""
    return jax.vmap(run)(blocks)


def _rows_in_turn(run_chunk: Callable, initial: jax.Array, chunks: dict) -> tuple[jax.Array, jax.Array]:
    """One loop over the chunks (b q, ...) of all rows of the batch, each row from its `initial` state (b, ...).

    Not one loop in another: XLA would copy each row out of the inputs, and its results into the outputs.
    """
    q = chunks["u"].shape[0] // initial.shape[0]

    def step(carry: tuple, x: tuple) -> tuple[tuple, jax.Array]:
        (h, last), (i, chunk) = carry, x
        h = jnp.where(i % q == 0, lax.dynamic_index_in_dim(initial, i // q, keepdims=False), h)
        h, y = run_chunk(h, chunk)
        return (h, lax.dynamic_update_index_in_dim(last, h, i // q, 0)), y

    (_, last), y = lax.scan(step, (initial[0], initial), (jnp.arange(chunks["u"].shape[0]), chunks))
    return last, y


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


def skip_and_gate(y: jax.Array, u: jax.Array, z: jax.Array | None, D: jax.Array) -> jax.Array:
    """(y + D u) silu(z), or without the gate where z is None; y and u in the dtype of D."""
    y = y + D * u
    return y if z is None else y * jax.nn.silu(z.astype(D.dtype))


def _pad(v: jax.Array, axis: int, size: int) -> jax.Array:
    """Zeros at the end of `axis` up to `size`; a channel of zeros stays at zero."""
    if v.shape[axis] == size:
        return v
    return jnp.pad(v, [(0, size - v.shape[axis] if i == axis else 0) for i in range(v.ndim)])
