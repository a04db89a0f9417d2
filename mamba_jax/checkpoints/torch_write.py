"""Writes PyTorch's zip format (`pytorch_model.bin`) tensor by tensor, without PyTorch; `torch_file.py` describes it."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from mamba_jax.checkpoints.torch_file import STORAGES

_FOLDER = "pytorch_model"
_STORAGE_NAMES = {dtype: name for name, dtype in STORAGES.items()}
_ALIGNMENT = 64  # bytes; PyTorch's own files have it, so that their storages can be mapped


def write_torch(
    path: Path,
    layout: Sequence[tuple[str, tuple[int, ...]]],
    dtype: np.dtype,
    arrays: Iterator[np.ndarray],
    shared: Mapping[str, str],
) -> None:
    """Write arrays of one dtype, each as it comes, as `torch.save` would write a dictionary of them.

    Args:
        path: the file, replaced if there is one.
        layout: name and shape of each tensor, in order.
        dtype: of all of them.
        arrays: their values; one is taken for each entry of `layout`.
        shared: further names, each of a tensor of `layout` whose storage it shares (a tied head).
    """
    keys = {name: str(key) for key, (name, _) in enumerate(layout)}
    shapes = dict(layout)
    entries = [(name, keys[name], shape) for name, shape in layout]
    entries += [(alias, keys[name], shapes[name]) for alias, name in shared.items()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _write(archive, "data.pkl", _pickle(entries, dtype))
        _write(archive, "byteorder", b"little")
        for name, _ in layout:
            values = np.ascontiguousarray(next(arrays))
            if values.dtype.byteorder == ">":
                values = values.byteswap()
            _write(archive, f"data/{keys[name]}", values.reshape(-1).view(np.uint8).data)
        _write(archive, "version", b"3\n")


def _write(archive: zipfile.ZipFile, name: str, content: bytes | memoryview) -> None:
    info = zipfile.ZipInfo(f"{_FOLDER}/{name}")
    # Behind the local header: 30 bytes, the name, and an extra field of 4 bytes and as many zeros as it takes.
    start = archive.start_dir + 30 + len(info.filename) + 4
    info.extra = struct.pack("<HH", 0x4246, -start % _ALIGNMENT) + bytes(-start % _ALIGNMENT)
    info.file_size = len(content)
    with archive.open(info, "w") as entry:
        entry.write(content)


def _pickle(entries: Sequence[tuple[str, str, tuple[int, ...]]], dtype: np.dtype) -> bytes:
    """A pickle of protocol 2 of {name: tensor}; written by hand because `pickle` writes only what it can import."""
    ordered_dict = pickle.GLOBAL + b"collections\nOrderedDict\n" + pickle.EMPTY_TUPLE + pickle.REDUCE
    parts = [pickle.PROTO + b"\x02", ordered_dict, pickle.MARK]
    for name, key, shape in entries:
        strides = [int(np.prod(shape[axis + 1 :], dtype=np.int64)) for axis in range(len(shape))]
        storage = [
            pickle.MARK, _text("storage"), pickle.GLOBAL + f"torch\n{_STORAGE_NAMES[dtype]}\n".encode(), _text(key),
            _text("cpu"), _integer(int(np.prod(shape, dtype=np.int64))), pickle.TUPLE, pickle.BINPERSID,
        ]  # fmt: skip
        parts += [
            _text(name), pickle.GLOBAL + b"torch._utils\n_rebuild_tensor_v2\n",
            pickle.MARK, *storage, _integer(0), _tuple(shape), _tuple(strides), pickle.NEWFALSE, ordered_dict,
            pickle.TUPLE, pickle.REDUCE,
        ]  # fmt: skip
    return b"".join([*parts, pickle.SETITEMS, pickle.STOP])


def _text(value: str) -> bytes:
    encoded = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def _integer(value: int) -> bytes:
    if value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    return pickle.LONG1 + b"\x08" + struct.pack("<q", value)


def _tuple(values: Sequence[int]) -> bytes:
    return pickle.MARK + b"".join(map(_integer, values)) + pickle.TUPLE
