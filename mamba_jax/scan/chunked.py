"""What the two XLA forms share: channels in blocks, time in rematerialised chunks, and the arithmetic around the recurrence.

A form supplies only `advance`, the recurrence over one chunk of one block. Everything is plain JAX, so every transformation works.
Within a block the channels are k groups of c, so that a B shared by a group is broadcast, never repeated.
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

h, A (n, k, c); Delta, drive = Delta * u, and y (t, k, c); B, C (t, n, k, 1), or (1, n, k, c) if constant; reset (t,) or None.
"""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the work is cut: `groups` of `channels` at a time, and `chunk` steps between the states that are kept."""

    groups: int
    channels: int
    chunk: int
    in_turn: bool  # one block after the other, each small enough for the first-level cache; or all at once


def choose_blocks(d: int, g: int, *, chunk: int) -> Blocks:
    """On a CPU blocks of at most 128 channels, in turn; elsewhere the whole width at once.

    128 channels by 16 states in float32 are 8 KiB: they stay in the first-level cache, and a step fuses into one loop.
    Measured on 2 cores with AVX2 at (2, 1024, 1536, 16): blocks of 64 and of 256 channels are slower.
    """
    r = d // g
    if target_platform() != "cpu":
        return Blocks(groups=g, channels=r, chunk=chunk, in_turn=False)
    if r <= 128:
        return Blocks(groups=min(g, 128 // r), channels=r, chunk=chunk, in_turn=True)
    even = -(-r // -(-r // 128))  # blocks of equal size, so that little is padded; whole vectors of 8 floats
    return Blocks(groups=1, channels=-(-even // 8) * 8, chunk=chunk, in_turn=True)


def chunked_scan(x: ScanInputs, advance: Advance, *, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Run `advance` over every chunk of every block: y (b, l, d) in u's dtype, last_state (b, d, n).

    Between chunks only the state is kept; the backward pass recomputes a chunk from the state before it.
    """
    (b, l, d), g = x.u.shape, x.groups
    blocks = choose_blocks(d, g, chunk=chunk)
    rows, columns = -(-g // blocks.groups), -(-(d // g) // blocks.channels)  # blocks of groups, blocks within a group
    each = lax.map if blocks.in_turn else lambda f, xs: jax.vmap(f)(xs)

    def cut(v: jax.Array, pattern: str) -> jax.Array:
        """Channels, in `pattern` the axis d, cut into blocks: `pattern` says where the block's (k, c) go."""
        axis = pattern.split("->")[0].split().index("d")
        v = v.reshape(*v.shape[:axis], g, d // g, *v.shape[axis + 1 :])
        v = _pad(_pad(v, axis, rows * blocks.groups), axis + 1, columns * blocks.channels)
        return rearrange(v, pattern.replace(" d ", " (i k) (j c) "), i=rows, j=columns)

    def constant(v: jax.Array, pattern: str) -> jax.Array:
        return cut(jnp.broadcast_to(v, (b, *v.shape)), pattern)

    own = {  # what differs from block to block
        "u": cut(x.u, "b l d -> (b i) j l k c"),
        "delta": cut(x.delta, "b l d -> (b i) j l k c"),
        "A": constant(x.A, "b d n -> (b i) j n k c"),
        "D": constant(x.D, "b d -> (b i) j k c"),
        "delta_bias": constant(x.delta_bias, "b d -> (b i) j k c"),
        "h": cut(x.initial_state, "b d n -> (b i) j n k c"),
    }
    shared = {}  # what the blocks of a row share
    if x.z is not None:
        own["z"] = cut(x.z, "b l d -> (b i) j l k c")
    if x.reset is not None:
        shared["reset"] = repeat(x.reset, "b l -> (b i) l", i=rows)
    for name, m in (("B", x.B), ("C", x.C)):
        if m.shape[:3] == (1, 1, d):
            own[name] = constant(m[0, 0], "b d n -> (b i) j 1 n k c")
        else:
            shared[name] = rearrange(_pad(m, 2, rows * blocks.groups), "b l (i k) n -> (b i) l n k 1", i=rows)

    run_block = functools.partial(_run_block, advance, blocks.chunk, x.delta_softplus)
    y, h = each(lambda row: each(lambda block: run_block(**row[0], **block), row[1]), (shared, own))
    y = rearrange(y, "(b i) j l k c -> b l (i k) (j c)", b=b)[:, :, :g, : d // g]
    h = rearrange(h, "(b i) j n k c -> b (i k) (j c) n", b=b)[:, :g, : d // g]
    return y.reshape(b, l, d), h.reshape(x.initial_state.shape)


def _run_block(
    advance: Advance, chunk: int, delta_softplus: bool, *, u, delta, A, B, C, D, delta_bias, h, z=None, reset=None
) -> tuple[jax.Array, jax.Array]:
    """One block over its whole length: a scan over the full chunks, then the steps that are left over."""
    l = u.shape[0]
    varying = {"u": u, "delta": delta, "z": z, "reset": reset}
    constant = {"A": A, "D": D, "delta_bias": delta_bias}
    for name, m in (("B", B), ("C", C)):
        (varying if m.shape[0] == l else constant)[name] = m

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(h: jax.Array, part: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, h = _run_chunk(advance, delta_softplus, h, **part, **constant)
        return h, y

    full = l - l % chunk
    y = []
    if full:
        parts = jax.tree.map(lambda v: v[:full].reshape(-1, chunk, *v.shape[1:]), varying)
        h, y_full = lax.scan(body, h, parts)
        y.append(y_full.reshape(full, *u.shape[1:]))
    if full < l:
        h, y_rest = body(h, jax.tree.map(lambda v: v[full:], varying))
        y.append(y_rest)
    return jnp.concatenate(y) if len(y) > 1 else y[0], h


def _run_chunk(advance: Advance, delta_softplus: bool, h, *, u, delta, z, reset, A, B, C, D, delta_bias):
    """Delta, the recurrence, the skip and the gate for one chunk; arithmetic in the dtype of D, the result in u's."""
    wide = D.dtype
    u_wide, Delta = u.astype(wide), delta.astype(wide) + delta_bias
    if delta_softplus:
        Delta = jax.nn.softplus(Delta)
    B, C = (m.astype(jnp.promote_types(m.dtype, wide)) for m in (B, C))
    y, h = advance(h, Delta, Delta * u_wide, A, B, C, reset)
    y = y + D * u_wide
    if z is not None:
        y = y * jax.nn.silu(z.astype(wide))
    return y.astype(u.dtype), h


def _pad(v: jax.Array, axis: int, size: int) -> jax.Array:
    """Zeros at the end of `axis` up to `size`; a channel of zeros stays at zero."""
    if v.shape[axis] == size:
        return v
    return jnp.pad(v, [(0, size - v.shape[axis] if i == axis else 0) for i in range(v.ndim)])
