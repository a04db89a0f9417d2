"""mamba_jax.checkpoints.digests: every change of a file is found and named."""

import pytest

from mamba_jax.checkpoints.digests import DIGESTS, find_damage, write_digests


@pytest.fixture
def checkpoint(tmp_path):
    for name in ("state/manifest", "state/d/0", "meta/metadata"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"data of " + name.encode())
    write_digests(tmp_path)
    return tmp_path


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:3])


def test_a_whole_checkpoint(checkpoint):
    assert find_damage(checkpoint) is None
    # The files beside its folders are not the checkpoint's.
    (checkpoint / "commit_success.txt").write_text("written later")
    assert find_damage(checkpoint) is None


@pytest.mark.parametrize("name", ["state/manifest", "state/d/0", "meta/metadata"])
@pytest.mark.parametrize(
    ("damage", "found"), [(flip, "is not what was written"), (truncate, "is not what was written")]
)
def test_changed_files(checkpoint, name, damage, found):
    damage(checkpoint / name)
    assert find_damage(checkpoint) == f"{name} {found}"


def test_missing_files(checkpoint):
    (checkpoint / "state/d/0").unlink()
    assert find_damage(checkpoint) == "state/d/0 is missing"


@pytest.mark.parametrize("damage", [truncate, lambda path: path.write_text("[]")])
def test_changed_digests(checkpoint, damage):
    damage(checkpoint / DIGESTS)
    assert find_damage(checkpoint) == f"{DIGESTS} is not what was written"


def test_no_digests(checkpoint):
    (checkpoint / DIGESTS).unlink()
    assert find_damage(checkpoint) == f"{DIGESTS} is missing"
