"""train.plot: runs over each other in one picture, and what is said of those that cannot be drawn."""

import json

import pytest

from train.plot import main


def write_run(folder, score="bpb", steps=30):
    folder.mkdir()
    records = [{"step": step, score: 8 / step, "step_ms": 10.0, "tokens_per_s": 100.0} for step in range(1, steps + 1)]
    records += [{"step": steps, f"val_{score}": 1.0}] * (steps > 0)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(folder)


@pytest.mark.parametrize("x", ["step", "tokens", "hours"])
def test_runs_are_drawn(tmp_path, capsys, x):
    runs = [write_run(tmp_path / name) for name in ("one", "two")]
    out = tmp_path / "runs.png"
    assert main([*runs, "--out", str(out), "--x", x]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{out}: one, two\n"


def test_mistakes(tmp_path, capsys):
    run, tokens, empty = (
        write_run(tmp_path / "run"), write_run(tmp_path / "tokens", "bpt"), write_run(tmp_path / "empty", steps=0),
    )  # fmt: skip
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text('{"step": 1, "bpb": 2}\n{"step"\n')
    for arguments, message in (
        ([], "name one run or more"),
        ([str(tmp_path / "none")], "none: No such file or directory"),
        ([run, tokens], "some runs have bits per byte and some bits per token"),
        ([empty], "holds no training step"),
        ([str(damaged)], "damaged.jsonl: line 2 is no record of a step"),
        ([run, "--out", str(tmp_path / "no" / "such.png")], "No such file or directory"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
