"""train.data: which files are read, what is held out, and that batches depend on (seed, step) alone."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest

from train.data import find_files, load_corpus, split_files, training_batch, validation_batches
from train.errors import UsageError

TEXT = np.arange(256, dtype=np.uint8)


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


def test_files_that_do_not_decode_are_left_out(tmp_path):
    make(tmp_path, a=b"a" * 50, b=b"\xff\xfe", c=b"c" * 50)
    corpus = load_corpus(str(tmp_path), 0.5, 8)
    assert corpus.n_left_out == 1
    assert corpus.train.tobytes() == b"a" * 50
    assert corpus.validation.tobytes() == b"c" * 50


@pytest.mark.parametrize(
    ("lengths", "fraction", "train", "held_out"),
    [
        ([10, 10, 10, 10], 0.5, [10, 10], [10, 10]),
        ([10, 10, 10, 10], 0.49, [10, 10, 10], [10]),
        ([1, 99], 0.1, [1, 89], [10]),
        ([100], 0.25, [75], [25]),
        ([90, 1, 1, 8], 0.1, [90], [1, 1, 8]),
    ],
)
def test_the_tail_of_whole_files_is_held_out(lengths, fraction, train, held_out):
    parts = split_files([b"x" * length for length in lengths], fraction)
    assert [list(map(len, part)) for part in parts] == [train, held_out]


def test_batches_are_windows_with_the_next_byte_as_target():
    batch = training_batch(TEXT, seed=0, step=1, batch_size=64, seq_len=16)
    assert batch.tokens.shape == batch.targets.shape == (64, 16)
    assert batch.tokens.dtype == batch.targets.dtype == np.int32
    np.testing.assert_array_equal(batch.tokens + 1, batch.targets)
    assert len(set(batch.tokens[:, 0])) > 32


def test_every_place_can_be_drawn_and_none_beyond():
    firsts = {
        first
        for step in range(200)
        for first in training_batch(TEXT[:20], seed=0, step=step, batch_size=4, seq_len=16).tokens[:, 0].tolist()
    }
    assert firsts == {0, 1, 2, 3}


def test_batches_depend_on_seed_and_step_alone():
    def tokens(seed, step):
        return training_batch(TEXT, seed=seed, step=step, batch_size=8, seq_len=16).tokens.tolist()

    expected = tokens(3, 5)
    tokens(3, 6)
    assert tokens(3, 5) == expected
    assert tokens(3, 6) != expected
    assert tokens(4, 5) != expected


def test_batches_are_the_same_in_every_version():
    # A resumed run must read what the interrupted one would have read, under another NumPy too.
    batch = training_batch(TEXT, seed=1, step=2, batch_size=4, seq_len=8)
    assert batch.tokens[:, 0].tolist() == [159, 111, 232, 106]


def test_validation_covers_the_held_out_text_evenly():
    batches = list(validation_batches(TEXT, n_batches=4, batch_size=4, seq_len=15))
    starts = np.concatenate([batch.tokens[:, 0] for batch in batches])
    np.testing.assert_array_equal(starts, np.arange(0, 241, 16))
    assert batches[-1].targets[-1, -1] == 255
    # A text of one sequence gives that sequence.
    (only,) = validation_batches(TEXT[:17], n_batches=1, batch_size=2, seq_len=16)
    np.testing.assert_array_equal(only.tokens, np.stack([TEXT[:16]] * 2))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({}, "there is no file in it"),
        ({"a": b""}, "there is no text in it"),
        ({"a": b"\xff"}, "none of its 1 files is UTF-8 text"),
        ({"a": b"x" * 60}, r"validation part has 6 bytes, but one sequence takes 17"),
        ({"a": b"x" * 17}, r"training part has 16 bytes"),
    ],
)
def test_text_that_will_not_do_is_named(tmp_path, texts, message):
    with pytest.raises(UsageError, match=message) as error:
        load_corpus(make(tmp_path, **texts), 0.1, 16)
    assert str(tmp_path) in str(error.value)


def test_missing_data_is_named():
    with pytest.raises(UsageError, match="--data is empty"):
        find_files("")
    with pytest.raises(UsageError, match=r"--data nowhere/\*\.txt: no such file or folder"):
        find_files("nowhere/*.txt")


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    (tmp_path / "a").touch()
    with pytest.raises(UsageError, match=r"cannot read .*a: Permission denied"):
        load_corpus(str(tmp_path), 0.1, 8)
