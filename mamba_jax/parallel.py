"""The model over a mesh with automatic axes: what is split over which axis, and the operations that run part by part.

    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        logits = jax.jit(lm)(tokens)

An axis named `data` or `fsdp` splits the rows of a batch, `seq` the length, `tensor` the channels inside a block. The
products with weights are left to the partitioner. It would gather a whole sequence for a scan or a convolution, so
those run under `shard_map`: states and the convolution's last inputs are all that passes between parts of the length.
Whatever an axis does not divide stays whole, on each of that axis' devices. Without such a mesh all here is plain.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mamba_jax import conv
from mamba_jax.scan import api
from mamba_jax.scan.sequence import sequence_parallel_scan

ROW_AXES = ("data", "fsdp")
LENGTH_AXIS = "seq"
CHANNEL_AXIS = "tensor"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The mesh axes that split activations (b, l, d), None where none does."""

    rows: tuple[str, ...] | None
    length: str | None
    channels: str | None
    axes: frozenset[str]  # all automatic axes of the mesh
    devices: int  # over which rows and length are split
    parts: int  # of the length

    @property
    def sequence(self) -> P:
        """Of (b, l, d)."""
        return P(self.rows, self.length, self.channels)

    def by_part(self, function: Callable[..., Any], in_specs: Any, out_specs: Any, *, check_vma: bool) -> Any:
        """`function` of each device's parts."""
        return jax.shard_map(
            function, in_specs=in_specs, out_specs=out_specs, axis_names=self.axes, check_vma=check_vma
        )


def layout_of(b: int, l: int, d: int, *, shortest: int = 1) -> Layout | None:
    """How activations (b, l, d) are split over the present mesh; None where they are not.

    Args:
        b, l, d: rows, length, channels.
        shortest: the least length of a part.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {name: mesh.shape[name] for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Auto}

    def splits(name: str, extent: int) -> bool:
        return sizes.get(name, 1) > 1 and extent % sizes[name] == 0

    rows: tuple[str, ...] = ()
    for name in ROW_AXES:
        if splits(name, b):
            rows, b = (*rows, name), b // sizes[name]
    length = LENGTH_AXIS if splits(LENGTH_AXIS, l) and l // sizes[LENGTH_AXIS] >= shortest else None
    channels = CHANNEL_AXIS if splits(CHANNEL_AXIS, d) else None
    if not (rows or length or channels):
        return None
    parts = 1 if length is None else sizes[length]
    devices = math.prod(sizes[name] for name in rows) * parts
    return Layout(rows or None, length, channels, frozenset(sizes), devices, parts)


def constrain_residual(x: jax.Array) -> jax.Array:
    """(b, l, d_model), whole in its last axis on every device: what the partitioner plans the products around."""
    layout = layout_of(*x.shape)
    return x if layout is None else lax.with_sharding_constraint(x, P(layout.rows, layout.length))


def causal_conv(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None = None,
    *,
    window: jax.Array | None = None,
    document: jax.Array | None = None,
) -> jax.Array:
    """`mamba_jax.conv.causal_conv`, part by part; each part of the length has its window from its left neighbour."""
    layout = layout_of(*x.shape, shortest=weight.shape[0] - 1)
    if layout is None:
        return conv.causal_conv(x, weight, bias, window=window, document=document)

    def on_a_part(x, weight, bias, window, document):
        if layout.length is not None:
            window = conv.window_from_left(x, weight.shape[0], layout.length, window=window, document=document)
        return conv.causal_conv(x, weight, bias, window=window, document=document)

    specs = (
        layout.sequence,
        P(None, layout.channels),
        P(layout.channels),
        P(layout.rows, None, layout.channels),
        P(layout.rows, layout.length),
    )
    return layout.by_part(on_a_part, specs, layout.sequence, check_vma=True)(x, weight, bias, window, document)


def selective_scan(u, delta, A, B, C, D, z, delta_bias, *, initial_state, segment_ids, scan: api.Scan) -> Any:
    """`mamba_jax.selective_scan` as a block calls it, part by part: y (b, l, d) and the last state (b, d, n)."""
    arguments = {
        "u": u, "delta": delta, "A": A, "B": B, "C": C, "D": D, "z": z, "delta_bias": delta_bias,
        "initial_state": initial_state, "segment_ids": segment_ids,
    }  # fmt: skip
    options: dict[str, Any] = {"delta_softplus": True, "return_last_state": True, "scan": scan}
    layout = layout_of(*u.shape)
    if layout is None:
        return api.selective_scan(**arguments, **options)

    def on_a_part(arguments):
        if layout.length is None:
            return api.selective_scan(**arguments, **options)
        return sequence_parallel_scan(**arguments, **options, axis_name=layout.length)

    state, over_time = P(layout.rows, layout.channels), P(layout.rows, layout.length)
    specs = dict.fromkeys(("u", "delta", "z"), layout.sequence)
    specs |= dict.fromkeys(("A", "D", "delta_bias"), P(layout.channels))
    constant = P(layout.channels)
    specs |= {name: constant if m.ndim == 2 else over_time for name, m in (("B", B), ("C", C))}
    specs |= {"initial_state": state, "segment_ids": over_time}
    # Pallas' calls know nothing of check_vma, and "auto" may hold one.
    parts = layout.by_part(on_a_part, (specs,), (layout.sequence, state), check_vma=scan in api.XLA_FORMS)
    return parts(arguments)
