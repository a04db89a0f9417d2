"""Scans run per shard: on a mesh with explicit axes the batch and the channels may be split over devices.

Left to itself the partitioner would gather a whole sharded input for a blocked scan or an interpreted kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mamba_jax.scan.inputs import ScanInputs

Outputs = tuple[jax.Array, jax.Array]


def over_shards(run: Callable[[ScanInputs], Outputs], inputs: ScanInputs, *, check_vma: bool) -> Outputs:
    """`run(inputs)` on each shard, by the sharding that the types of u, delta or z show; plainly where they show none.

    Raises ValueError if the length is sharded.
    """
    split = _first_split(inputs)
    if split is None:
        return run(inputs)
    mesh, rows, channels = split
    inputs, groups = _groups_for(
        _wide_matrices(inputs), math.prod(mesh.shape[name] for name in _names(channels)), channels
    )

    def matrix(m: jax.Array) -> P:
        return P(None, None, channels) if inputs.is_constant(m) else P(rows, None, groups)

    sequence = P(rows, None, channels)
    specs = dataclasses.replace(
        inputs,
        **dict.fromkeys(("u", "delta", "z"), sequence),
        **dict.fromkeys(("A", "D", "delta_bias"), P(channels)),
        B=matrix(inputs.B),
        C=matrix(inputs.C),
        initial_state=P(rows, channels),
        reset=P(rows),
    )
    specs = dataclasses.replace(specs, **{f: None for f in ("z", "reset") if getattr(inputs, f) is None})
    # Named by the mesh, as the caller's may be known from the arrays alone, without `jax.set_mesh`.
    inputs = jax.tree.map(lambda v, spec: jax.reshard(v, NamedSharding(mesh, spec)), inputs, specs)
    names = {*_names(rows), *_names(channels)}
    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(sequence, P(rows, channels)),
        axis_names=names,
        check_vma=check_vma,
    )(inputs)


def vary_alike(inputs: ScanInputs) -> ScanInputs:
    """Under `shard_map` with check_vma: mark every input as varying over the devices over which any of them varies.

    The state must be, as a scan's carry. The others would be marked where they are used, at each time step: and then
    there the devices would meet, in the backward pass, to add up their parts of the gradients.
    """
    axes = frozenset().union(*(jax.typeof(v).manual_axis_type.varying for v in jax.tree.leaves(inputs)))
    if not axes:
        return inputs

    def vary(v: jax.Array) -> jax.Array:
        missing = tuple(axes - jax.typeof(v).manual_axis_type.varying)
        return jax.lax.pcast(v, missing, to="varying") if missing else v

    return jax.tree.map(vary, _wide_matrices(inputs))


def _wide_matrices(inputs: ScanInputs) -> ScanInputs:
    """B and C wide: what devices share gets the sum of its gradients in its own dtype, and is to be rounded once."""
    return dataclasses.replace(inputs, B=inputs.B.astype(inputs.A.dtype), C=inputs.C.astype(inputs.A.dtype))


Axes = str | tuple[str, ...] | None


def _first_split(inputs: ScanInputs) -> tuple[AbstractMesh, Axes, Axes] | None:
    """The mesh, and its axes for batch and channels, of the first of u, delta, z that is split at all."""
    for name in ("u", "delta", "z"):
        v = getattr(inputs, name)
        if v is None:
            continue
        sharding = jax.typeof(v).sharding
        rows, length, channels = (*sharding.spec, None, None, None)[:3]
        if length is not None:
            raise ValueError(
                f"`{name}` is sharded along its length, over {length!r}; `selective_scan` takes the length whole: "
                f"reshard it to {P(rows, None, channels)}"
            )
        if rows is not None or channels is not None:
            return sharding.mesh, rows, channels
    return None


def _names(axes: Axes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _groups_for(inputs: ScanInputs, shards: int, channels: Axes) -> tuple[ScanInputs, Axes]:
    """B and C for channels split into `shards`: one group stays whole on every device, several split as channels do."""
    g = inputs.groups
    if g == 1:
        return inputs, None
    if g % shards == 0:
        return inputs, channels
    repeated = math.lcm(g, shards) // g
    repeat = functools.partial(jnp.repeat, repeats=repeated, axis=2)
    new = {name: repeat(m) for name, m in (("B", inputs.B), ("C", inputs.C)) if not inputs.is_constant(m)}
    return dataclasses.replace(inputs, **new), channels
