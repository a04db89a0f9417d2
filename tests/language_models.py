"""Small language models in which every parameter takes part, for tests of streaming, generation and scoring."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_jax.config import MambaConfig
from mamba_jax.model import MambaLM

SMALL = MambaConfig(vocab_size=37, d_model=20, n_layer=2, d_state=5, dt_rank=3, scan="sequential")
CONFIGS = {
    "plain": SMALL,
    "biases, untied": SMALL.replace(bias=True, tie_embeddings=False, d_conv=3, expand=1.5),
    "falcon": SMALL.replace(use_bcdt_norm=True, mixer_rms_eps=1e-3, conv_bias=False, tie_embeddings=False),
}


@functools.cache
def language_model(config=SMALL):
    """A model of which all parameters take part: in a fresh one norms and D are ones, and biases of no effect."""
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: MambaLM(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)  # and not JAX, which would compile a program for each shape
    values = jax.tree.map(lambda leaf: jnp.asarray(0.5 * rng.standard_normal(leaf.shape, np.float32)), abstract)
    return nnx.merge(graphdef, values)


def random_tokens(batch, length, seed=0, vocab_size=SMALL.vocab_size):
    return np.random.default_rng(seed).integers(0, vocab_size, (batch, length), np.int32)


@functools.partial(jax.jit, static_argnums=0)
def _forward(graphdef, params, tokens, state, mask):
    return nnx.merge(graphdef, params)(tokens, state=state, attention_mask=mask, return_state=True)


def forward(lm, tokens, state=None, mask=None):
    """Logits and state, compiled once a shape."""
    return _forward(*nnx.split(lm), tokens, state, mask)


def assert_states_close(got, expected, atol=1e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=atol, rtol=1e-5)
