"""train.resume: the newest checkpoint that is whole."""

import pytest

from mamba_jax.checkpoints.digests import write_digests
from train.errors import TrainingStopped
from train.resume import Found, find_checkpoint, set_aside


@pytest.fixture
def run_dir(tmp_path):
    for step in (5, 10, 9):
        folder = tmp_path / "checkpoints" / str(step)
        (folder / "state").mkdir(parents=True)
        (folder / "state" / "data").write_text("data")
        write_digests(folder)
    (tmp_path / "checkpoints" / "20.orbax-checkpoint-tmp").mkdir()
    return tmp_path


def damage(run_dir, *steps):
    for step in steps:
        (run_dir / "checkpoints" / str(step) / "state" / "data").write_text("date")


def test_the_newest_is_found(run_dir, tmp_path):
    assert find_checkpoint(run_dir) == Found(10, {})
    assert find_checkpoint(tmp_path / "nothing") == Found(None, {})


def test_damaged_ones_are_passed_over_and_named(run_dir):
    damage(run_dir, 10, 9)
    what = "state/data is not what was written"
    assert find_checkpoint(run_dir) == Found(5, {10: what, 9: what})
    damage(run_dir, 5)
    with pytest.raises(TrainingStopped, match=r"(?s)None of the checkpoints.*step 10: .*step 5: state/data is not"):
        find_checkpoint(run_dir)


def test_a_damaged_one_is_kept_under_another_name(run_dir):
    folder = run_dir / "checkpoints" / "10"
    aside = set_aside(folder)
    assert aside.name == "10.damaged-1"
    assert (aside / "state" / "data").read_text() == "data"
    folder.mkdir()
    assert set_aside(folder).name == "10.damaged-2"
    assert find_checkpoint(run_dir) == Found(9, {})
