"""Two processes of `python -m train --distributed` on one machine learn what one does, and write one run."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from train.metrics import read_metrics
from train.resume import find_checkpoint

ROOT = Path(__file__).parent.parent
SMALL = [
    "--scan", "sequential", "--d-model", "16", "--n-layer", "1", "--d-state", "4", "--seq-len", "32",
    "--batch-size", "4", "--steps", "4", "--eval-every", "4", "--eval-batches", "2", "--sample-tokens", "0",
]  # fmt: skip
# Joins the processes by hand, where on a cluster `jax.distributed` finds out by itself.
JOIN = """
import sys, jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from train.__main__ import main
sys.exit(main(sys.argv[3:]))
"""


def free_port():
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return sock.getsockname()[1]


def start(code, arguments, log):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-c", code, *arguments]
    with log.open("w") as file:
        return subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"line %d of a text that counts to %d\n" % (i, i * i) for i in range(200)))
    return path


def start_two(folder, arguments):
    """The two, and the files of what they say."""
    address = f"localhost:{free_port()}"
    logs = [folder / f"process-{k}.log" for k in range(2)]
    return [start(JOIN, [address, str(k), "--distributed", *arguments], log) for k, log in enumerate(logs)], logs


def run_two(folder, arguments):
    """What the two said, and their exit codes."""
    processes, logs = start_two(folder, arguments)
    codes = [process.wait(timeout=300) for process in processes]
    return [log.read_text() for log in logs], codes


def test_two_processes_train_as_one(text, tmp_path):
    arguments = ["--data", str(text), *SMALL]
    two, one = tmp_path / "two", tmp_path / "one"
    said, codes = run_two(tmp_path, [*arguments, "--mesh", "data=2", "--run-dir", str(two)])
    assert codes == [0, 0], said
    code = "import sys; from train.__main__ import main; sys.exit(main(sys.argv[1:]))"
    assert start(code, [*arguments, "--run-dir", str(one)], tmp_path / "one.log").wait(timeout=300) == 0
    got, want = (read_metrics(folder / "metrics.jsonl") for folder in (two, one))
    assert [record["step"] for record in got] == [1, 2, 3, 4, 4]
    for a, b in zip(got, want, strict=True):
        name = "loss" if "loss" in a else "val_bpb"
        assert a[name] == pytest.approx(b[name], rel=1e-5)
    # Only the first one speaks, and the checkpoint is one run's.
    assert "2 of 2 x cpu" in said[0]
    assert "2 processes; data 2" in said[0]
    assert "step 4/4" in said[0]
    assert "step" not in said[1]
    assert [path.name for path in (two / "checkpoints").iterdir() if path.name.isdecimal()] == ["4"]


def test_a_mistake_of_the_first_is_everybodys(text, tmp_path):
    """The folder is tried by the first process alone; the others end with its message and do not wait for it."""
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "config.toml").write_text("")
    said, codes = run_two(tmp_path, ["--data", str(text), *SMALL, "--mesh", "data=2", "--run-dir", str(taken)])
    assert codes == [2, 2]
    assert all("already holds a run" in words for words in said)


def test_a_signal_to_one_of_them_ends_both_with_all_saved(text, tmp_path):
    run_dir = tmp_path / "run"
    arguments = ["--data", str(text), *SMALL, "--mesh", "data=2", "--run-dir", str(run_dir)]
    processes, logs = start_two(tmp_path, [*arguments, "--steps", "100000", "--eval-every", "100000"])
    metrics = run_dir / "metrics.jsonl"
    while processes[0].poll() is None and not (metrics.exists() and metrics.stat().st_size > 2000):
        time.sleep(0.05)
    processes[1].terminate()
    codes = [process.wait(timeout=300) for process in processes]
    said = [log.read_text() for log in logs]
    assert codes == [1, 128 + signal.SIGTERM], said
    step = read_metrics(metrics)[-1]["step"]
    assert f"Another process ended the run after step {step}. Everything up to here is saved." in said[0]
    assert f"SIGTERM after step {step}. Everything up to here is saved." in said[1]
    assert find_checkpoint(run_dir).step == step
