"""The safetensors format: a JSON header, then the bytes of each tensor. Written and read tensor by tensor.

Source: the format's description in the README of `huggingface/safetensors`. It is so small that a reader which never
holds more than one tensor, and knows bfloat16, is shorter than the use of a library that would.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mamba_jax.checkpoints.tensors import Tensor, map_bytes

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
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name, none of them read yet.

    Raises:
        ValueError: the file is truncated or damaged, or holds an element type that is not known.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or header_size > size - 8:
            raise ValueError(f"{path.name} is truncated: {size} bytes do not hold its header")
        try:
            header = json.loads(file.read(header_size))
        except ValueError as error:  # of JSON and of UTF-8
            raise ValueError(f"{path.name} is damaged: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} is damaged: its header is not a table")
    header.pop("__metadata__", None)
    start = 8 + header_size
    return {name: _tensor(path, name, entry, start, size - start) for name, entry in header.items()}


def write_safetensors(
    path: Path, layout: Sequence[tuple[str, tuple[int, ...]]], dtype: np.dtype, arrays: Iterator[np.ndarray]
) -> None:
    """Write arrays of one dtype, each as it comes.

    Args:
        path: the file, replaced if there is one.
        layout: name and shape of each tensor, in order.
        dtype: of all of them.
        arrays: their values; one is taken for each entry of `layout`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what `transformers` asks for
    end = 0
    for name, shape in layout:
        start, end = end, end + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in layout:
            np.ascontiguousarray(next(arrays)).tofile(file)


def _tensor(path: Path, name: str, entry: Any, start: int, available: int) -> Tensor:
    try:
        dtype_name, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in (*shape, first, last))
    except (TypeError, KeyError, ValueError):
        whole, dtype_name, shape, first, last = False, None, (), 0, 0
    if not whole:
        raise ValueError(f"{path.name} is damaged: its entry for `{name}` is {entry!r}")
    if dtype_name not in _DTYPES:
        raise ValueError(f"{path.name}: `{name}` has elements of type {dtype_name}, which is not known here")
    dtype = _DTYPES[dtype_name]
    nbytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if last - first != nbytes:
        raise ValueError(f"{path.name} is damaged: `{name}` has {last - first} bytes instead of {nbytes}")
    if last > available:
        raise ValueError(f"{path.name} is truncated: `{name}` ends {last - available} bytes behind the file's end")
    return Tensor(shape, dtype, partial(_read, path, start + first, shape, dtype))


def _read(path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return map_bytes(path, offset, nbytes).view(dtype).reshape(shape)
