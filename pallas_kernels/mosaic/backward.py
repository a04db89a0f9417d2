"""The backward kernel."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import arithmetic
from pallas_kernels.mosaic.launch import Pieces, copy_in, launch, place, programs, zero_row
from pallas_kernels.mosaic.operands import CHANNELS, Operands

F32 = jnp.float32
ROWS = 64  # of a tile of products
PADDING = 16
UNROLL = 4


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int
    stages: int


def product_layout(n: int):
    """(64 / n, n, 128): a warp owns 16 rows; a lane takes 4 neighbouring channels of each 16, a row of each 8."""
    if n < 8:
        return plgpu.Layout.TILED(plgpu.Tiling(((8, 4, 16), (2, 4, 4))), (-6,), (-3, -2, -4), -1)
    return plgpu.Layout.TILED(plgpu.Tiling(((4, 8, 16), (8, 4))), (-5,), (-2, -3), -1)


def run(x: Operands, kept, dy, dlast, config: Config, pieces: Pieces, out_dtypes):
    s, tile, stages = x.sizes, config.tile, config.stages
    N, rows = s.n, x.rows
    sub = ROWS // N
    nsub = tile // sub
    varying = [k for k in ("B", "C") if getattr(x, k) is not None]
    sequences = [k for k in ("u", "delta", "z") if getattr(x, k) is not None] + ["dy"]
    dtypes = {"u": x.u.dtype, "delta": x.delta.dtype, "dy": dy.dtype} | ({"z": x.z.dtype} if x.z is not None else {})
    SM, shape = plgpu.SMEM, jax.ShapeDtypeStruct
    in_place = {"dyg": "dy", "q": "z"} | ({"rate": "delta"} if x.softplus else {})
    kinds = ["Delta", "Du"] + [k for k, source in in_place.items() if dtypes.get(source, F32) != F32]
    single = pieces.count == 1
    unroll = math.gcd(s.l, UNROLL)

    def body(m):
        at = place(s, pieces)
        tiles = pl.cdiv(at.steps, tile)
        copy_in(
            [
                (m.channels.at[:, at.group, at.channels], m.work_s.at[pl.ds(0, rows.count)]),
                (m.dlast.at[at.row, at.piece, :, at.group, at.channels], m.states_s.at[0]),
            ],
            m.first,
        )

        def issue(k):
            i, slot = tiles - 1 - k, lax.rem(k, stages)
            steps = pl.ds(at.start + i * tile, tile)
            copies = [(getattr(m, q).at[at.row, steps, at.group, at.channels], getattr(m, q + "_s").at[slot]) for q in sequences]
            copies += [(getattr(m, q).at[at.row, steps, at.group, :], getattr(m, q + "_s").at[slot]) for q in varying]
            copies.append((m.kept.at[at.row, at.start // tile + i, :, at.group, at.channels], m.states_s.at[nsub - 1 + slot]))
            if m.reset is not None:
                copies.append((m.reset.at[at.row, steps], m.reset_s.at[slot, pl.ds(0, tile)]))
            copy_in(copies, m.full.at[slot])

        for k in range(stages - 1):
            if single and k < pl.cdiv(s.l, tile):
                issue(jnp.int32(k))
            elif not single:
                pl.when(k < tiles)(lambda k=k: issue(jnp.int32(k)))
        plgpu.barrier_wait(m.first)
        A = [m.work_s[rows.A + n, :] for n in range(N)]
        D, bias = m.work_s[rows.D, :], m.work_s[rows.delta_bias, :]
        fixed_B = None if rows.B is None else [m.work_s[rows.B + n, :] for n in range(N)]
        fixed_C = None if rows.C is None else [m.work_s[rows.C + n, :] for n in range(N)]
        gs = tuple(m.states_s[0, n, :] for n in range(N))

        def one_tile(k, carry):
            i, slot = tiles - 1 - k, lax.rem(k, stages)
            here = lambda name: getattr(m, name + "_s").at[slot]
            derived = lambda name: m.work_s.at[pl.ds(tile * kinds.index(name), tile)] if name in kinds else here(in_place[name])
            Delta_s, Du_s, Dg_s = derived("Delta"), derived("Du"), derived("dyg")
            q_s = None if m.z is None else derived("q")
            rate_s = derived("rate") if x.softplus else None
            plgpu.barrier_wait(m.full.at[slot])

            def prepare(t):
                v = here("delta")[t, :].astype(F32) + bias
                u = here("u")[t, :].astype(F32)
                dyt = here("dy")[t, :].astype(F32)
                if x.softplus:
                    Delta = arithmetic.softplus(v, x.delta.dtype)
                    rate_s[t, :] = jnp.exp2((v - Delta) * arithmetic.LOG2_E)
                else:
                    Delta = v
                if m.z is not None:
                    z = here("z")[t, :].astype(F32)
                    gate = arithmetic.sigmoid_by_log(z)
                    p = dyt * gate
                    q_s[t, :] = p * ((1.0 + z) - z * gate)
                    dyt = p * z
                Delta_s[t, :] = Delta
                Du_s[t, :] = Delta * u
                Dg_s[t, :] = dyt

            def blank(t, c):
                zero = zero_row()
                for ref in (Delta_s, Du_s, Dg_s, q_s, rate_s):
                    if ref is not None:
                        ref[t, :] = zero
                return c

            def prepare_turn(j, c):
                for r in range(unroll):
                    prepare(j * unroll + r)
                return c

            if single and s.l % tile == 0:
                lax.fori_loop(0, tile // unroll, prepare_turn, 0)
            else:
                steps = jnp.minimum(at.steps - i * tile, tile)
                lax.fori_loop(0, steps // unroll, prepare_turn, 0)
                lax.fori_loop(steps, tile, blank, 0)

            def enter(t, hs):
                if m.reset is None:
                    return hs
                return lax.cond(m.reset_s[slot, t] != 0, lambda h: tuple(v * 0.0 for v in h), lambda h: h, hs)

            def forward(t, hs):
                Bs = fixed_B or [m.B_s[slot, t, n] for n in range(N)]
                Delta, Du = Delta_s[t, :], Du_s[t, :]
                return tuple(jnp.exp2(Delta * A[n]) * hs[n] + Bs[n] * Du for n in range(N))

            def level1(j, hs):
                for r in range(sub):
                    t = j * sub + r
                    hs = forward(t, enter(t, hs))
                for n in range(N):
                    m.states_s[j, n, :] = hs[n]
                return hs

            if nsub > 1:
                lax.fori_loop(0, nsub - 1, level1, tuple(m.states_s[nsub - 1 + slot, n, :] for n in range(N)))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()
            pl.when(k + (stages - 1) < tiles)(lambda: issue(k + (stages - 1)))

            def level2(q, carry):
                gs, sums = carry
                gs, sums = list(gs), [list(v) for v in sums]
                dA, dD, dbias, dB, dC = sums
                j = nsub - 1 - q
                origin = jnp.where(j == 0, nsub - 1 + slot, j - 1)
                first = j * sub
                start = lambda: tuple(m.states_s[origin, n, :] for n in range(N))
                before, after = [enter(first, start())], []
                for r in range(sub):
                    hs = forward(first + r, before[r])
                    after.append(hs)
                    if r + 1 < sub:
                        before.append(enter(first + r + 1, hs))
                    if m.h_s is not None:
                        for n in range(N):
                            m.h_s[r, n, pl.ds(0, CHANNELS)] = hs[n]
                if m.reset is None:
                    before[0] = start()
                for r in reversed(range(sub)):
                    t = first + r
                    Bs = fixed_B or [m.B_s[slot, t, n] for n in range(N)]
                    Cs = fixed_C or [m.C_s[slot, t, n] for n in range(N)]
                    Delta, Du, dyt, u = Delta_s[t, :], Du_s[t, :], Dg_s[t, :], here("u")[t, :].astype(F32)
                    y, wA, gB = [D * u, None], [None, None], [None, None]
                    add = lambda acc, p, v: v if acc[p] is None else acc[p] + v
                    for n in range(N):
                        p = n % 2
                        h = after[r][n]
                        if m.z is not None:
                            y[p] = add(y, p, Cs[n] * h)
                        g = gs[n] + Cs[n] * dyt
                        if m.g_s is not None:
                            m.g_s[r, n, pl.ds(0, CHANNELS)] = g
                        else:
                            dB[n] = dB[n] + g * Du
                        if m.h_s is None:
                            dC[n] = dC[n] + h * dyt
                        gs[n] = jnp.exp2(Delta * A[n]) * g
                        w = gs[n] * before[r][n]
                        dA[n] = dA[n] + Delta * w
                        wA[p] = add(wA, p, w * A[n])
                        gB[p] = add(gB, p, g * Bs[n])
                    gs = list(enter(t, tuple(gs)))
                    gB = gB[0] + gB[1]
                    dDelta = (wA[0] + wA[1]) * arithmetic.LN_2 + u * gB
                    if x.softplus:
                        dDelta = dDelta * rate_s[t, :]
                    dbias[0] = dbias[0] + dDelta
                    dD[0] = dD[0] + dyt * u
                    if m.z is not None:
                        q = q_s[t, :]
                        here("z")[t, :] = ((y[0] + y[1]) * q).astype(x.z.dtype)
                    here("u")[t, :] = (Delta * gB + D * dyt).astype(x.u.dtype)
                    here("delta")[t, :] = dDelta.astype(x.delta.dtype)
                plgpu.commit_smem()
                if m.g_s is not None:
                    m.dB_s[j] = row_sums(m.g_s, Du_s, first)
                if m.h_s is not None:
                    m.dC_s[j] = row_sums(m.h_s, Dg_s, first)
                plgpu.commit_smem()
                return tuple(gs), tuple(tuple(v) for v in sums)

            def row_sums(tile_ref, weights, first):
                layout = product_layout(N)
                weighted = plgpu.load(tile_ref.at[:, :, pl.ds(0, CHANNELS)], layout=layout, optimized=False)
                factor = plgpu.load(weights.at[pl.ds(first, sub)], layout=layout.reduce((1,)), optimized=False)
                factor = plgpu.layout_cast(lax.broadcast_in_dim(factor, (sub, N, CHANNELS), (0, 2)), layout)
                return jnp.sum(weighted * factor, axis=2)

            carry = lax.fori_loop(0, nsub, level2, carry)
            steps = pl.ds(at.start + i * tile, tile)
            for name in ("u", "delta", "z"):
                if getattr(m, name) is not None:
                    plgpu.copy_smem_to_gmem(here(name), getattr(m, "d" + name).at[at.row, steps, at.group, at.channels])
            for name in varying:
                out = getattr(m, "d" + name).at[at.row, at.block, pl.ds((at.start // tile + i) * nsub, nsub)]
                plgpu.copy_smem_to_gmem(getattr(m, f"d{name}_s"), out)
            return carry

        zeros = lambda count: (zero_row(),) * count
        sums = (zeros(N), zeros(1), zeros(1), zeros(0 if fixed_B is None else N), zeros(0 if fixed_C is None else N))
        gs, sums = lax.fori_loop(0, tiles, one_tile, (gs, sums))
        for n in range(N):
            m.states_s[0, n, :] = gs[n]
        for row, value in enumerate(v for part in sums for v in part):
            m.work_s[row, :] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(m.states_s.at[0], m.dinitial.at[at.row, at.piece, :, at.group, at.channels])
        plgpu.copy_smem_to_gmem(m.work_s.at[pl.ds(0, rows.count)], m.sums.at[at.row, at.piece, :, at.group, at.channels])
        plgpu.wait_smem_to_gmem(0)

    product = SM((sub, N, CHANNELS + PADDING), F32)
    partial = SM((nsub, sub, N), F32)
    scratch = {
        **{k + "_s": SM((stages, tile, CHANNELS), dtypes[k]) for k in sequences},
        **{k + "_s": SM((stages, tile, N), F32) for k in varying},
        "reset_s": None if x.reset is None else SM((stages, max(tile, 32)), jnp.int32),
        "states_s": SM((nsub - 1 + stages, N, CHANNELS), F32),
        "work_s": SM((max(rows.count, len(kinds) * tile), CHANNELS), F32),
        "g_s": product if "B" in varying else None,
        "h_s": product if "C" in varying else None,
        "dB_s": partial if "B" in varying else None,
        "dC_s": partial if "C" in varying else None,
        "first": plgpu.Barrier(num_arrivals=2),
        "full": plgpu.Barrier(num_arrivals=len(sequences) + len(varying) + 1 + (x.reset is not None), num_barriers=stages),
    }
    inputs = {k: getattr(x, k) for k in ("u", "delta", "z", "B", "C", "channels", "reset")} | {"kept": kept, "dy": dy, "dlast": dlast}
    chunks = -(-s.l // tile)
    per_block = shape((s.b, s.g * s.blocks, chunks * nsub, sub, N), F32)
    outputs = {
        "du": shape(x.u.shape, x.u.dtype),
        "ddelta": shape(x.delta.shape, x.delta.dtype),
        "dz": None if x.z is None else shape(x.z.shape, x.z.dtype),
        "dB": per_block if "B" in varying else None,
        "dC": per_block if "C" in varying else None,
        "sums": shape((s.b, pieces.count, x.channels.shape[0], s.g, s.r), F32),
        "dinitial": shape((s.b, pieces.count, N, s.g, s.r), F32),
    }
    return launch(body, "selective_scan_backward", programs(s, pieces), inputs, outputs, scratch)
