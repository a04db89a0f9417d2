"""Published and own checkpoints in and out: the original `mamba_ssm` format, `transformers`' two, and training runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from mamba_jax.atomic import replacing
from mamba_jax.checkpoints import folder as files
from mamba_jax.checkpoints import run_folder
from mamba_jax.checkpoints.configs import Format, read_config, write_config
from mamba_jax.checkpoints.folder import checkpoint_folder as checkpoint_folder
from mamba_jax.checkpoints.parameters import (
    HEAD,
    Parameter,
    check_tensors,
    fill,
    our_shape,
    parameters,
    rename_embedding,
    take_apart,
)
from mamba_jax.checkpoints.progress import Progress, reading
from mamba_jax.checkpoints.safetensors_file import write_safetensors
from mamba_jax.checkpoints.tensors import Tensor
from mamba_jax.checkpoints.torch_write import write_torch
from mamba_jax.config import MambaConfig, RematPolicy, Scan

if TYPE_CHECKING:
    from mamba_jax.model import MambaLM

Partition = Callable[[tuple[str, ...], tuple[int, ...]], PartitionSpec]
_Placement = Callable[[tuple[str, ...], tuple[int, ...]], Sharding | None]

_STORED = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
_SHARD_BYTES = 5 * 10**9  # `transformers` splits its files at 5 GB as well


def load(
    cls: type[MambaLM],
    name: str | os.PathLike[str],
    *,
    scan: Scan = "auto",
    dtype: DTypeLike = "float32",
    remat: bool = False,
    remat_policy: RematPolicy = "nothing",
    mesh: Mesh | None = None,
    partition: Partition | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> MambaLM:
    """`MambaLM.from_pretrained`, where arguments and errors are described."""
    folder = checkpoint_folder(name, revision)
    if partition is not None and mesh is None:
        raise ValueError("`partition` needs a `mesh` to place the parameters on")

    def place(path: tuple[str, ...], shape: tuple[int, ...]) -> Sharding | None:
        if mesh is None:
            return None
        return NamedSharding(mesh, PartitionSpec() if partition is None else partition(path, shape))

    compute: dict[str, Any] = {
        "scan": scan, "dtype": jnp.dtype(dtype).name, "remat": remat, "remat_policy": remat_policy,
    }  # fmt: skip
    if not (folder / files.CONFIG).exists() and (folder / "config.toml").exists():
        return _load_run(cls, folder, compute, place)
    return _load_checkpoint(cls, folder, compute, place, progress)


def save(
    lm: MambaLM,
    folder: str | os.PathLike[str],
    format: Format = "hf",
    *,
    dtype: str = "float32",
    extra_config: dict[str, Any] | None = None,
    max_shard_bytes: int = _SHARD_BYTES,
) -> None:
    """`MambaLM.save_pretrained`, where arguments and errors are described."""
    if format not in get_args(Format):
        raise ValueError(f"`format` must be one of {', '.join(get_args(Format))}, got {format!r}")
    if dtype not in _STORED:
        raise ValueError(f"`dtype` must be one of {', '.join(_STORED)}, got {dtype!r}")
    config = _config_with(write_config(lm.config, format, dtype), extra_config or {})
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    values = {_path(keys): variable[...] for keys, variable in nnx.to_flat_state(nnx.state(lm, nnx.Param))}
    wanted = parameters(lm.config, format)
    if format == "hf":
        written = _write_hf(folder, wanted, values, _STORED[dtype], max_shard_bytes)
    else:
        written = {files.TORCH}
        shared = {HEAD: wanted[0].names[0]} if lm.config.tie_embeddings else {}
        with replacing(folder / files.TORCH) as path:
            write_torch(path, _layout(wanted), _STORED[dtype], _tensors_of(wanted, values, _STORED[dtype]), shared)
    _write_json(folder / files.CONFIG, config)
    for path in files.stale_weights(folder, written):
        path.unlink()


def _config_with(config: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` with further keys, which must be understood when it is read, and change nothing."""
    problems: list[str] = []
    model, _ = read_config(config, [])
    if read_config(config | extra, problems)[0] != model:
        problems.append("it says that the model is another one than it is")
    if problems:
        raise ValueError(f"`extra_config` cannot stand in config.json: {'; '.join(problems)}")
    return config | extra


def _load_checkpoint(
    cls: type[MambaLM], folder: Path, compute: dict[str, Any], place: _Placement, progress: Progress | None
) -> MambaLM:
    problems: list[str] = []
    config, format = read_config(files.read_json(folder / files.CONFIG), problems)
    tensors = rename_embedding(files.read_weights(folder, problems), format)
    # Where a file could not be read, a list of its tensors as missing would say the same again.
    if config is None or not tensors:
        raise _unusable(folder, problems or ["it holds no tensors"])
    wanted = parameters(config, format)
    check_tensors(wanted, tensors, config, problems)
    if problems:
        raise _unusable(folder, problems)
    with reading(tensors, folder, progress) as on_read:
        values = {parameter.path: _place(parameter, tensors, place, on_read) for parameter in wanted}
    return _assemble(cls, config.replace(**compute), values)


def _load_run(cls: type[MambaLM], folder: Path, compute: dict[str, Any], place: _Placement) -> MambaLM:
    step = run_folder.newest_step(folder)
    if step is None:
        raise ValueError(f"the run in {folder} has no checkpoint yet")
    problems: list[str] = []
    config, values = None, {}
    try:
        config = run_folder.read_run_config(step, problems)
        if config is not None:
            shapes = {path: variable.shape for path, variable in _abstract(cls, config)[1].items()}
            values = run_folder.read_run_parameters(step, shapes, place, problems)
    except (OSError, ValueError, KeyError) as error:  # orbax's, for files that are missing or damaged
        problems.append(f"{type(error).__name__}: {error}")
    if config is None or problems:
        raise _unusable(step, problems)
    return _assemble(cls, config.replace(**compute), values)


def _place(
    parameter: Parameter, tensors: dict[str, Tensor], place: _Placement, on_read: Callable[[str], None]
) -> jax.Array:
    """A parameter on its devices: each part of it is read when, and only as far as, a device needs it."""
    shape = our_shape(parameter)
    sharding = place(parameter.path, shape)
    if sharding is None:
        # Not committed to a device, as a fresh model's parameters are.
        return jax.device_put(fill(parameter, tensors, (slice(None),) * len(shape), on_read))
    # Every dimension's slice is given, for these shapes have dimensions.
    return jax.make_array_from_callback(shape, sharding, lambda index: fill(parameter, tensors, index or (), on_read))


def _assemble(cls: type[MambaLM], config: MambaConfig, values: dict[tuple[str, ...], jax.Array]) -> MambaLM:
    """A model of these parameters, none of which was ever drawn at random."""
    graphdef, flat = _abstract(cls, config)
    if set(flat) != set(values):
        raise RuntimeError(f"parameters without a place in the checkpoint's format: {set(flat) ^ set(values)}")
    return nnx.merge(graphdef, nnx.from_flat_state([(path, flat[path].replace(values[path])) for path in flat]))


def _abstract(cls: type[MambaLM], config: MambaConfig) -> tuple[nnx.GraphDef, dict[tuple[str, ...], Any]]:
    """What is static of a model, and its parameters by their paths, as shapes without values."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: cls(config, rngs=nnx.Rngs(0))))
    return graphdef, {_path(keys): variable for keys, variable in nnx.to_flat_state(state)}


def _path(keys: Sequence[Any]) -> tuple[str, ...]:
    return tuple(map(str, keys))


def _write_hf(
    folder: Path,
    wanted: Sequence[Parameter],
    values: dict[tuple[str, ...], jax.Array],
    dtype: np.dtype,
    max_shard_bytes: int,
) -> set[str]:
    """One file, or several of at most `max_shard_bytes` and their index; returns the names of all that were written."""
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    sizes = [0]
    for name, shape in _layout(wanted):
        nbytes = math.prod(shape) * dtype.itemsize
        if shards[-1] and sizes[-1] + nbytes > max_shard_bytes:
            shards.append([])
            sizes.append(0)
        shards[-1].append((name, shape))
        sizes[-1] += nbytes
    stem, suffix = files.SAFETENSORS.split(".")
    numbered = [f"{stem}-{number:05}-of-{len(shards):05}.{suffix}" for number in range(1, len(shards) + 1)]
    names = numbered if len(shards) > 1 else [files.SAFETENSORS]
    arrays = _tensors_of(wanted, values, dtype)
    for name, shard in zip(names, shards, strict=True):
        with replacing(folder / name) as path:
            write_safetensors(path, shard, dtype, arrays)
    if len(shards) == 1:
        return set(names)
    weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor, _ in shard}
    index = f"{files.SAFETENSORS}.index.json"
    _write_json(folder / index, {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map})
    return {*names, index}


def _write_json(path: Path, data: dict[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _layout(wanted: Sequence[Parameter]) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, parameter.shape) for parameter in wanted for name in parameter.names]


def _tensors_of(
    wanted: Sequence[Parameter], values: dict[tuple[str, ...], jax.Array], dtype: np.dtype
) -> Iterator[np.ndarray]:
    """The tensors in the order of `_layout`; one parameter at a time is on the host."""
    for parameter in wanted:
        yield from take_apart(parameter, np.asarray(values[parameter.path]), dtype)


def _unusable(folder: Path, problems: Sequence[str]) -> ValueError:
    """The one error that lists everything that is wrong with a checkpoint."""
    return ValueError("\n".join([f"{folder} cannot be loaded:", *(f"  {problem}" for problem in problems)]))
