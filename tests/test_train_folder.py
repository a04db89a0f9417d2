"""train.folder: no run is written over another, and --resume finds the one that is meant."""

import os

import pytest

from train.errors import UsageError
from train.folder import new_folder, resumed_folder


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_each_run_has_a_folder_of_its_own(tmp_path):
    assert [str(new_folder(None, name="bytes")) for _ in range(3)] == ["runs/bytes-1", "runs/bytes-2", "runs/bytes-3"]
    assert str(new_folder(None, name="other")) == "runs/other-1"


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "loss.png", "sample.txt", "checkpoints"])
def test_a_folder_with_a_run_is_refused(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("precious")
    with pytest.raises(UsageError, match="run already holds a run: add --resume"):
        new_folder("run", name="bytes")
    assert (tmp_path / "run" / name).read_text() == "precious"


def test_a_folder_with_something_else_is_used(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    assert str(new_folder("run", name="bytes")) == "run"
    assert str(new_folder("a/b/c", name="bytes")) == "a/b/c"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="--run-dir file: File exists"):
        new_folder("file", name="bytes")


def test_resume_means_the_folder_named_or_the_newest_run(tmp_path):
    for age, name in enumerate(("new", "old", "oldest")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.toml").touch()
        os.utime(folder / "config.toml", (1000 - age, 1000 - age))
    assert str(resumed_folder(None)) == "runs/new"
    assert str(resumed_folder("runs/old")) == "runs/old"


def test_nothing_to_resume_is_said():
    with pytest.raises(UsageError, match="there is no run under runs/"):
        resumed_folder(None)
    with pytest.raises(UsageError, match="there is no folder typo"):
        resumed_folder("typo")
