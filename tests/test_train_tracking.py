"""train.tracking: numbers reach TensorBoard and Weights & Biases, and a missing library is named."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from train.config import TrainConfig
from train.errors import UsageError
from train.tracking import check_trackers, open_trackers

RECORDS = [{"step": 1, "loss": 2.0, "mfu": None}, {"step": 2, "loss": 1.5, "mfu": 0.4}]


def write(config, folder):
    trackers = open_trackers(config, folder, 0)
    for record in RECORDS:
        for tracker in trackers:
            tracker.write(record)
    for tracker in trackers:
        tracker.close()


def test_none_is_asked_for(tmp_path):
    check_trackers(TrainConfig())
    assert open_trackers(TrainConfig(), tmp_path, 0) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tensorboard": True},
            r"--tensorboard needs the library tensorboardX: pip install 'mamba-jax\[tensorboard\]'",
        ),
        ({"wandb": "project"}, r"--wandb needs the library wandb: pip install 'mamba-jax\[wandb\]'"),
    ],
)
def test_a_missing_library_is_named(monkeypatch, settings, message):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match=message):
        check_trackers(TrainConfig(**settings))


@pytest.mark.filterwarnings("ignore")
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    write(TrainConfig(tensorboard=True), tmp_path)
    (events,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    data = events.read_bytes()
    assert data.count(b"loss") == 2
    assert data.count(b"mfu") == 1


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    write(TrainConfig(wandb="project"), tmp_path)
    # Once more, as a resumed run does: it goes on with the same id.
    write(TrainConfig(wandb="project"), tmp_path)
    name = f"run-{(tmp_path / 'wandb-id.txt').read_text()}.wandb"
    assert {path.name for path in tmp_path.glob("wandb/offline-run-*/*.wandb")} == {name}


def test_weights_and_biases_gets_each_number_that_is_known(tmp_path, monkeypatch):
    run = SimpleNamespace(logged=[], log=lambda known, step: run.logged.append((step, known)), finish=lambda: None)

    def init(**arguments):
        assert arguments["config"]["lr"] == TrainConfig().lr
        assert (arguments["project"], arguments["resume"]) == ("project", "allow")
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=RuntimeError))
    write(TrainConfig(wandb="project"), tmp_path)
    assert run.logged == [(1, {"step": 1, "loss": 2.0}), (2, {"step": 2, "loss": 1.5, "mfu": 0.4})]
