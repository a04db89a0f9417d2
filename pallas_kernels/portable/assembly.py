"""PTX that Triton would not write by itself, as functions of arrays; for programs of one warp, on NVIDIA GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

LANES = 32  # of a warp


def exp2(x: jax.Array) -> jax.Array:
    """2^x in one instruction (relative error 2^-22, results below 2^-126 are 0).

    `jnp.exp2` costs three more there, to scale results that are too small to matter in a decay.
    """
    return _elementwise("ex2.approx.ftz.f32 $0, $1;", x)


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x in one instruction (relative error 2^-23)."""
    return _elementwise("rcp.approx.ftz.f32 $0, $1;", x)


def multiply_add(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
    """x y + z in one instruction; XLA lets Triton contract nothing by itself."""
    return _elementwise("fma.rn.f32 $0, $1, $2, $3;", x, y, z)


def _elementwise(instruction: str, *operands: jax.Array) -> jax.Array:
    operands = tuple(jnp.broadcast_arrays(*operands))
    (result,) = triton.elementwise_inline_asm(
        instruction,
        args=operands,
        constraints=",".join(["=f"] + ["f"] * len(operands)),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(operands[0].shape, operands[0].dtype)],
    )
    return result


def channel_sums(products: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    """sum_channels x w of up to 32 pairs (x, w) of (channels,): sum k in entry k of (channels,), zeros behind.

    Summed one by one, each would take five exchanges between the lanes of the warp. Here every exchange halves the sums
    that a lane still works on, until it holds one: 31 exchanges for 32 sums, and one more for each entry of the result.
    Which lane holds which channel does not matter, as long as every lane holds channels / 32 of them.
    """
    rows, weights = [x for x, _ in products], list({id(w): w for _, w in products}.values())
    weight_of = [next(i for i, known in enumerate(weights) if known is w) for _, w in products]
    (channels,) = rows[0].shape
    per_lane = channels // LANES
    (sums,) = triton.elementwise_inline_asm(
        channel_sums_ptx(weight_of, len(weights), per_lane),
        args=[lax.iota(jnp.int32, channels), *rows, *weights],
        constraints=",".join(["=&f"] * per_lane + ["r"] * per_lane + ["f"] * (per_lane * (len(rows) + len(weights)))),
        pack=per_lane,
        result_shape_dtypes=[jax.ShapeDtypeStruct((channels,), rows[0].dtype)],
    )
    return sums


def channel_sums_ptx(weight_of: list[int], weights: int, per_lane: int) -> str:
    """The text for `channel_sums`; row k is summed with weight `weight_of[k]` of as many as `weights`.

    Operands, `per_lane` registers each: the result, the numbers of its entries, every row, every weight.
    """
    count = len(weight_of)
    width = 1 << (count - 1).bit_length()

    def operand(number: int, element: int) -> str:
        return f"${number * per_lane + element}"

    lines = [
        f".reg .f32 v<{width}>, keep, send;",
        ".reg .pred upper;",
        ".reg .b32 lane, bit;",
        "mov.u32 lane, %laneid;",
    ]
    for k in range(count):
        for e in range(per_lane):
            x, w = operand(2 + k, e), operand(2 + count + weight_of[k], e)
            lines.append(f"mul.rn.f32 v{k}, {x}, {w};" if e == 0 else f"fma.rn.f32 v{k}, {x}, {w}, v{k};")
    lines += [f"mov.f32 v{k}, 0f00000000;" for k in range(count, width)]
    half = width // 2
    while half:  # a lane whose bit `half` is set goes on with the upper half of the sums
        lines += [f"and.b32 bit, lane, {half};", "setp.ne.b32 upper, bit, 0;"]
        for k in range(half):
            lines += [
                f"selp.f32 send, v{k}, v{k + half}, upper;",
                f"selp.f32 keep, v{k + half}, v{k}, upper;",
                f"shfl.sync.bfly.b32 send, send, {half}, 31, -1;",
                f"add.rn.f32 v{k}, keep, send;",
            ]
        half //= 2
    distance = width
    while distance < LANES:
        lines += [f"shfl.sync.bfly.b32 send, v0, {distance}, 31, -1;", "add.rn.f32 v0, v0, send;"]
        distance *= 2
    lines += [f"shfl.sync.idx.b32 {operand(0, e)}, v0, {operand(1, e)}, 31, -1;" for e in range(per_lane)]
    return "{" + " ".join(lines) + "}"
