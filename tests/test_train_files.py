"""train.files: which files `--data` means."""

import sysconfig
from pathlib import Path

import pytest

from train.errors import UsageError
from train.files import find_files


def make(folder, **texts):
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    return str(folder)


def test_default_is_the_standard_library_without_tests_and_packages():
    root = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(root) for path in find_files(None)]
    assert files == sorted(files, key=lambda path: path.as_posix())
    assert Path("argparse.py") in files
    assert Path("json/decoder.py") in files
    assert not any({"site-packages", "test", "tests"} & set(path.parts) for path in files)


def test_folder_is_read_in_order_of_paths_and_deeply(tmp_path):
    (tmp_path / "b").mkdir()
    make(tmp_path, **{"c.txt": b"3", "a.txt": b"1", ".hidden": b"0"})
    make(tmp_path / "b", **{"x.txt": b"2"})
    assert [path.read_bytes() for path in find_files(str(tmp_path))] == [b"1", b"2", b"3"]
    assert [path.read_bytes() for path in find_files(str(tmp_path / "*.txt"))] == [b"1", b"3"]
    assert [path.read_bytes() for path in find_files(str(tmp_path / "c.txt"))] == [b"3"]


def test_missing_data_is_named():
    with pytest.raises(UsageError, match="--data is empty"):
        find_files("")
    with pytest.raises(UsageError, match=r"--data nowhere/\*\.txt: no such file or folder"):
        find_files("nowhere/*.txt")
