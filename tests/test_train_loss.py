"""train.loss: cross-entropy against float64 NumPy, the bigram model against plain counting."""

import itertools
import math
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from train.data import Batch, validation_batches
from train.loss import bigram_bits_per_byte, bits_per_byte, cross_entropy
from train.tokens import Part, Tokens


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cross_entropy_is_that_of_float64(dtype):
    random = np.random.default_rng(0)
    # Large logits: exp of them overflows unless the greatest is taken out first.
    logits = jnp.asarray(100 * random.standard_normal((2, 5, 7)), dtype)
    targets = random.integers(0, 7, (2, 5))
    exact = np.asarray(logits, np.float64)
    exact -= exact.max(-1, keepdims=True)
    log_p = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_p, targets[..., None], -1).mean()
    value = cross_entropy(logits, targets)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_uniform_logits_cost_eight_bits_a_byte():
    nats = float(cross_entropy(jnp.zeros((1, 4, 256)), jnp.zeros((1, 4), jnp.int32)))
    assert bits_per_byte(nats) == pytest.approx(8)


def test_bigram_model_counts_pairs():
    text = np.frombuffer(b"abracadabra" * 3, np.uint8)
    batch = Batch(np.array([[97, 98]]), np.array([[98, 120]]))  # a -> b was seen, b -> x never was
    pairs, singles = Counter(itertools.pairwise(text)), Counter(text[:-1].tolist())
    bits = [-math.log2((pairs[97, 98] + 0.1) / (singles[97] + 25.6)), -math.log2(0.1 / (singles[98] + 25.6))]
    assert bigram_bits_per_byte(text, [batch]) == pytest.approx(np.mean(bits))


def test_bigram_model_knows_a_text_that_is_one():
    text = np.frombuffer(b"abcd" * 5000, np.uint8)
    batches = list(validation_batches(Tokens([Part(text)]), n_batches=2, batch_size=2, seq_len=32))
    assert bigram_bits_per_byte(text, batches) < 0.01
