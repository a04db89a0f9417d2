import pytest

from mamba_jax.atomic import replacing


def test_what_was_written_takes_the_place(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(KeyError), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_says_which_file(tmp_path):
    path = tmp_path / "a.json"
    with pytest.raises(OSError, match=r"a\.json"), replacing(path):
        raise OSError(28, "No space left on device")
