"""Which part of what is on which device: parameters, the optimizer's moments, batches.

| axis | a batch | parameters and moments |
|---|---|---|
| data | rows are split | whole on each device |
| fsdp | rows are split | matrices are split along their largest free dimension, and gathered where a layer uses them |
| seq | the length is split | whole on each device |
| tensor | whole on each device | split along the channels inside a block, the embedding along its vocabulary |

A dimension that an axis does not divide stays whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mamba_jax.parallel import CHANNEL_AXIS, LENGTH_AXIS, ROW_AXES
from train.data import Batch

_FSDP = "fsdp"
_BATCH = P(ROW_AXES, LENGTH_AXIS)
# The dimension, from the end, that the tensor axis splits. in_proj's columns are x's and z's channels, not in the order
# in which a block uses them: a layer's are exchanged where it is used.
_TENSOR_DIMENSION = {
    ("in_proj", "kernel"): -1,
    ("x_proj", "kernel"): -2,
    ("dt_proj", "kernel"): -1,
    ("out_proj", "kernel"): -2,
    ("mixer", "conv_weight"): -1,
    ("mixer", "conv_bias"): -1,
    ("mixer", "dt_bias"): -1,
    ("mixer", "A_log"): -2,
    ("mixer", "B"): -2,
    ("mixer", "C"): -2,
    ("mixer", "D"): -1,
    ("embedding",): -2,
    ("lm_head", "kernel"): -1,
}


def partition(mesh: Mesh) -> Callable[[tuple[str, ...], tuple[int, ...]], P]:
    """The specification of a parameter, or of a moment of it, from its path in the model and its shape."""

    def specification(path: tuple[str, ...], shape: tuple[int, ...]) -> P:
        axes: list[str | None] = [None] * len(shape)
        dimension = next((_TENSOR_DIMENSION[path[-k:]] for k in (1, 2) if path[-k:] in _TENSOR_DIMENSION), None)
        if dimension is not None and _splits(mesh, CHANNEL_AXIS, shape[dimension]):
            axes[dimension] = CHANNEL_AXIS
        first = 1 if path[0] == "layers" else 0  # never across layers: each is gathered when its turn comes
        free = [i for i in range(first, len(shape)) if axes[i] is None and _splits(mesh, _FSDP, shape[i])]
        if free and len(shape) - first >= 2:  # vectors are too small for the message
            axes[max(free, key=lambda i: shape[i])] = _FSDP
        return P(*axes)

    return specification


def shardings(tree: Any, mesh: Mesh) -> Any:
    """The sharding of each array of a tree of parameters, or of an optimizer's state.

    In a state the names on an array's path are those of the parameter that it belongs to; one that belongs to none,
    such as a count of steps, is on every device.
    """
    specification = partition(mesh)

    def of_leaf(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = tuple(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))
        return NamedSharding(mesh, specification(names, leaf.shape) if names else P())

    return jax.tree_util.tree_map_with_path(of_leaf, tree)


def abstract(tree: Any, mesh: Mesh) -> Any:
    """Shapes and dtypes of a tree of parameters or of an optimizer's state, with its shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings(tree, mesh),
    )


def abstract_batch(mesh: Mesh, batch_size: int, seq_len: int, *, segments: bool = False) -> Batch:
    """A batch's shapes, dtypes and shardings, with or without `segment_ids`."""
    tokens: Any = jax.ShapeDtypeStruct((batch_size, seq_len), np.int32, sharding=NamedSharding(mesh, _BATCH))
    return Batch(tokens, tokens, tokens if segments else None)


def place_batch(mesh: Mesh, shape: tuple[int, ...], read: Callable[[slice], Batch]) -> Batch:
    """A batch on the devices of the mesh.

    Args:
        mesh: the devices of all processes.
        shape: (b, l) of the whole batch.
        read: makes the rows that it is given; it is asked for those alone that devices of this process hold.
    """
    sharding = NamedSharding(mesh, _BATCH)
    indices: Any = sharding.addressable_devices_indices_map(shape)
    held = [rows.indices(shape[0]) for rows, _ in indices.values()]
    first, last = min(start for start, _, _ in held), max(stop for _, stop, _ in held)
    rows = read(slice(first, last))

    def place(part: np.ndarray) -> jax.Array:
        def of_device(index: Any) -> np.ndarray:
            start, stop, _ = index[0].indices(shape[0])
            return part[start - first : stop - first, index[1]]

        return jax.make_array_from_callback(shape, sharding, of_device)

    return jax.tree.map(place, rows)


def _splits(mesh: Mesh, axis: str, extent: int) -> bool:
    return mesh.shape[axis] > 1 and extent % mesh.shape[axis] == 0
