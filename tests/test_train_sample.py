"""train.sample: the streaming sampler says what the whole model says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax import MambaConfig
from train.sample import sample_bytes
from train.step import build_model


@pytest.fixture(scope="module")
def model():
    return build_model(MambaConfig(vocab_size=256, d_model=16, n_layer=2, scan="sequential"), seed=0)


@pytest.mark.parametrize("prompt", [b"", b"a", b"def f"])
def test_greedy_text_is_the_models_own_choice(model, prompt):
    text = sample_bytes(*model, prompt, 6, temperature=0, key=jax.random.key(0))
    assert len(text) == 6
    whole = np.frombuffer((prompt or b"\n") + text, np.uint8)
    logits = nnx.merge(*model)(jnp.asarray(whole[None, :-1], jnp.int32))
    np.testing.assert_array_equal(np.argmax(logits[0, -6:], -1), whole[-6:])


def test_key_decides_the_text(model):
    def text(seed):
        return sample_bytes(*model, b"x", 16, temperature=1.0, key=jax.random.key(seed))

    assert text(0) == text(0)
    assert text(0) != text(1)


def test_temperature_narrows_the_choice(model):
    greedy = sample_bytes(*model, b"x", 16, temperature=0, key=jax.random.key(0))
    assert sample_bytes(*model, b"x", 16, temperature=1e-4, key=jax.random.key(1)) == greedy
