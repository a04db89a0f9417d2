"""A run that is killed, however often and wherever it stands, and resumed, is the run that was never killed.

Each run is a process of its own, forked from a server that has the modules imported.
"""

import multiprocessing
import os
import random
import signal
import sys
import time

import pytest
from test_train_loop import SMALL, TEXT, checkpoint, losses

from train.__main__ import main
from train.resume import find_checkpoint

STEPS = 120
SETTINGS = [*SMALL, "--steps", str(STEPS), "--log-every", "50", "--eval-every", "40", "--checkpoint-every", "7"]


def command(arguments, log):
    """`python -m train` in a forked process, its output in a file."""
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(arguments))


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """start(run_dir) begins or resumes the run in that folder: one command does both."""
    folder = tmp_path_factory.mktemp("kill")
    (folder / "text.txt").write_bytes(TEXT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train.launch", "train.text_run"])

    def start(run_dir):
        run_dir.mkdir(exist_ok=True)
        arguments = ["--data", str(folder / "text.txt"), "--run-dir", str(run_dir), "--resume", *SETTINGS]
        process = context.Process(target=command, args=(arguments, f"{run_dir}.log"))
        process.start()
        return process

    return start


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    """The run that was never killed, and how long it took in seconds."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    begun = time.perf_counter()
    finish(start(run_dir))
    return run_dir, time.perf_counter() - begun


def finish(process):
    process.join()
    assert process.exitcode == 0


def wait_for_step(process, run_dir, step):
    """Until the run has written the line of a step, or has ended."""
    while process.is_alive():
        path = run_dir / "metrics.jsonl"
        if path.exists() and f'{{"step": {step}, ' in path.read_text():
            return
        time.sleep(0.002)


def assert_same_run(run_dir, undisturbed):
    assert losses(run_dir) == losses(undisturbed)
    assert checkpoint(run_dir, STEPS) == checkpoint(undisturbed, STEPS)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments(start, undisturbed, tmp_path, kills):
    run_dir, (expected, seconds) = tmp_path / "run", undisturbed
    draws, reached = random.Random(kills), []
    for number in range(kills):
        process = start(run_dir)
        if number % 3 == 0:
            # Any moment, most of them while it starts.
            process.join(draws.uniform(0, seconds))
        else:
            # Among the steps and the checkpoints of the part that this life is to reach.
            last = STEPS * (number + 1) // (kills + 1)
            wait_for_step(process, run_dir, draws.randint(STEPS * number // (kills + 1) + 1, last))
            process.join(draws.uniform(0, 0.05))
        process.kill()
        process.join()
        found = find_checkpoint(run_dir)
        assert found.damaged == {}
        reached.append(found.step or 0)
    assert reached == sorted(reached)
    assert reached[-1] > STEPS // 2
    finish(start(run_dir))
    assert_same_run(run_dir, expected)


def test_sigterm_saves_where_it_comes(start, undisturbed, tmp_path):
    run_dir = tmp_path / "run"
    process = start(run_dir)
    wait_for_step(process, run_dir, 30)
    process.terminate()
    process.join()
    assert process.exitcode == 128 + signal.SIGTERM
    step = find_checkpoint(run_dir).step
    assert step >= 30
    assert f"SIGTERM after step {step}. Everything up to here is saved." in (tmp_path / "run.log").read_text()
    assert losses(run_dir)[-1]["step"] == step
    finish(start(run_dir))
    assert_same_run(run_dir, undisturbed[0])
