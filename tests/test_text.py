"""Text to tokens and back: bytes and a tokenizer made on the spot, whole and in parts."""

import numpy as np
import pytest

from mamba_jax import text
from mamba_jax.text import Bytes, Subwords, load_tokenizer

WORDS = "naïve Mamba: the snake, the state — und ein wenig 中文, 🐍🐍!\r\n\r\n  Zwei   Zeilen.\n"


def make_tokenizer():
    """A byte-level BPE like GPT-NeoX's, trained on a few words."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    return tokenizer


@pytest.fixture(params=["bytes", "subwords"])
def tokenizer(request):
    return Bytes() if request.param == "bytes" else Subwords(make_tokenizer())


def test_there_and_back_one_token_at_a_time(tokenizer):
    """Every part is whole characters, and together they are the text."""
    decoder = tokenizer.decoder()
    parts = [decoder.push([token]) for token in tokenizer.encode(WORDS)]
    assert "".join(parts) + decoder.finish() == WORDS
    assert not any("\ufffd" in part for part in parts)
    assert sum(map(bool, parts)) > 20  # it came as it was ready, and not all at the end


def test_several_tokens_at_a_time(tokenizer):
    decoder, tokens = tokenizer.decoder(), tokenizer.encode(WORDS)
    parts = [decoder.push(tokens[i : i + 3]) for i in range(0, len(tokens), 3)]
    assert "".join(parts) + decoder.finish() == WORDS


def test_half_a_character_at_the_end(tokenizer):
    decoder, tokens = tokenizer.decoder(), tokenizer.encode("a🦖")  # which is no token of its own
    assert decoder.push(tokens[:-1]) == "a"
    assert set(decoder.finish()) == {"\ufffd"}


def test_bytes_that_are_no_characters_do_not_hold_up_the_rest(tokenizer):
    # In a byte-level BPE the token of a byte has a name of its own, here of 0xff.
    bad = 0xFF if isinstance(tokenizer, Bytes) else tokenizer._tokenizer.token_to_id("ÿ")
    decoder = tokenizer.decoder()
    told = decoder.push([bad] * 10)
    told += decoder.push(tokenizer.encode("after"))
    assert told.count("\ufffd") >= 5
    assert (told + decoder.finish()).endswith("after")


def test_tokens_that_are_no_bytes_stand_for_nothing():
    assert Bytes().decoder().push([65, 256, 300, 66]) == "AB"


@pytest.mark.parametrize("read_bytes", [7, 50, 1 << 16])
def test_read(tokenizer, read_bytes, tmp_path, monkeypatch):
    """The tokens are those of the whole text, wherever it is cut, and all bytes but the first token's are counted."""
    monkeypatch.setattr(text, "READ_BYTES", read_bytes)
    content = WORDS * 5
    (tmp_path / "text").write_bytes(content.encode())
    pieces = list(tokenizer.read(tmp_path / "text"))
    assert len(pieces) > 1 or read_bytes > 50
    tokens = np.concatenate([piece.tokens for piece in pieces])
    assert tokens.tolist() == tokenizer.encode(content)
    first = tokenizer.decoder().push(tokens[:1].tolist())
    assert sum(piece.n_bytes for piece in pieces) == len(content.encode()) - len(first.encode())


def test_read_cuts_a_text_without_white_space(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "READ_BYTES", 4)
    (tmp_path / "text").write_text("x" * 1000)
    pieces = list(Subwords(make_tokenizer()).read(tmp_path / "text"))
    assert len(pieces) > 5
    assert max(len(piece.tokens) for piece in pieces) <= 4 * 18


def test_read_refuses_what_is_not_text(tmp_path):
    (tmp_path / "text").write_bytes(b"abc \xff\xfe")
    with pytest.raises(ValueError, match="text is not UTF-8 text: invalid start byte"):
        list(Subwords(make_tokenizer()).read(tmp_path / "text"))


def test_load_tokenizer(tmp_path):
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    expected = Subwords(make_tokenizer()).encode(WORDS)
    assert load_tokenizer(tmp_path).encode(WORDS) == expected
    assert load_tokenizer(tmp_path / "tokenizer.json").encode(WORDS) == expected


def test_load_tokenizer_errors(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(ValueError, match=r"no tokenizer in .*: there is no .*tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="no tokenizer in"):
        load_tokenizer(tmp_path)
