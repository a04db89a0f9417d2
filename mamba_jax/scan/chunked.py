"""What the two XLA forms share: channels in blocks, time in rematerialised chunks, what surrounds the recurrence.

A form supplies only `advance`, the recurrence over one chunk of one block. All of it is plain JAX, so that every
transformation works. Within a block the channels are k groups of c: a B shared by a group is broadcast, never repeated.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jax import lax

from mamba_jax.scan.inputs import ScanInputs
from pallas_kernels.device import target_platform

Advance = Callable[..., tuple[jax.Array, jax.Array]]
"""advance(h, Delta, drive, A, B, C, reset) -> (y, h), over one chunk of t steps of one block:

    h_t = exp(Delta_t A) * h_{t-1} + B_t drive_t,   y_t = sum_n C_t[n] h_t[n]

h, A (n, k, c); Delta, drive = Delta * u, and y (t, k, c); B, C (t, n, k, 1), or (1, n, k, c) if constant;
reset (t,) or None.
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
    Measured on 2 cores with AVX2 at (2, 1024, 1536, 16), 2026-12-01: blocks of 64 and of 256 channels are slower.
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
    count = {"i": rows, "j": columns}

    def cut(v: jax.Array, pattern: str) -> jax.Array:
        """Cut the axes l and d of `pattern` into chunks and blocks, the blocks (b i j) in front."""
        axis = pattern.split(" ->")[0].split().index("d")
        v = v.reshape(*v.shape[:axis], g, d // g, *v.shape[axis + 1 :])
        v = _pad(_pad(v, axis, rows * blocks.groups), axis + 1, columns * blocks.channels)
        pattern = pattern.replace(" d ", " (i k) (j c) ").replace("b l", "b (q t)")
        return rearrange(v, pattern, **count, **({"t": chunk} if " t " in pattern else {}))

    def constant(v: jax.Array, pattern: str) -> jax.Array:
        return cut(jnp.broadcast_to(v, (b, *v.shape)), pattern)

    constants = {
        "A": constant(x.A, "b d n -> (b i j) n k c"),
        "D": constant(x.D, "b d -> (b i j) k c"),
        "delta_bias": constant(x.delta_bias, "b d -> (b i j) k c"),
    }
    varying = {"u": x.u, "delta": x.delta, "z": x.z}
    varying = jax.tree.map(lambda v: cut(v, "b l d -> (b i j) q t k c"), varying)
    varying["reset"] = None if x.reset is None else repeat(x.reset, "b (q t) -> (b i j) q t", t=chunk, **count)
    for name, m in (("B", x.B), ("C", x.C)):
        if x.is_constant(m):
            constants[name] = constant(m[0, 0], "b d n -> (b i j) 1 n k c")
        else:  # repeated for each block of a group: an n-th of 128 of u's size
            m = _pad(m, 2, rows * blocks.groups)
            varying[name] = repeat(m, "b (q t) (i k) n -> (b i j) q t n k 1", t=chunk, **count)
    h = cut(x.initial_state, "b d n -> (b i j) n k c")

    def run_block(block):
        varying, constants, h = block
        run_chunk = functools.partial(_run_chunk, advance, x.delta_softplus, constants)
        return lax.scan(jax.checkpoint(run_chunk, prevent_cse=False), h, varying)

    over_blocks = functools.partial(lax.map, run_block) if blocks.in_turn else jax.vmap(run_block)
    h, y = over_blocks((varying, constants, h))
    y = rearrange(y, "(b i j) q t k c -> b (q t) (i k) (j c)", **count)[:, :, :g, : d // g]
    h = rearrange(h, "(b i j) n k c -> b (i k) (j c) n", **count)[:, :g, : d // g]
    return y.reshape(b, l, d), h.reshape(x.initial_state.shape)


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
