"""train.loop and the command: whole runs, small ones, from the first line to the files they leave."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

from train.__main__ import main
from train.loop import Run
from train.metrics import read_metrics
from train.text_run import TextRun

TEXT = b"".join(b"line %d of a text that repeats itself, and counts to %d\n" % (i, i * i) for i in range(300))
SMALL = [
    "--scan", "sequential", "--d-model", "16", "--n-layer", "2", "--d-state", "4", "--seq-len", "32",
    "--batch-size", "2", "--log-every", "1", "--eval-every", "4", "--eval-batches", "2", "--checkpoint-every", "5",
    "--sample-tokens", "8",
]  # fmt: skip
TIMES = ("step_ms", "tokens_per_s")
STEP_KEYS = {"step", "loss", "bpb", "lr", "grad_norm", "step_ms", "tokens_per_s", "mfu", "memory_gib"}


def run(text, run_dir, *arguments):
    return main(["--data", str(text), "--run-dir", str(run_dir), *SMALL, *arguments])


def losses(run_dir):
    """Everything in metrics.jsonl but the times."""
    records = read_metrics(run_dir / "metrics.jsonl")
    return [{name: v for name, v in record.items() if name not in TIMES} for record in records]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture(scope="module")
def ten(text, tmp_path_factory):
    """A run of ten steps."""
    run_dir = tmp_path_factory.mktemp("ten")
    assert run(text, run_dir, "--steps", "10") == 0
    return run_dir


def test_run_leaves_its_files(ten):
    assert {path.name for path in ten.iterdir()} == {
        "config.toml",
        "metrics.jsonl",
        "loss.png",
        "sample.txt",
        "checkpoints",
    }
    assert sorted(path.name for path in (ten / "checkpoints").iterdir()) == ["10", "5"]
    assert (ten / "sample.txt").read_bytes().startswith(b"\n")
    assert len((ten / "sample.txt").read_bytes()) == 9
    assert tomllib.loads((ten / "config.toml").read_text())["steps"] == 10


def test_metrics_hold_every_step_and_validation(ten):
    lines = [json.loads(line) for line in (ten / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    validations = [line for line in lines if "val_bpb" in line]
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert [line["step"] for line in validations] == [4, 8, 10]
    assert all(set(line) == STEP_KEYS for line in steps)
    assert all(set(line) == {"step", "val_bpb", "bigram_bpb"} for line in validations)
    assert all(line["bpb"] == pytest.approx(line["loss"] / np.log(2)) for line in steps)
    assert validations[-1]["val_bpb"] < validations[0]["val_bpb"]


def test_ten_steps_are_five_and_five_more(text, ten, tmp_path):
    # orbax 1402, flax 4423: resume off by one, or not exact
    assert run(text, tmp_path, "--steps", "5") == 0
    assert main(["--resume", "--run-dir", str(tmp_path), "--steps", "10"]) == 0
    steps = [[r for r in losses(path) if "loss" in r] for path in (tmp_path, ten)]
    assert steps[0] == steps[1]
    assert losses(tmp_path)[-1] == losses(ten)[-1]
    assert (tmp_path / "sample.txt").read_bytes() == (ten / "sample.txt").read_bytes()
    assert checkpoint(tmp_path, 10) == checkpoint(ten, 10)


def checkpoint(run_dir, step):
    """All arrays of a checkpoint, as bytes."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(run_dir / "checkpoints" / str(step) / "state")
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)]


def test_killed_run_goes_on_from_its_last_checkpoint(text, ten, tmp_path, monkeypatch):
    log_step = Run._log_step

    def log_or_die(self, step, *arguments):
        log_step(self, step, *arguments)
        if step == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_log_step", log_or_die)
        assert run(text, tmp_path, "--steps", "10") == 130
    assert losses(tmp_path)[-1]["step"] == 7
    assert main(["--resume", "--run-dir", str(tmp_path)]) == 0
    assert losses(tmp_path) == losses(ten)


def test_run_killed_before_its_first_checkpoint_begins_again(text, ten, tmp_path, capsys):
    (tmp_path / "config.toml").write_bytes((ten / "config.toml").read_bytes())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "lo')
    assert main(["--resume", "--run-dir", str(tmp_path)]) == 0
    assert "no checkpoint yet: beginning at step 0" in capsys.readouterr().out
    assert losses(tmp_path) == losses(ten)


def test_finished_run_has_nothing_to_go_on_with(ten, capsys):
    before = losses(ten)
    assert main(["--resume", "--run-dir", str(ten)]) == 0
    assert "at step 10 of 10 already" in capsys.readouterr().out
    assert losses(ten) == before


@pytest.mark.parametrize("scan", ["associative", "pallas"])
def test_every_scan_reaches_the_same_losses(text, ten, tmp_path, scan):
    assert run(text, tmp_path, "--steps", "10", "--scan", scan) == 0
    got, want = ([r["loss"] for r in losses(path) if "loss" in r] for path in (tmp_path, ten))
    np.testing.assert_allclose(got, want, atol=1e-3)


def test_lines_say_what_happens(text, tmp_path, capsys):
    assert run(text, tmp_path, "--steps", "2") == 0
    out = capsys.readouterr().out
    for words in (
        f"jax {jax.__version__}",
        "parameters: 2 Mamba blocks",
        "sequential, as asked for",
        "64 tokens a step",
        "step 1: compiling the training step, once ... ",
        "step 1/2 | loss 5.",
        "tok/s | mfu n/a | mem n/a | ETA",
        "validation at step 2 | val_bpb",
        "sample",
        "bits per byte on held-out text",
    ):
        assert words in out


def test_bad_number_stops_with_the_step_and_the_checkpoint(text, tmp_path, capsys, monkeypatch):
    log_step = Run._log_step

    def spoil(self, step, *arguments):
        log_step(self, step, *arguments)
        if step == 6:
            self.params = jax.tree.map(lambda leaf: leaf * np.nan, self.params)

    monkeypatch.setattr(Run, "_log_step", spoil)
    assert run(text, tmp_path, "--steps", "10") == 1
    error = capsys.readouterr().err
    assert "At step 7 the loss is nan" in error
    assert f"The last good checkpoint is of step 5: {tmp_path / 'checkpoints' / '5'}" in error
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert (last["step"], last["loss"]) == (7, None)


def test_bad_steps_can_be_left_out(text, tmp_path, capsys, monkeypatch):
    batch = TextRun._batch

    def spoil(self, step, rows):
        got = batch(self, step, rows)
        # A token outside the vocabulary: its loss is no number.
        return got._replace(tokens=np.full_like(got.tokens, 300)) if step in (3, 6) else got

    monkeypatch.setattr(TextRun, "_batch", spoil)
    assert run(text, tmp_path, "--steps", "7", "--on-bad-loss", "skip") == 0
    assert "At step 3 the loss is nan and the gradient's norm nan: left out" in capsys.readouterr().out
    steps = [r for r in losses(tmp_path) if "loss" in r]
    assert [r["step"] for r in steps if r["loss"] is None] == [3, 6]
    # A step left out does not count for the schedule.
    assert steps[2]["lr"] == steps[3]["lr"] < steps[4]["lr"]


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_and_nothing_is_lost(text, ten, tmp_path, capsys, monkeypatch, number, exit_code):
    log_step = Run._log_step

    def log_and_signal(self, step, *arguments):
        log_step(self, step, *arguments)
        if step == 7:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_log_step", log_and_signal)
        assert run(text, tmp_path, "--steps", "10") == exit_code
    error = capsys.readouterr().err
    assert f"{number.name} after step 7. Everything up to here is saved" in error
    assert f"The last good checkpoint is of step 7: {tmp_path / 'checkpoints' / '7'}" in error
    assert main(["--resume", "--run-dir", str(tmp_path)]) == 0
    assert losses(tmp_path) == losses(ten)
    assert checkpoint(tmp_path, 10) == checkpoint(ten, 10)


def data_file(step):
    """The largest file of a checkpoint, which holds the arrays."""
    return max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(step):
    data = bytearray(data_file(step).read_bytes())
    data[len(data) // 2] ^= 1
    data_file(step).write_bytes(data)


DAMAGES = {
    "flipped bit": flip,
    "truncated": lambda step: data_file(step).write_bytes(data_file(step).read_bytes()[:100]),
    "deleted": lambda step: data_file(step).unlink(),
    "meta deleted": lambda step: shutil.rmtree(step / "meta"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(ten, tmp_path, capsys, damage):
    run_dir = shutil.copytree(ten, tmp_path / "run")
    damage(run_dir / "checkpoints" / "10")
    files = len(list((run_dir / "checkpoints" / "10").rglob("*")))
    assert main(["--resume", "--run-dir", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "the checkpoint of step 10 is damaged: " in out
    assert "loading the checkpoint of step 5" in out
    assert losses(run_dir) == losses(ten)
    assert checkpoint(run_dir, 10) == checkpoint(ten, 10)
    assert len(list((run_dir / "checkpoints" / "10.damaged-1").rglob("*"))) == files


def test_a_full_disk_ends_the_run_and_the_last_checkpoint_stays(text, ten, tmp_path):
    # A limit on the size of a file is a full disk for whatever is larger than it; metrics.jsonl is not.
    assert run(text, tmp_path, "--steps", "5") == 0
    command = f"ulimit -f 50; exec {sys.executable} -m train --resume --run-dir {tmp_path} --steps 10"
    root = Path(__file__).parent.parent
    done = subprocess.run(["sh", "-c", command], cwd=root, capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        f"The checkpoint of step 10 could not be written to {tmp_path / 'checkpoints'}: File too large" in done.stderr
    )
    assert "The last good checkpoint is of step 5: " in done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert main(["--resume", "--run-dir", str(tmp_path), "--steps", "10"]) == 0
    steps = [[record for record in losses(path) if "loss" in record] for path in (tmp_path, ten)]
    assert steps[0] == steps[1]
    assert checkpoint(tmp_path, 10) == checkpoint(ten, 10)


def test_a_data_file_that_shrinks_ends_the_run_with_all_saved(tmp_path, capsys, monkeypatch):
    data, log_step = tmp_path / "text.bin", Run._log_step
    whole = np.frombuffer(TEXT, np.uint8).astype("<u2")
    whole.tofile(data)

    def log_and_shrink(self, step, *arguments):
        log_step(self, step, *arguments)
        if step == 6:
            whole[:1000].tofile(data)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_log_step", log_and_shrink)
        assert run(data, tmp_path / "run", "--steps", "10") == 1
    error = capsys.readouterr().err
    assert "text.bin shrank from" in error
    assert "Everything up to here is saved" in error
    step = int(error.partition("The last good checkpoint is of step ")[2].partition(":")[0])
    assert step >= 6
    # It is not gone on with until the data are back.
    assert main(["--resume", "--run-dir", str(tmp_path / "run")]) == 2
    assert "shrank" in capsys.readouterr().err
    whole.tofile(data)
    assert main(["--resume", "--run-dir", str(tmp_path / "run")]) == 0
    assert f"loading the checkpoint of step {step}" in capsys.readouterr().out


def test_no_whole_checkpoint_ends_the_command_and_changes_nothing(ten, tmp_path, capsys):
    run_dir = shutil.copytree(ten, tmp_path / "run")
    for step in ("5", "10"):
        flip(run_dir / "checkpoints" / step)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert main(["--resume", "--run-dir", str(run_dir), "--steps", "20"]) == 1
    error = capsys.readouterr().err
    assert "None of the checkpoints in" in error
    assert "Traceback" not in error
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "--data nowhere: no such file or folder"),
        (["--seq-len", "5000"], "one sequence takes 5001"),
        (["--config", "none.toml"], "none.toml: No such file"),
        (["--steps", "0"], "--steps 0: 1 or more"),
    ],
)
def test_mistakes_are_one_message_and_leave_nothing(text, tmp_path, capsys, arguments, message):
    assert run(text, tmp_path / "run", *arguments) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert "Traceback" not in out + err
    assert not (tmp_path / "run").exists()


def test_another_model_is_refused_and_the_run_left_alone(ten, capsys):
    before = {path: path.read_bytes() for path in ten.rglob("*") if path.is_file()}
    assert main(["--resume", "--run-dir", str(ten), "--d-model", "32", "--n-layer", "1", "--steps", "20"]) == 2
    error = capsys.readouterr().err
    assert "d_model: 16 there, 32 asked for" in error
    assert "n_layer: 2 there, 1 asked for" in error
    assert {path: path.read_bytes() for path in ten.rglob("*") if path.is_file()} == before


def test_existing_run_is_not_written_over(text, ten, capsys):
    before = (ten / "metrics.jsonl").read_bytes()
    assert run(text, ten, "--steps", "10") == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (ten / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"), [(["--stps", "3"], "--steps"), (["--data", "nowhere"], "no such file or folder")]
)
def test_command_exits_with_2(arguments, message):
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-m", "train", *arguments], cwd=root, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_run_goes_on_over_another_mesh(text, ten, tmp_path):
    """Five steps over rows and length, five more over shared parameters and channels: the losses of one device."""
    assert run(text, tmp_path, "--steps", "5", "--mesh", "data=2,seq=2") == 0
    assert main(["--resume", "--run-dir", str(tmp_path), "--steps", "10", "--mesh", "fsdp=2,tensor=2"]) == 0
    got, want = ([r["loss"] for r in losses(path) if "loss" in r] for path in (tmp_path, ten))
    np.testing.assert_allclose(got, want, rtol=1e-4)
