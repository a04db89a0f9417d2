"""train.tokens: parts as one sequence, of which only what is asked for is read, and files that change meanwhile."""

import numpy as np
import pytest

from train.errors import TrainingStopped
from train.tokens import Part, Tokens, open_token_file


def tokens_of(*lengths):
    """Parts of these lengths, which together count from 0."""
    parts = np.split(np.arange(sum(lengths), dtype=np.uint16), np.cumsum(lengths)[:-1])
    return Tokens([Part(part) for part in parts])


@pytest.mark.parametrize("lengths", [(20,), (7, 13), (1, 2, 0, 3, 14), (0, 20)])
def test_windows_cross_from_part_to_part(lengths):
    tokens = tokens_of(*lengths)
    assert len(tokens) == 20
    starts = np.arange(20 - 8 + 1)
    windows = tokens.windows(starts, 8)
    assert windows.dtype == np.int32
    np.testing.assert_array_equal(windows, starts[:, None] + np.arange(8))


@pytest.mark.parametrize("place", range(0, 21, 4))
def test_split(place):
    before, after = tokens_of(7, 13).split(place)
    parts = [part.windows(np.zeros(min(1, len(part)), int), len(part)).ravel() for part in (before, after)]
    assert list(map(len, parts)) == [place, 20 - place]
    np.testing.assert_array_equal(np.concatenate(parts), np.arange(20))


def test_fingerprints_differ_where_texts_do():
    assert tokens_of(20).fingerprint() == tokens_of(20).fingerprint()
    others = [tokens_of(21), tokens_of(10, 10), Tokens([Part(np.arange(1, 21, dtype=np.uint16))])]
    assert len({tokens.fingerprint() for tokens in [tokens_of(20), *others]}) == 4


def test_a_file_that_shrinks_or_goes_stops_the_run_before_it_is_read(tmp_path):
    path = tmp_path / "t.bin"
    np.arange(10_000, dtype="<u2").tofile(path)
    tokens = open_token_file(path, "auto")
    last = np.array([9_990])
    np.testing.assert_array_equal(tokens.windows(last, 10)[0], np.arange(9_990, 10_000))
    with path.open("r+b") as file:
        file.truncate(5_000)
    with pytest.raises(TrainingStopped, match=r"t\.bin shrank from 20,000 to 5,000 bytes while in use"):
        tokens.windows(last, 10)
    path.unlink()
    with pytest.raises(TrainingStopped, match=r"t\.bin can no longer be read: No such file"):
        tokens.windows(last, 10)


def test_large_files_are_sampled(tmp_path):
    path = tmp_path / "t.bin"
    np.zeros(1_000_000, "<u2").tofile(path)
    before = open_token_file(path, "auto").fingerprint()
    with path.open("r+b") as file:
        file.seek(-2, 2)
        file.write(b"\1\0")
    assert open_token_file(path, "auto").largest() == 1
    assert open_token_file(path, "auto").fingerprint() != before
