"""The forward kernel: y, the last state and the states between chunks."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import arithmetic
from pallas_kernels.mosaic.launch import Pieces, copy_in, launch, place, programs
from pallas_kernels.mosaic.operands import CHANNELS, Operands

F32 = jnp.float32
UNROLL = 4


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int
    stages: int
    chunk: int


def run(x: Operands, initial_state, config: Config, pieces: Pieces, out_dtype, keep_states: bool):
    """initial_state (b, pieces, n, g, r). Returns y (b, l, g, r), last (b, pieces, n, g, r), kept (b, chunks, n, g, r) or None."""
    s, tile, stages, chunk = x.sizes, config.tile, config.stages, config.chunk
    rows = x.rows
    varying = [k for k in ("B", "C") if getattr(x, k) is not None]
    sequences = [k for k in ("u", "delta", "z") if getattr(x, k) is not None]
    SM = plgpu.SMEM
    shape = jax.ShapeDtypeStruct
    single = pieces.count == 1

    def body(m):
        at = place(s, pieces)
        tiles = pl.cdiv(at.steps, tile)
        copy_in(
            [
                (m.channels.at[:, at.group, at.channels], m.channels_s),
                (m.initial_state.at[at.row, at.piece, :, at.group, at.channels], m.state_s),
            ],
            m.first,
        )

        def issue(i):
            slot = lax.rem(i, stages)
            steps = pl.ds(at.start + i * tile, tile)
            copies = [(getattr(m, k).at[at.row, steps, at.group, at.channels], getattr(m, k + "_s").at[slot]) for k in sequences]
            copies += [(getattr(m, k).at[at.row, steps, at.group, :], getattr(m, k + "_s").at[slot]) for k in varying]
            if m.reset is not None:
                copies.append((m.reset.at[at.row, steps], m.reset_s.at[slot, pl.ds(0, tile)]))
            copy_in(copies, m.full.at[slot])

        for i in range(stages - 1):
            if single and i < pl.cdiv(s.l, tile):
                issue(jnp.int32(i))
            elif not single:
                pl.when(i < tiles)(lambda i=i: issue(jnp.int32(i)))
        plgpu.barrier_wait(m.first)
        A = [m.channels_s[rows.A + n, :] for n in range(s.n)]
        D, bias = m.channels_s[rows.D, :], m.channels_s[rows.delta_bias, :]
        fixed_B = None if rows.B is None else [m.channels_s[rows.B + n, :] for n in range(s.n)]
        fixed_C = None if rows.C is None else [m.channels_s[rows.C + n, :] for n in range(s.n)]
        h0 = tuple(m.state_s[n, :] for n in range(s.n))
        if keep_states:
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(m.state_s, m.kept.at[at.row, at.start // chunk, :, at.group, at.channels])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def one_tile(i, hs):
            slot = lax.rem(i, stages)
            pl.when(i + (stages - 1) < tiles)(lambda: issue(i + (stages - 1)))
            plgpu.barrier_wait(m.full.at[slot])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            out = lax.rem(i, 2)

            def step(t, hs):
                Bs = fixed_B or [m.B_s[slot, t, n] for n in range(s.n)]
                Cs = fixed_C or [m.C_s[slot, t, n] for n in range(s.n)]
                u = m.u_s[slot, t, :].astype(F32)
                Delta = m.delta_s[slot, t, :].astype(F32) + bias
                if x.softplus:
                    Delta = arithmetic.softplus(Delta, x.delta.dtype)
                if m.reset is not None:
                    hs = lax.cond(m.reset_s[slot, t] != 0, lambda h: tuple(v * 0.0 for v in h), lambda h: h, hs)
                Du = Delta * u
                y = [D * u, None]
                new = []
                for n in range(s.n):
                    h = jnp.exp2(Delta * A[n]) * hs[n] + Bs[n] * Du
                    new.append(h)
                    k = n % 2
                    y[k] = Cs[n] * h if y[k] is None else y[k] + Cs[n] * h
                y = y[0] + y[1]
                if m.z is not None:
                    z = m.z_s[slot, t, :].astype(F32)
                    y = y * arithmetic.silu(z)
                m.y_s[out, t, :] = y.astype(m.y_s.dtype)
                return tuple(new)

            steps = jnp.minimum(at.steps - i * tile, tile) if not single or s.l % tile else tile
            unroll = math.gcd(s.l, UNROLL)

            def turn(j, hs):
                for k in range(unroll):
                    hs = step(j * unroll + k, hs)
                return hs

            hs = lax.fori_loop(0, steps // unroll, turn, hs)
            if keep_states:
                ends = lax.rem((i + 1) * tile, chunk) == 0
                more = jnp.logical_and(ends, i + 1 < tiles)

                @pl.when(more)
                def _():
                    for n in range(s.n):
                        m.state_s[n, :] = hs[n]

                plgpu.commit_smem()

                @pl.when(more)
                def _():
                    c = (at.start + (i + 1) * tile) // chunk
                    plgpu.copy_smem_to_gmem(m.state_s, m.kept.at[at.row, c, :, at.group, at.channels])
            else:
                plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(m.y_s.at[out], m.y.at[at.row, pl.ds(at.start + i * tile, tile), at.group, at.channels])
            return hs

        hs = lax.fori_loop(0, tiles, one_tile, h0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for n in range(s.n):
            m.state_s[n, :] = hs[n]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(m.state_s, m.last.at[at.row, at.piece, :, at.group, at.channels])
        plgpu.wait_smem_to_gmem(0)

    steps = {k: SM((stages, tile, CHANNELS), getattr(x, k).dtype) for k in sequences}
    proj = {k: SM((stages, tile, s.n), F32) for k in varying}
    scratch = {
        **{k + "_s": v for k, v in {**steps, **proj}.items()},
        "reset_s": None if x.reset is None else SM((stages, max(tile, 32)), jnp.int32),
        "channels_s": SM((x.channels.shape[0], CHANNELS), F32),
        "state_s": SM((s.n, CHANNELS), F32),
        "y_s": SM((2, tile, CHANNELS), out_dtype),
        "first": plgpu.Barrier(num_arrivals=2),
        "full": plgpu.Barrier(num_arrivals=len(sequences) + len(varying) + (x.reset is not None), num_barriers=stages),
    }
    inputs = {k: getattr(x, k) for k in ("u", "delta", "z", "B", "C", "channels")} | {"initial_state": initial_state, "reset": x.reset}
    chunks = -(-s.l // chunk)
    outputs = {
        "y": shape((s.b, s.l, s.g, s.r), out_dtype),
        "last": shape((s.b, pieces.count, s.n, s.g, s.r), F32),
        "kept": shape((s.b, chunks, s.n, s.g, s.r), F32) if keep_states else None,
    }
    return launch(body, "selective_scan_forward", programs(s, pieces), inputs, outputs, scratch)
