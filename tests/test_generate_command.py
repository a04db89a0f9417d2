"""`python -m mamba_jax.generate`: text, figures, and one line for each mistake."""

import json
import runpy
import subprocess
import sys

import numpy as np
import pytest
from language_models import language_model
from test_text import make_tokenizer

from mamba_jax.config import MambaConfig
from mamba_jax.generation import generate
from mamba_jax.scoring import score
from mamba_jax.text import Bytes, Subwords

BYTES = MambaConfig(vocab_size=256, d_model=12, n_layer=1, d_state=3)
SUBWORDS = BYTES.replace(vocab_size=290)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model of bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    language_model(BYTES).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def subword_model(tmp_path_factory):
    """A folder with a model and its tokenizer."""
    folder = tmp_path_factory.mktemp("subwords")
    make_tokenizer().save(str(folder / "tokenizer.json"))
    language_model(SUBWORDS).save_pretrained(folder)
    return str(folder)


def main(arguments):
    """Exit code of the command. It is run as `python -m` does and not imported, as its name is also the function's."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", ["generate", *arguments])
        runpy.run_module("mamba_jax.generate", run_name="__main__", alter_sys=True)
    return ended.value.code


def error_of(arguments, capsys):
    """The one line that a wrong command ends in."""
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ") and output.err.count("\n") == 1
    return output.err


def test_bytes(model, capsys):
    assert main(["--model", model, "--prompt", "Mämba", "--max-new-tokens", "20", "--temperature", "0"]) == 0
    output = capsys.readouterr()
    prompt = np.array([list("Mämba".encode())])
    expected = np.asarray(generate(language_model(BYTES), prompt, 20, temperature=0))[0].astype(np.uint8).tobytes()
    assert output.out == expected.decode(errors="replace") + "\n"
    for line in ("compiled in ", "prefill: 6 tokens in ", "decoding: 19 tokens in "):
        assert line in output.err
    assert output.err.count("tokens/s") == 2


def test_subwords_and_seed(subword_model, capsys):
    command = ["--model", subword_model, "--prompt", "the snake", "--max-new-tokens", "12", "--top-k", "50"]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*command, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("the snake")


def test_prompt_file(model, tmp_path, capsys):
    (tmp_path / "prompt").write_text("one\ntwo")
    command = ["--model", model, "--max-new-tokens", "3", "--temperature", "0"]
    assert main([*command, "--prompt-file", str(tmp_path / "prompt")]) == 0
    assert main([*command, "--prompt", "one\ntwo"]) == 0
    both = capsys.readouterr().out
    assert both[: len(both) // 2] == both[len(both) // 2 :]


def test_stop_tokens(subword_model, tmp_path, capsys):
    """The text ends before the token that is named, or the one that the model's files name."""
    tokenizer, lm = Subwords(make_tokenizer()), language_model(SUBWORDS)
    prompt = tokenizer.encode("the state")
    text = np.asarray(generate(lm, np.array([prompt]), 30, temperature=0, repetition_penalty=9.0))[0, len(prompt) :]
    text = text.tolist()
    # One that can be named: not a part of a character.
    word, stop = next((w, t) for t in text[3:] if tokenizer.encode(w := make_tokenizer().decode([t])) == [t])
    before = tokenizer.decoder()
    expected = "the state" + before.push(text[: text.index(stop)]) + before.finish() + "\n"

    numbers = ["--temperature", "0", "--max-new-tokens", "30", "--repetition-penalty", "9"]
    command = ["--prompt", "the state", *numbers]
    assert main(["--model", subword_model, *command, "--stop", word]) == 0
    assert capsys.readouterr().out == expected

    lm.save_pretrained(tmp_path, extra_config={"eos_token_id": stop})
    tokenizer._tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert main(["--model", str(tmp_path), *command]) == 0
    assert capsys.readouterr().out == expected
    assert main(["--model", str(tmp_path), *command, "--ignore-eos"]) == 0
    assert len(capsys.readouterr().out) > len(expected)


def test_empty_prompt(model, capsys):
    assert main(["--model", model, "--prompt", "", "--max-new-tokens", "3"]) == 0
    assert len(capsys.readouterr().out) > 1


@pytest.mark.parametrize("kind", ["bytes", "subwords"])
def test_score(kind, model, subword_model, tmp_path, capsys):
    (tmp_path / "text").write_text("the snake, the state\n" * 80)
    folder, config = (model, BYTES) if kind == "bytes" else (subword_model, SUBWORDS)
    assert main(["--model", folder, "--score", str(tmp_path / "text")]) == 0
    output = capsys.readouterr()
    tokenizer = Bytes() if kind == "bytes" else Subwords(make_tokenizer())
    expected = score(language_model(config), tokenizer.read(tmp_path / "text"))
    assert f"tokens predicted: {expected.tokens}, {expected.n_bytes} bytes" in output.out
    assert f"perplexity: {expected.perplexity:.4f} per token" in output.out
    assert f"bits per byte: {expected.bits_per_byte:.4f}" in output.out
    assert "tokens/s" in output.err


def test_mistakes(model, subword_model, tmp_path, capsys):
    prompt = ["--prompt", "x"]
    assert "exactly one of --prompt, --prompt-file and --score" in error_of(["--model", model], capsys)
    assert "exactly one of" in error_of(["--model", model, *prompt, "--score", "y"], capsys)
    assert "there is no folder no-such-run" in error_of(["--model", "no-such-run", *prompt], capsys)
    assert "--max-new-tokens must be 0 or more" in error_of(
        ["--model", model, *prompt, "--max-new-tokens", "-1"], capsys
    )
    assert "`top_p` must be above 0 and at most 1, got 2.0" in error_of(
        ["--model", model, *prompt, "--top-p", "2"], capsys
    )
    missing = str(tmp_path / "missing")
    assert f"{missing}: No such file" in error_of(["--model", model, "--score", missing], capsys)
    assert f"{missing}: No such file" in error_of(["--model", model, "--prompt-file", missing], capsys)
    assert "--stop 'xy' must be one token, it is 2" in error_of(["--model", model, *prompt, "--stop", "xy"], capsys)
    (tmp_path / "bytes").write_bytes(b"\xff\xff")
    for command in ("--prompt-file", "--score"):
        assert "is not UTF-8 text" in error_of(
            ["--model", subword_model, command, str(tmp_path / "bytes")], capsys
        )  # fmt: skip
    (tmp_path / "short").write_text("x")
    assert "fewer than two tokens" in error_of(["--model", model, "--score", str(tmp_path / "short")], capsys)


def test_a_model_without_its_tokenizer(tmp_path, subword_model, capsys):
    language_model(SUBWORDS).save_pretrained(tmp_path)
    message = error_of(["--model", str(tmp_path), "--prompt", "x"], capsys)
    assert "has no tokenizer.json; name one with --tokenizer" in message
    command = ["--model", str(tmp_path), "--prompt", "x", "--max-new-tokens", "2", "--tokenizer"]
    assert main([*command, subword_model]) == 0
    capsys.readouterr()
    assert "no tokenizer in" in error_of([*command, str(tmp_path / "none")], capsys)


def test_a_tokenizer_of_another_model(model, subword_model, capsys):
    text = "\u0143"  # beyond the model's vocabulary only if its tokens are: 290 of them, the model has 256
    command = ["--model", model, "--tokenizer", subword_model, "--prompt", "the snake " + text]
    assert "not its own" in error_of(command, capsys)


def test_wrong_flags_and_help():
    """Exit code 2, in a process of its own, as from a shell."""
    program = [sys.executable, "-m", "mamba_jax.generate"]
    wrong = subprocess.run([*program, "--modle", "x"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "--modle" in wrong.stdout + wrong.stderr
    help_text = subprocess.run([*program, "--help"], capture_output=True, text=True)
    assert help_text.returncode == 0
    assert all(flag in help_text.stdout for flag in ("--score", "--top-p", "--tokenizer"))


def test_the_command_does_not_hide_the_function():
    import mamba_jax

    assert mamba_jax.generate is generate


def test_config_of_another_kind_is_named(model, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 256}))
    assert main(["--model", str(tmp_path), "--prompt", "x"]) == 2
    assert "error: " in capsys.readouterr().err
