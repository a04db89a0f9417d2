"""Files of the safetensors format, through the library of that name; read tensor by tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from mamba_jax.checkpoints.tensors import Tensor

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_MISSING = "safetensors files need the library of that name: pip install 'mamba-jax[pretrained]'"


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name, none of them read yet.

    Raises:
        ValueError: the file is truncated or damaged, or holds an element type that is not known.
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ImportError(_MISSING) from None
    tensors = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                part = file.get_slice(name)
                if part.get_dtype() not in _DTYPES:
                    raise ValueError(f"{path.name}: `{name}` has elements of type {part.get_dtype()}, not known here")
                tensors[name] = Tensor(tuple(part.get_shape()), _DTYPES[part.get_dtype()], partial(_read, path, name))
    except SafetensorError as error:
        raise ValueError(f"{path.name} is damaged or truncated: {error}") from None
    return tensors


def write_safetensors(
    path: Path, layout: Sequence[tuple[str, tuple[int, ...]]], dtype: np.dtype, arrays: Iterator[np.ndarray]
) -> None:
    """Write arrays of one dtype; all of them are held until the file is written.

    Args:
        path: the file, replaced if there is one.
        layout: name and shape of each tensor, in order.
        dtype: of all of them.
        arrays: their values; one is taken for each entry of `layout`.

    Raises:
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise ImportError(_MISSING) from None
    taken = zip(layout, itertools.islice(arrays, len(layout)), strict=True)
    values = {name: np.ascontiguousarray(array, dtype).reshape(shape) for (name, shape), array in taken}
    save_file(values, path, metadata={"format": "pt"})  # what `transformers` asks for


def _read(path: Path, name: str) -> np.ndarray:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return file.get_tensor(name)
