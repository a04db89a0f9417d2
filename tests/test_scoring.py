"""Perplexity and bits per byte: one pass over the whole text says the same, and memory does not grow with it."""

import math

import numpy as np
import pytest
from language_models import CONFIGS, SMALL, forward, language_model, random_tokens

from mamba_jax import scoring
from mamba_jax.scoring import score
from mamba_jax.text import Piece


def as_pieces(tokens, cuts):
    return [Piece(part, len(part) - (i == 0)) for i, part in enumerate(np.split(tokens, cuts))]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=[name.replace(" ", "-") for name in CONFIGS])
def test_pieces_score_like_the_whole(config, monkeypatch):
    monkeypatch.setattr(scoring, "PIECE", 8)
    lm, tokens = language_model(config), random_tokens(1, 43)[0]
    logits = np.asarray(forward(lm, tokens[None])[0][0], np.float64)
    nats = np.sum(np.log(np.exp(logits[:-1]).sum(axis=1)) - logits[np.arange(42), tokens[1:]])
    for cuts in ([], [1], [8, 16], [9, 9, 30], list(range(1, 43))):
        result = score(lm, iter(as_pieces(tokens, cuts)))
        assert (result.tokens, result.n_bytes) == (42, 42)
        assert result.nats == pytest.approx(nats, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(nats / 42), rel=1e-5)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / 42, rel=1e-5)


@pytest.mark.parametrize("length", [2, 8, 9, 10, 17])
def test_every_token_but_the_first_counts_once(length, monkeypatch):
    monkeypatch.setattr(scoring, "PIECE", 8)
    result = score(language_model(), as_pieces(random_tokens(1, length)[0], []))
    assert result.tokens == length - 1


def test_one_program_for_any_length(monkeypatch):
    monkeypatch.setattr(scoring, "PIECE", 8)
    lm = language_model(SMALL.replace(n_layer=1))
    before = scoring._predict._cache_size()
    for length in (2, 5, 40):
        score(lm, as_pieces(random_tokens(1, length)[0], []))
    assert scoring._predict._cache_size() == before + 1


def test_a_uniform_model_has_the_vocabulary_as_perplexity():
    from flax import nnx

    lm = nnx.clone(language_model())
    lm.embedding[...] = 0 * lm.embedding[...]
    result = score(lm, [Piece(random_tokens(1, 20)[0], 40)])
    assert result.perplexity == pytest.approx(37, rel=1e-5)
    assert result.bits_per_byte == pytest.approx(math.log2(37) * 19 / 40, rel=1e-5)


@pytest.mark.parametrize("tokens", [[], [3]])
def test_too_short(tokens):
    with pytest.raises(ValueError, match="fewer than two tokens"):
        score(language_model(), [Piece(np.array(tokens, np.int32), 0)])


def test_a_token_that_the_model_does_not_know():
    with pytest.raises(ValueError, match="tokens up to 37, the model's vocabulary ends at 36"):
        score(language_model(), [Piece(np.array([1, 37], np.int32), 2)])
