"""PyTorch's files, read without PyTorch: no code in them runs, and every fault is named."""

import pickle

import numpy as np
import pytest
from checkpoint_files import (
    TIED,
    error_of,
    random_model,
)

from mamba_jax.checkpoints.torch_file import read_torch_zip


class Evil:
    """Would make a folder if anything in it ran."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


def replace_pickle(path, content):
    """The same zip archive with another data.pkl."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, content if name.endswith("/data.pkl") else data)


def test_code_in_a_pickle_is_refused(tmp_path, without_torch):
    random_model(TIED).save_pretrained(tmp_path, format="original")
    replace_pickle(tmp_path / "pytorch_model.bin", pickle.dumps({"a": Evil(tmp_path / "ran")}, protocol=2))
    message = error_of(tmp_path)
    assert "pytorch_model.bin was refused" in message and "mkdir`" in message
    assert not (tmp_path / "ran").exists()


def rebuild(storage=("storage", b"FloatStorage", "0", "cpu", 4), offset=0, shape=(4,), stride=(1,)):
    """A pickle of one tensor, made by hand from PyTorch's own parts."""
    _, kind, key, device, numel = storage

    def dump(value):
        return pickle.dumps(value, protocol=2)[2:-1]  # without its frame: protocol and stop

    parts = [
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((", dump("storage"), b"ctorch\n", kind, b"\n", dump(key),
        dump(device), dump(numel), b"tQ", dump(offset), dump(shape), dump(stride), b"\x89)tR.",
    ]  # fmt: skip
    tensor = b"".join(parts)
    return b"\x80\x02}" + dump("a") + tensor[2:-1] + b"s."


def write_zip(path, content, numbers=(1, 2, 3, 4), compression=0, byteorder=b"little"):
    import zipfile

    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("any name/data.pkl", content)
        archive.writestr("any name/byteorder", byteorder)
        archive.writestr("any name/data/0", np.asarray(numbers, np.float32).tobytes())


def test_reading_a_handmade_file(tmp_path):
    """Views of one storage too: a transposed matrix, and one that begins in the middle."""
    path = tmp_path / "a.bin"
    write_zip(path, rebuild(shape=(2, 2), stride=(1, 2)))
    np.testing.assert_array_equal(read_torch_zip(path)["a"].read(), [[1, 3], [2, 4]])
    write_zip(path, rebuild(offset=2, shape=(2,)))
    np.testing.assert_array_equal(read_torch_zip(path)["a"].read(), [3, 4])
    write_zip(path, rebuild(offset=4, shape=(0, 3), stride=(3, 1)))
    assert read_torch_zip(path)["a"].read().shape == (0, 3)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (rebuild(offset=1), "ends behind its storage"),
        (rebuild(offset=-1), "is damaged"),
        (rebuild(stride=(2,)), "ends behind its storage"),
        (rebuild(storage=("storage", b"FloatStorage", "0", "cpu", 5)), "16 bytes instead of 20"),
        (rebuild(storage=("storage", b"FloatStorage", "7", "cpu", 4)), "is damaged"),
        (rebuild(storage=("storage", b"QUInt8Storage", "0", "cpu", 4)), "refused.*torch.QUInt8Storage"),
        (b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.", "refused.*builtins.eval"),
        (b"\x80\x02ccollections\nOrderedDict\n}X\x01\x00\x00\x00akb.", "is damaged"),
        (pickle.dumps([1], protocol=2), "holds a list"),
        (pickle.dumps({"a": 1}, protocol=2), "also holds 'a'"),
        (b"\x80\x02}", "is damaged"),
    ],
)
def test_faulty_pickles(tmp_path, content, expected):
    path = tmp_path / "a.bin"
    write_zip(path, content)
    with pytest.raises(ValueError, match=expected):
        read_torch_zip(path)


def test_files_that_cannot_be_mapped(tmp_path):
    path = tmp_path / "a.bin"
    write_zip(path, rebuild(), compression=8)
    with pytest.raises(ValueError, match="compressed"):
        read_torch_zip(path)
    write_zip(path, rebuild(), byteorder=b"big")
    with pytest.raises(ValueError, match="endian"):
        read_torch_zip(path)
    path.write_bytes(pickle.dumps({}, protocol=2))
    with pytest.raises(ValueError, match=r"before version 1\.6, which only PyTorch reads"):
        read_torch_zip(path)
