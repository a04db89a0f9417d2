"""train.task_run: both tasks are learned from the command line, in a few seconds each, and a run of one goes on."""

import json
import tomllib
from pathlib import Path

import pytest

from train.__main__ import main
from train.metrics import read_metrics

CONFIGS = Path(__file__).parent.parent / "configs"
SMALL = [
    "--n-layer", "2", "--batch-size", "32", "--warmup-steps", "20", "--weight-decay", "0", "--log-every", "50",
    "--eval-batches", "8",
]  # fmt: skip
INDUCTION = [
    "--task", "induction_heads", "--vocab-size", "8", "--seq-len", "16", "--d-model", "32", "--lr", "5e-3",
    "--steps", "200", "--decay-steps", "200", "--eval-every", "100",
]  # fmt: skip
COPYING = [
    "--task", "selective_copying", "--vocab-size", "16", "--seq-len", "20", "--memorize-tokens", "4", "--d-model", "64",
    "--lr", "4e-3", "--steps", "400", "--decay-steps", "400", "--eval-every", "200",
]  # fmt: skip


def train(run_dir, *arguments):
    return main([*arguments, *SMALL, "--run-dir", str(run_dir)])


def accuracies(run_dir):
    records = read_metrics(run_dir / "metrics.jsonl")
    return {record["step"]: record["val_accuracy"] for record in records if "val_accuracy" in record}


@pytest.mark.parametrize("arguments", [INDUCTION, COPYING], ids=["induction heads", "selective copying"])
def test_the_task_is_learned(tmp_path, capsys, arguments):
    assert train(tmp_path, *arguments) == 0
    reached = list(accuracies(tmp_path).values())
    assert len(reached) == 2
    assert reached[-1] > 0.9
    assert {path.name for path in tmp_path.iterdir()} == {"config.toml", "metrics.jsonl", "loss.png", "checkpoints"}
    assert tomllib.loads((tmp_path / "config.toml").read_text())["task"] == arguments[1]
    out = capsys.readouterr().out
    for words in (
        arguments[1].replace("_", " "),
        "of the answers would be right",
        "/" + arguments[arguments.index("--steps") + 1] + " | loss",
        f"| val_accuracy {reached[0]:.2%} |",
        f"{reached[-1]:.2%} of the answers on held-out sequences are right",
    ):
        assert words in out


TINY = [
    "--task", "induction_heads", "--vocab-size", "8", "--seq-len", "40", "--min-seq-len", "10", "--d-model", "8",
    "--n-layer", "1", "--d-state", "2", "--batch-size", "2", "--eval-every", "2", "--eval-batches", "2",
]  # fmt: skip


def test_four_steps_are_two_and_two_more(tmp_path):
    def records(run_dir):
        kept = [{k: v for k, v in r.items() if k not in ("step_ms", "tokens_per_s")} for r in read_metrics(run_dir)]
        return json.dumps(kept)

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*TINY, "--steps", "4", "--run-dir", str(whole)]) == 0
    assert main([*TINY, "--steps", "2", "--run-dir", str(parts)]) == 0
    assert main(["--resume", "--run-dir", str(parts), "--steps", "4"]) == 0
    assert records(whole / "metrics.jsonl") == records(parts / "metrics.jsonl")


def test_another_task_is_not_gone_on_with(tmp_path, capsys):
    assert main([*TINY, "--steps", "1", "--run-dir", str(tmp_path)]) == 0
    assert main(["--resume", "--run-dir", str(tmp_path), "--steps", "2", "--seq-len", "48"]) == 0
    assert "is not the one that this run began with" in capsys.readouterr().out


def test_mistakes_are_one_message_and_leave_nothing(tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert main([*TINY, "--data", "text.txt", "--run-dir", str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert "--data is for --task lm" in error
    assert "Traceback" not in error
    assert not run_dir.exists()
