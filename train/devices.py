"""The devices of a run: how many, in which mesh, of how many processes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from train.errors import UsageError
from train.mesh import AXES, count_devices, parse_mesh

_MESSAGE_BYTES = 4096


def start(mesh: str, distributed: bool) -> None:
    """What must be done before JAX first looks at its devices: join the other processes, cut the CPU into devices.

    Raises:
        UsageError: the other processes cannot be found.
    """
    if distributed:
        if not jax.distributed.is_initialized():
            try:
                jax.distributed.initialize()
            except (ValueError, RuntimeError) as error:
                raise UsageError(f"--distributed: {error}") from None
    elif count_devices(mesh) > max(1, jax.config.jax_num_cpu_devices):  # pyright: ignore[reportAttributeAccessIssue]
        try:
            jax.config.update("jax_num_cpu_devices", count_devices(mesh))
        except RuntimeError:
            return  # JAX is in use already, with the devices that it has: `make_mesh` says if they are too few


def make_mesh(text: str, devices: list[Any] | None = None) -> Mesh:
    """The mesh that `--mesh` asks for, with all axes of `train.mesh.AXES`, from the first devices that there are.

    Args:
        text: as `parse_mesh` takes it.
        devices: JAX's own if None.

    Raises:
        UsageError: there are not enough of them, or some would be left out where several processes run.
    """
    sizes = parse_mesh(text)
    wanted, there = math.prod(sizes.values()), jax.devices() if devices is None else devices
    if wanted > len(there):
        kind = there[0].device_kind
        raise UsageError(f"--mesh {text}: it takes {wanted} devices, and there are {len(there)} ({kind})")
    if jax.process_count() > 1 and wanted < len(there):
        given = f"--mesh {text}" if text else "--mesh is not given"
        raise UsageError(
            f"{given}: {jax.process_count()} processes have {len(there)} devices, and all must be in the mesh"
        )
    kinds = (AxisType.Auto,) * len(AXES)
    if devices is not None:
        return Mesh(np.array(devices[:wanted]).reshape(tuple(sizes.values())), AXES, axis_types=kinds)
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=kinds, devices=there[:wanted])


def is_first_process() -> bool:
    """Whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def anywhere(holds: bool) -> bool:
    """Whether it holds on any process: what all must do together, one alone must not begin."""
    return holds if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.array(holds)).any())


def agreed(function: Callable[[], object]) -> str:
    """What `function` gives on the first process, in words, on every process; its UsageError too.

    Raises:
        UsageError: the first process' own.
    """
    if jax.process_count() == 1:
        return str(function())
    message: dict[str, str] = {}
    if is_first_process():
        try:
            message = {"value": str(function())}
        except UsageError as error:
            message = {"error": str(error)}
    text = json.dumps(message).encode()[:_MESSAGE_BYTES]
    padded = np.frombuffer(text.ljust(_MESSAGE_BYTES), np.uint8)
    message = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())
    if "error" in message:
        raise UsageError(message["error"])
    return message["value"]


def whole(tree: Any) -> Any:
    """The arrays of a tree in the memory of every process, as NumPy arrays."""

    def gather(leaf: jax.Array) -> np.ndarray:
        if leaf.is_fully_addressable:
            return np.asarray(leaf)
        return multihost_utils.process_allgather(leaf, tiled=True)  # pyright: ignore[reportReturnType]

    return jax.tree.map(gather, tree)
