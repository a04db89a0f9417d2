"""A tensor that stands in a file and is read only when its turn comes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

# Every element type that a parameter may have in a file. A wider or narrower one becomes float32 on its way in.
FLOATS = {
    np.dtype(np.float32): "float32",
    np.dtype(ml_dtypes.bfloat16): "bfloat16",
    np.dtype(np.float16): "float16",
    np.dtype(np.float64): "float64",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """Shape and dtype are known; `read()` gives the array, mapped from the file and not copied before it is used."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def map_bytes(path: Path, offset: int, nbytes: int) -> np.ndarray:
    """(nbytes,) uint8, a read-only view of a part of a file.

    One mapping for each call: its pages go when the caller lets go of it, so that a large file is never resident whole.
    """
    if nbytes == 0:
        return np.empty(0, np.uint8)  # an empty mapping is an error to the operating system
    return np.memmap(path, np.uint8, mode="r", offset=offset, shape=(nbytes,))


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array at a multiple of 64 bytes: XLA's CPU backend takes it over without a copy."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)
