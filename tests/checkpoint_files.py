"""Small models and checkpoints that the tests of `pretrained` share."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax.config import MambaConfig
from mamba_jax.model import MambaLM

# Odd sizes, and padded vocabularies: 37 -> 40, 29 -> 32.
TIED = MambaConfig(vocab_size=37, d_model=10, n_layer=3, d_state=5, d_conv=3, dt_rank=2)
UNTIED = MambaConfig(
    vocab_size=29, d_model=9, n_layer=2, d_state=3, expand=1.5, bias=True, tie_embeddings=False, conv_bias=False
)
FALCON = MambaConfig(
    vocab_size=31, d_model=8, n_layer=2, d_inner=13, d_state=4, tie_embeddings=False, use_bcdt_norm=True,
    mixer_rms_eps=1e-3, norm_eps=1e-4, pad_vocab_size_multiple=1,
)  # fmt: skip
WEIGHTS = {"hf": "model.safetensors", "original": "pytorch_model.bin"}
CONFIGS = {"tied": TIED, "untied": UNTIED, "falcon": FALCON}


def random_model(config, seed=0):
    """A model of parameters that are all different; none are drawn by JAX, which would compile a program for each."""
    graphdef, abstract = nnx.split(nnx.eval_shape(lambda: MambaLM(config, rngs=nnx.Rngs(0))))
    draws = np.random.default_rng(seed)
    return nnx.merge(
        graphdef, jax.tree.map(lambda leaf: jnp.asarray(0.5 * draws.standard_normal(leaf.shape, np.float32)), abstract)
    )


def parameters_of(lm):
    """{dotted path: array}"""
    return {
        ".".join(map(str, path)): np.asarray(value[...]) for path, value in nnx.to_flat_state(nnx.state(lm, nnx.Param))
    }


def assert_same_parameters(one, other):
    one, other = parameters_of(one), parameters_of(other)
    assert set(one) == set(other)
    for name in one:
        assert one[name].dtype == other[name].dtype == np.float32
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def edit_json(path, **changes):
    """Set keys of a JSON file; None removes one."""
    data = json.loads(path.read_text())
    data = {name: value for name, value in (data | changes).items() if value is not None}
    path.write_text(json.dumps(data))


def error_of(folder, **arguments):
    """The message of the one error that loading ends in."""
    with pytest.raises(ValueError) as caught:
        MambaLM.from_pretrained(folder, **arguments)
    return str(caught.value)
