"""train.corpus: texts and token files as one corpus, what is held out, and what is said of files that will not do."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from test_text import make_tokenizer

from mamba_jax.text import Subwords
from train.config import TrainConfig
from train.corpus import load_corpus, split_files
from train.data import Batch
from train.errors import TrainingStopped, UsageError
from train.report import Report


def make(folder, **texts):
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    return str(folder)


def load(data, tokenizer=None, **settings):
    config = TrainConfig(**{"data": str(data), "val_fraction": 0.5, "seq_len": 8, **settings})
    return load_corpus(config, Report(Console(file=io.StringIO())), tokenizer)


def every(tokens):
    """All of a sequence."""
    return tokens.windows(np.zeros(1, int), len(tokens))[0].tolist()


def test_files_that_do_not_decode_are_left_out(tmp_path):
    make(tmp_path, a=b"a" * 50, b=b"\xff\xfe", c=b"c" * 50)
    corpus = load(tmp_path)
    assert corpus.n_left_out == 1
    assert every(corpus.train) == list(b"a" * 50)
    assert every(corpus.validation) == list(b"c" * 50)


@pytest.mark.parametrize(
    ("lengths", "fraction", "train", "held_out"),
    [
        ([10, 10, 10, 10], 0.5, [10, 10], [10, 10]),
        ([10, 10, 10, 10], 0.49, [10, 10, 10], [10]),
        ([1, 99], 0.1, [1, 89], [10]),
        ([100], 0.25, [75], [25]),
        ([90, 1, 1, 8], 0.1, [90], [1, 1, 8]),
    ],
)
def test_the_tail_of_whole_files_is_held_out(lengths, fraction, train, held_out):
    parts = split_files([b"x" * length for length in lengths], fraction)
    assert [list(map(len, part)) for part in parts] == [train, held_out]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({}, "there is no file in it"),
        ({"a": b""}, "there is no text in it"),
        ({"a": b"\xff"}, "none of its 1 files is UTF-8 text"),
        ({"a": b"x" * 60}, r"validation part has 6 bytes, but one sequence takes 17"),
        ({"a": b"x" * 17}, r"training part has 16 bytes"),
    ],
)
def test_text_that_will_not_do_is_named(tmp_path, texts, message):
    with pytest.raises(UsageError, match=message) as error:
        load(make(tmp_path, **texts), val_fraction=0.1, seq_len=16)
    assert str(tmp_path) in str(error.value)


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    (tmp_path / "a").touch()
    with pytest.raises(UsageError, match=r"cannot read .*a: Permission denied"):
        load(tmp_path)


def write_tokens(path, tokens, stored="<u2", **record):
    np.asarray(tokens, stored).tofile(path)
    if record:
        path.with_suffix(".json").write_text(json.dumps(record))


def test_token_files_as_nanogpt_writes_them(tmp_path):
    write_tokens(tmp_path / "train.bin", range(100, 200))
    write_tokens(tmp_path / "val.bin", range(200, 220))
    make(tmp_path, **{"prepare.py": b"import this", "meta.pkl": b"\x80"})
    corpus = load(tmp_path, vocab_size=300)
    assert (corpus.unit, corpus.n_train_files, corpus.n_validation_files, corpus.n_left_out) == ("tokens", 1, 1, 2)
    assert every(corpus.train) == list(range(100, 200))
    assert every(corpus.validation) == list(range(200, 220))
    assert corpus.bytes_per_token is None
    assert isinstance(corpus.train.parts[0].tokens, np.memmap)


def test_shards_without_one_to_hold_out(tmp_path):
    write_tokens(tmp_path / "b.bin", range(30, 40), "<u4", dtype="uint32", n_tokens=10)
    write_tokens(tmp_path / "a.bin", range(30))
    corpus = load(tmp_path, val_fraction=0.25)
    assert every(corpus.train) == list(range(30))
    assert every(corpus.validation) == list(range(30, 40))


def test_records_beside_token_files(tmp_path):
    write_tokens(tmp_path / "t.bin", range(1, 41), "<u4", dtype="uint32", n_tokens=40, n_bytes=120, separator=7)
    corpus = load(tmp_path / "t.bin", documents=True)
    assert (corpus.bytes_per_token, corpus.separator) == (3.0, 7)
    assert load(tmp_path / "t.bin").separator is None


@pytest.mark.parametrize(
    ("tokens", "settings", "message"),
    [
        (np.arange(41, dtype="u1"), {}, "has 41 bytes, no multiple of 2: no file of uint16 tokens"),
        (
            np.arange(40, dtype="<u4"),
            {},
            "every other token of .* is 0, as if it held uint32: try",
        ),
        (np.arange(40, dtype="<u2"), {"token_dtype": "uint32"}, "has the token 2555942, but --vocab-size is 256"),
        (np.full(40, 256, "<u2"), {}, "has the token 256, but --vocab-size is 256"),
        (np.arange(40, dtype="<u2"), {"documents": True}, "--documents: which token is between two documents is not"),
        (np.arange(0, dtype="<u2"), {}, "its training part has 0 tokens"),
    ],
)
def test_files_that_are_no_token_files(tmp_path, tokens, settings, message):
    tokens.tofile(tmp_path / "t.bin")
    with pytest.raises(UsageError, match=message):
        load(tmp_path, **settings)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ('{"n_tokens": 50}', "t.bin has 40 tokens, but t.json says 50: it is not whole"),
        ('{"dtype": "int8"}', "its dtype is 'int8'; uint16 or uint32 is wanted"),
        ("{", "t.json is no JSON object"),
        ("[1]", "t.json is no JSON object"),
    ],
)
def test_records_that_do_not_fit(tmp_path, record, message):
    write_tokens(tmp_path / "t.bin", range(40))
    (tmp_path / "t.json").write_text(record)
    with pytest.raises(UsageError, match=message):
        load(tmp_path)


def test_texts_with_a_tokenizer(tmp_path):
    texts = {"a": "the snake, the state", "b": "Mamba: the snake and the state"}
    data = make(tmp_path, **{name: text.encode() for name, text in texts.items()})
    tokenizer = Subwords(make_tokenizer())
    corpus = load(data, tokenizer, vocab_size=290, documents=True, val_fraction=0.6, seq_len=2)
    end = tokenizer.end_of_text()
    assert every(corpus.train) == [*tokenizer.encode(texts["a"]), end]
    assert every(corpus.validation) == [*tokenizer.encode(texts["b"]), end]
    assert (corpus.unit, corpus.separator) == ("tokens", end)
    assert corpus.bytes_per_token == len(texts["b"]) / len(corpus.validation)
    with pytest.raises(UsageError, match="--vocab-size 256: the tokenizer has 290 tokens; --vocab-size 290 has room"):
        load(data, tokenizer)


def test_bytes_need_their_vocabulary(tmp_path):
    with pytest.raises(UsageError, match="--vocab-size 255: 256 or more"):
        load(make(tmp_path, a=b"a" * 50), vocab_size=255)


def test_documents_of_bytes_have_a_zero_between_them(tmp_path):
    data = make(tmp_path, a=b"abcdefghij", b=b"bcdefghijk", c=b"c" * 20)
    corpus = load(data, documents=True)
    assert every(corpus.train) == list(b"abcdefghij\0bcdefghijk")
    assert corpus.separator == 0


def test_a_text_that_shrank_or_changed(tmp_path):
    text = tmp_path / "a"
    text.write_bytes(b"x" * 100)
    meta = load(text).identity()
    assert load(text).is_the_one(meta)
    text.write_bytes(b"y" * 100)
    assert not load(text).is_the_one(meta)
    text.write_bytes(b"x" * 98)
    with pytest.raises(UsageError, match=r"a shrank: 50 bytes to learn when the run began, 49 now"):
        load(text).is_the_one(meta)


def test_a_token_that_the_samples_missed(tmp_path):
    write_tokens(tmp_path / "t.bin", range(40))
    corpus = load(tmp_path)
    batch = corpus.train.windows(np.zeros(2, int), 9)
    corpus.check(Batch(batch[:, :-1], batch[:, 1:]), 9)
    with pytest.raises(TrainingStopped, match="has the token 8, but --vocab-size is 8"):
        corpus.check(Batch(batch[:, :-1], batch[:, 1:]), 8)
