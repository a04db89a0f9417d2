"""train.extrapolate: pieces are the whole sequence, and the command says what it found or what is missing."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from mamba_jax import MambaConfig, MambaLM
from train import extrapolate as module
from train.__main__ import main as train
from train.extrapolate import main, right_answers
from train.tasks import InductionHeads

TASK = InductionHeads(seq_len=64, vocab_size=3)


@pytest.fixture(scope="module")
def lm():
    return MambaLM(MambaConfig(vocab_size=3, d_model=8, n_layer=2, d_state=4), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of the task, of one step, and one of the other task."""
    folder = tmp_path_factory.mktemp("runs")
    small = [
        "--vocab-size",
        "8",
        "--d-model",
        "8",
        "--n-layer",
        "1",
        "--d-state",
        "2",
        "--steps",
        "1",
        "--seq-len",
        "32",
    ]
    assert train(["--task", "induction_heads", *small, "--run-dir", str(folder / "induction")]) == 0
    assert train(["--task", "selective_copying", *small, "--run-dir", str(folder / "copying")]) == 0
    return folder


def test_pieces_are_the_whole_sequence(lm, monkeypatch):
    pieces = []
    read = module._read

    def remember(graphdef, params, tokens, state):
        state, logits = read(graphdef, params, tokens, state)
        pieces.append((tokens, np.asarray(logits)))
        return state, logits

    monkeypatch.setattr(module, "_read", remember)
    share = right_answers(lm, TASK, 256, rows=40, seed=3)
    assert len(pieces) == 4
    tokens = np.concatenate([piece for piece, _ in pieces], axis=1)
    logits = np.asarray(jax.jit(lambda tokens: lm(tokens)[:, -1])(tokens))
    np.testing.assert_allclose(pieces[-1][1], logits, rtol=1e-4, atol=1e-5)
    places = np.argmax(tokens == 2, axis=1)
    answers = tokens[np.arange(40), places + 1]
    assert share == np.mean(np.argmax(logits, axis=-1) == answers)
    assert 0 < share < 1


def test_sequences_depend_on_seed_and_length_alone(lm):
    shares = [right_answers(lm, TASK, 64, rows=40, seed=seed) for seed in (0, 0, 1)]
    assert shares[0] == shares[1] != shares[2]


def test_every_power_of_two_is_asked(runs, capsys):
    folder = runs / "induction"
    assert main([str(folder), "--max-length", "256", "--rows", "4"]) == 0
    shares = json.loads((folder / "extrapolation.json").read_text())
    assert list(shares) == ["64", "128", "256"]
    assert all(0 <= share <= 1 for share in shares.values())
    assert (folder / "extrapolation.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert f"length 256 | {shares['256']:7.2%} of 4 answers right" in out


def test_what_was_found_before_an_interruption_is_kept(runs, capsys, monkeypatch):
    def ask(lm, task, length, **_):
        if length > 64:
            raise KeyboardInterrupt
        return 0.5

    monkeypatch.setattr(module, "right_answers", ask)
    assert main([str(runs / "induction"), "--max-length", "256"]) == 130
    assert json.loads((runs / "induction" / "extrapolation.json").read_text()) == {"64": 0.5}
    assert "Interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "arguments", "message"),
    [
        ("nowhere", [], "is not a run's folder: it has no config.toml"),
        ("copying", [], "is a run of --task selective_copying; one of induction_heads is wanted"),
        ("induction", ["--max-length", "100"], "--max-length 100: a power of two of at least 64"),
        ("induction", ["--min-length", "32"], "--min-length 32: a power of two of at least 64"),
        ("induction", ["--min-length", "512", "--max-length", "256"], "--min-length 512 is above --max-length 256"),
        ("induction", ["--rows", "0"], "--rows 0: 1 or more"),
        ("induction", ["--seed", "-1"], "--seed -1: a number from 0"),
    ],
)
def test_mistakes_are_one_message(runs, capsys, run, arguments, message):
    assert main([str(runs / run), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_run_without_a_checkpoint_is_named(runs, tmp_path, capsys):
    (tmp_path / "config.toml").write_bytes((runs / "induction" / "config.toml").read_bytes())
    assert main([str(tmp_path)]) == 2
    assert "has no checkpoint yet" in capsys.readouterr().err
