"""PyTorch's zip format (`pytorch_model.bin`), read without running anything that the file says, and without PyTorch.

Such a file is a zip archive: `NAME/data.pkl`, a pickle in which each tensor is a call of `_rebuild_tensor_v2` on a
storage, and `NAME/data/KEY`, the bytes of each storage, not compressed. Source: `torch/serialization.py` and
`torch/_utils.py`.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mamba_jax.checkpoints.tensors import Tensor, map_bytes

STORAGES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


def read_torch(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that `torch.save` wrote: by PyTorch's `weights_only` loader if it is there, else by ours.

    Raises:
        ValueError: the file asks for anything but tensors, or is truncated, damaged, or not a dictionary of tensors.
    """
    try:
        import torch
    except ImportError:
        return read_torch_zip(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        # The reason stands among much advice, some of which (to load it all the same) must not be passed on.
        reason = re.search(r"GLOBAL [\w.]+", str(error))
        detail = f" ({reason[0]})" if reason else ""
        raise ValueError(f"{path.name} was refused by PyTorch's loader of tensors and nothing else{detail}") from None
    except Exception as error:  # its reader and its unpickler raise whatever the damage leads them to
        raise ValueError(f"{path.name} is truncated or damaged ({_first_line(error)})") from None
    _check_dictionary(path, content, torch.Tensor)
    return {name: _of_torch(tensor.detach()) for name, tensor in content.items()}


def read_torch_zip(path: Path) -> dict[str, Tensor]:
    """`read_torch` by our own reader, which knows tensors, `OrderedDict` and nothing else.

    Raises:
        ValueError: as `read_torch` does, and for the format that PyTorch wrote before version 1.6.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            unpickler = _Unpickler(path, archive)
            content = unpickler.load()
    except _Refused as error:
        raise ValueError(f"{path.name} was refused: it asks for {error}, which is no tensor") from None
    except zipfile.BadZipFile:
        with path.open("rb") as file:
            old = file.read(2) == b"\x80\x02"  # the start of a pickle of protocol 2
        hint = (
            "in PyTorch's format from before version 1.6, which only PyTorch reads" if old else "truncated or damaged"
        )
        raise ValueError(f"{path.name} is {hint}") from None
    except Exception as error:  # an unpickler raises whatever the damage leads it to
        raise ValueError(f"{path.name} is damaged ({type(error).__name__}: {_first_line(error)})") from None
    _check_dictionary(path, content, Tensor)
    return dict(content)


class _Refused(Exception):
    """The pickle names something that is not on the list."""


class _Storage(NamedTuple):
    """Where the numbers of one or several tensors stand in the file."""

    dtype: np.dtype
    offset: int
    numel: int


class _Unpickler(pickle.Unpickler):
    """Builds `Tensor` records instead of tensors.

    What a pickle can get hold of are two bound methods, `OrderedDict` and strings: no instruction of it alters those.
    """

    def __init__(self, path: Path, archive: zipfile.ZipFile):
        entries = {info.filename: info for info in archive.infolist()}
        main = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(main) != 1:
            raise ValueError("it holds no data.pkl")
        self._path, self._entries = path, entries
        self._folder = main[0].removesuffix("data.pkl")
        order = self._folder + "byteorder"
        if order in entries and archive.read(order).decode() != sys.byteorder:
            raise ValueError(f"its numbers are not {sys.byteorder}-endian")
        super().__init__(io.BytesIO(archive.read(main[0])))

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return self._rebuild_parameter
        if module == "torch" and name in STORAGES:
            return name
        raise _Refused(f"`{module}.{name}`")

    def persistent_load(self, pid: Any, /) -> _Storage:
        kind, storage, key, _device, numel = pid
        if kind != "storage" or not (isinstance(storage, str) and isinstance(key, str) and type(numel) is int):
            raise _Refused(f"persistent object {pid!r}")
        dtype = STORAGES[storage]
        info = self._entries[f"{self._folder}data/{key}"]
        nbytes = numel * dtype.itemsize
        if info.compress_type != zipfile.ZIP_STORED or not 0 <= nbytes <= info.file_size:
            raise ValueError(f"storage {key} has {info.file_size} bytes instead of {nbytes}, or is compressed")
        return _Storage(dtype, self._data_offset(info), numel)

    def _data_offset(self, info: zipfile.ZipInfo) -> int:
        """Where the bytes of an entry begin: behind its local header, whose name and extra field vary in length."""
        with self._path.open("rb") as file:
            file.seek(info.header_offset)
            header = file.read(30)
        offset = (
            info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        )
        if offset + info.file_size > self._path.stat().st_size:
            raise ValueError(f"{info.filename} ends behind the file's end")
        return offset

    def _rebuild_tensor(self, storage: Any, offset: Any, shape: Any, strides: Any, *_grad_and_hooks: Any) -> Tensor:
        numbers = (offset, *shape, *strides)
        if not isinstance(storage, _Storage) or len(shape) != len(strides):
            raise _Refused(f"a tensor made of {type(storage).__name__}")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"a tensor of shape {shape} with strides {strides} at {offset}")
        last = offset + sum((length - 1) * stride for length, stride in zip(shape, strides))
        if 0 not in shape and last >= storage.numel:
            raise ValueError(f"a tensor of shape {shape} ends behind its storage of {storage.numel} numbers")
        return Tensor(tuple(shape), storage.dtype, partial(_read, self._path, storage, offset, shape, strides))

    def _rebuild_parameter(self, data: Any, *_grad_and_hooks: Any) -> Tensor:
        if not isinstance(data, Tensor):
            raise _Refused(f"a parameter made of {type(data).__name__}")
        return data


def _read(path: Path, storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    itemsize = storage.dtype.itemsize
    values = map_bytes(path, storage.offset, storage.numel * itemsize).view(storage.dtype)
    byte_strides = tuple(stride * itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(values[offset:], shape, byte_strides, writeable=False)


def _of_torch(tensor: Any) -> Tensor:
    """A record of a PyTorch tensor; NumPy has no bfloat16 of its own, so those travel as 16-bit integers."""
    import torch

    if tensor.dtype == torch.bfloat16:
        dtype = np.dtype(ml_dtypes.bfloat16)
        return Tensor(tuple(tensor.shape), dtype, lambda: tensor.view(torch.int16).numpy().view(dtype))
    return Tensor(tuple(tensor.shape), torch.empty(0, dtype=tensor.dtype).numpy().dtype, tensor.numpy)


def _check_dictionary(path: Path, content: Any, kind: type) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds a {type(content).__name__}, not a dictionary of tensors")
    others = [repr(name) for name, value in content.items() if not (isinstance(name, str) and isinstance(value, kind))]
    if others:
        raise ValueError(f"{path.name} is no dictionary of tensors: it also holds {', '.join(others)}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
