"""train.tokenize: token files that hold what the tokenizer says, whole or not at all, and that `train` reads."""

import json

import numpy as np
import pytest
from test_text import WORDS, make_tokenizer
from test_train_corpus import every, load

from mamba_jax.text import Subwords
from train import tokenize as module
from train.tokenize import main

TEXTS = {"a.txt": WORDS * 40, "b.txt": "the snake", "c.txt": WORDS}


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    (folder / "d.txt").write_bytes(b"\xff\xfe no text")
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def run(texts, out, *arguments):
    tokenizer = str(texts / "tokenizer.json")
    return main(["--data", str(texts / "texts"), "--tokenizer", tokenizer, "--out", str(out), *arguments])


def test_the_files_tokens_are_the_tokenizers(texts, monkeypatch, capsys):
    # Small pieces, and few at a time: every way to cut is met.
    monkeypatch.setattr("mamba_jax.text.READ_BYTES", 64)
    monkeypatch.setattr(module, "_PIECES", 7)
    out = texts / "out" / "text.bin"
    assert run(texts, out) == 0
    tokenizer = Subwords(make_tokenizer())
    end = tokenizer.end_of_text()
    expected = [token for text in TEXTS.values() for token in [*tokenizer.encode(text), end]]
    assert np.fromfile(out, "<u2").tolist() == expected
    n_bytes = sum(len(text.encode()) for text in TEXTS.values())
    assert json.loads(out.with_suffix(".json").read_text()) == {
        "dtype": "uint16", "n_tokens": len(expected), "n_bytes": n_bytes, "n_documents": 3, "separator": end,
        "vocab_size": 290,
    }  # fmt: skip
    assert sorted(path.name for path in out.parent.iterdir()) == ["text.bin", "text.json", "tokenizer.json"]
    printed = capsys.readouterr()
    assert f"{len(expected):,} uint16 tokens of {n_bytes:,} bytes from 3 files" in printed.out
    assert "tokenising: 100% of" in printed.err

    corpus = load(out, vocab_size=290, documents=True)
    assert every(corpus.train) + every(corpus.validation) == expected
    assert corpus.separator == end


def test_failing_leaves_what_was_there(texts, monkeypatch, capsys):
    out = texts / "text.bin"
    out.write_bytes(b"precious")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_encode", full)
    assert run(texts, out) == 1
    assert "text.bin: No space left on device" in capsys.readouterr().err
    assert out.read_bytes() == b"precious"
    assert not out.with_name("text.bin.tmp").exists()


def test_mistakes(texts, tmp_path, capsys):
    assert run(texts, tmp_path / "text") == 2
    assert "a name that ends in .bin is wanted" in capsys.readouterr().err
    assert main(["--data", str(texts / "texts/d.txt"), "--tokenizer", "x", "--out", str(tmp_path / "t.bin")]) == 2
    assert "none of its files is UTF-8 text" in capsys.readouterr().err
    assert (
        main(["--data", str(texts / "texts"), "--tokenizer", str(tmp_path / "x"), "--out", str(tmp_path / "t.bin")])
        == 2
    )
    assert "--tokenizer: no tokenizer in" in capsys.readouterr().err
