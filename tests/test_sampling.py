"""Each sampling method on given logits, against NumPy and against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.sampling import (
    choose,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    make_sampling,
    penalize_repetition,
)

# Probabilities 0.4, 0.3, 0.2, 0.1 in another order, and the same scaled up, negative, and with ties.
GIVEN = np.log(np.array([[0.2, 0.4, 0.1, 0.3]], np.float32))
INF = np.inf


def kept(logits):
    return (np.asarray(logits) > -INF).tolist()


@pytest.mark.parametrize(
    "k, expected", [(1, [0, 1, 0, 0]), (2, [0, 1, 0, 1]), (3, [1, 1, 0, 1]), (4, [1] * 4), (9, [1] * 4)]
)
def test_top_k(k, expected):
    got = keep_top_k(GIVEN, k)
    assert kept(got) == [[bool(x) for x in expected]]
    np.testing.assert_array_equal(got[got > -INF], GIVEN[got > -INF])


def test_top_k_orders_every_kind_of_number():
    logits = jnp.array([[0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, -INF, 1.0, 1.0000001, -1.0]], jnp.float32)
    assert kept(keep_top_k(logits, 1))[0].index(True) == 4
    assert np.flatnonzero(kept(keep_top_k(logits, 2))[0]).tolist() == [4, 8]
    assert np.flatnonzero(kept(keep_top_k(logits, 3))[0]).tolist() == [4, 7, 8]
    assert not kept(keep_top_k(logits, 10))[0][6]


def test_equal_logits_fare_alike():
    assert kept(keep_top_k(jnp.array([[1.0, 3.0, 3.0, 2.0]]), 1)) == [[False, True, True, False]]
    assert kept(keep_top_p(jnp.zeros((1, 4)), 0.3)) == [[True] * 4]


@pytest.mark.parametrize(
    "p, expected",
    [
        (0.1, [0, 1, 0, 0]),
        (0.39, [0, 1, 0, 0]),
        (0.41, [0, 1, 0, 1]),
        (0.69, [0, 1, 0, 1]),
        (0.71, [1, 1, 0, 1]),
        (1.0, [1, 1, 1, 1]),
    ],
)
def test_top_p(p, expected):
    assert kept(keep_top_p(GIVEN, p)) == [[bool(x) for x in expected]]


@pytest.mark.parametrize(
    "p, expected", [(0.0, [1] * 4), (0.26, [1, 1, 0, 1]), (0.6, [0, 1, 0, 1]), (0.9, [0, 1, 0, 0]), (1.0, [0, 1, 0, 0])]
)
def test_min_p(p, expected):
    assert kept(keep_min_p(GIVEN, jnp.float32(p))) == [[bool(x) for x in expected]]


def test_repetition_penalty():
    logits, seen = jnp.array([[2.0, -2.0, 3.0, -3.0]]), jnp.array([[True, True, False, False]])
    np.testing.assert_allclose(penalize_repetition(logits, seen, 2.0), [[1.0, -4.0, 3.0, -3.0]])
    np.testing.assert_allclose(penalize_repetition(logits, seen, 0.5), [[4.0, -1.0, 3.0, -3.0]])


def random_logits(rows=7, vocabulary=1000):
    return 3 * np.random.default_rng(0).standard_normal((rows, vocabulary), np.float32)


def test_filters_keep_what_sorting_would():
    logits = random_logits()
    order = np.argsort(-logits, axis=1)
    ranks = np.argsort(order, axis=1)
    for k in (1, 17, 999, 1000):
        np.testing.assert_array_equal(keep_top_k(logits, k) > -INF, ranks < k)
    probability = np.exp(logits.astype(np.float64))
    probability /= probability.sum(axis=1, keepdims=True)
    before = np.cumsum(np.take_along_axis(probability, order, axis=1), axis=1)
    for p in (0.01, 0.5, 0.95):
        counts = (before < p).sum(axis=1) + 1
        np.testing.assert_array_equal(keep_top_p(logits, p) > -INF, ranks < counts[:, None])


@pytest.mark.parity
def test_filters_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits, tokens = random_logits(), np.random.default_rng(1).integers(0, 1000, (7, 30))
    seen = np.zeros(logits.shape, bool)
    np.put_along_axis(seen, tokens, True, axis=1)
    for ours, theirs in (
        (keep_top_k(logits, 40), process.TopKLogitsWarper(40)),
        (keep_top_p(logits, 0.9), process.TopPLogitsWarper(0.9)),
        (keep_min_p(logits, jnp.float32(0.02)), process.MinPLogitsWarper(0.02)),
        (penalize_repetition(logits, seen, 1.3), process.RepetitionPenaltyLogitsProcessor(1.3)),
    ):
        expected = theirs(torch.as_tensor(tokens), torch.as_tensor(logits)).numpy()
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


def draws(count=20_000, **numbers):
    """How often each token of `GIVEN` is drawn."""
    logits = jnp.broadcast_to(GIVEN, (count, 4))
    seen = jnp.broadcast_to(jnp.array([False, True, False, False]), logits.shape)
    tokens = choose(logits, make_sampling(**numbers), jax.random.key(0), seen)
    return np.bincount(tokens, minlength=4) / count


@pytest.mark.parametrize(
    "numbers, expected",
    [
        ({"temperature": 1.0}, [0.2, 0.4, 0.1, 0.3]),
        ({"temperature": 0.5}, np.array([0.04, 0.16, 0.01, 0.09]) / 0.3),
        ({"temperature": 1.0, "top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"temperature": 1.0, "top_p": 0.8}, [2 / 9, 4 / 9, 0, 3 / 9]),
        # The filters see the temperature: at 0.5 the second has 0.5625 of the best one's probability.
        ({"temperature": 0.5, "min_p": 0.6}, [0, 1, 0, 0]),
        # log 0.4 is negative: twice that is log 0.16.
        ({"temperature": 1.0, "repetition_penalty": 2.0}, np.array([0.2, 0.16, 0.1, 0.3]) / 0.76),
        # The penalty comes first: 0.3 is the best then.
        ({"temperature": 0.0, "repetition_penalty": 2.0}, [0, 0, 0, 1]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        ({"temperature": 1e-30}, [0, 1, 0, 0]),
        # top-k before top-p: of 4/7 and 3/7 the first alone has more than 0.5.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.5}, [0, 1, 0, 0]),
    ],
)
def test_draws(numbers, expected):
    np.testing.assert_allclose(draws(**numbers), expected, atol=0.015)


def test_other_numbers_compile_nothing():
    run = jax.jit(choose)
    for number in (1, 2, 3):
        sampling = make_sampling(0.1 * number, 10 * number, 0.3 * number, 0.01 * number, 1 + 0.1 * number)
        run(jnp.asarray(GIVEN), sampling, jax.random.key(number), jnp.zeros((1, 4), bool))
    assert run._cache_size() == 1


def test_neutral_numbers_leave_their_method_out():
    assert jax.tree.leaves(make_sampling(0)) == []
    sampling = make_sampling(1.0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    assert jax.tree.leaves(sampling) == [sampling.temperature]


@pytest.mark.parametrize(
    "numbers, message",
    [
        ({"temperature": -0.1}, r"`temperature` must be 0 \(greedy\) or more, got -0.1"),
        ({"temperature": float("nan")}, "`temperature`"),
        ({"temperature": INF}, "`temperature`"),
        ({"top_k": 0}, "`top_k` must be a whole number of at least 1, got 0"),
        ({"top_k": 2.5}, "`top_k`"),
        ({"top_p": 0.0}, "`top_p` must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "`top_p`"),
        ({"min_p": -0.1}, "`min_p` must be from 0 to 1, got -0.1"),
        ({"repetition_penalty": 0.0}, "`repetition_penalty` must be above 0, got 0.0"),
    ],
)
def test_numbers_out_of_range(numbers, message):
    with pytest.raises(ValueError, match=message):
        make_sampling(**numbers)
