"""train.step: the settings become a model, and a step of it lowers the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax import MambaLM
from train.config import TrainConfig
from train.data import training_batch
from train.errors import UsageError
from train.loss import cross_entropy
from train.optim import make_optimizer
from train.step import abstract_model, build_model, count_parameters, make_loss, make_train_step, model_config
from train.tokens import Part, Tokens

CONFIG = TrainConfig(d_model=16, n_layer=2, d_state=4, seq_len=24, batch_size=2, scan="sequential")
TEXT = Tokens([Part(np.random.default_rng(0).integers(97, 123, 500).astype(np.uint8))])
BATCH = training_batch(TEXT, seed=0, step=1, batch_size=2, seq_len=24)


@pytest.fixture(scope="module")
def model():
    return build_model(model_config(CONFIG), seed=3)


def test_settings_reach_the_model():
    config = TrainConfig(d_model=48, expand=3, dt_rank=5, scan="pallas", dtype="bfloat16", remat=True, n_layer=2)
    config = model_config(config)
    assert (config.d_model, config.d_inner, config.dt_rank, config.scan) == (48, 144, 5, "pallas")
    assert (config.vocab_size, config.dtype, config.remat, config.n_layer) == (256, "bfloat16", True, 2)


def test_settings_that_make_no_model_are_the_users_mistake():
    with pytest.raises(UsageError, match="d_state"):
        model_config(TrainConfig(d_state=0))


def test_parameters_are_those_of_the_module(model):
    graphdef, params = model
    again = nnx.state(MambaLM(model_config(CONFIG), rngs=nnx.Rngs(3)))
    expected = nnx.to_pure_dict(again)
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    # Compiled and one by one, random numbers are the same to rounding.
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7), params, expected)
    assert isinstance(nnx.merge(graphdef, params), MambaLM)
    assert count_parameters(params) == sum(leaf.size for leaf in jax.tree.leaves(again))


def test_seed_decides_the_parameters(model):
    other = build_model(model_config(CONFIG), seed=4)[1]
    assert not np.array_equal(model[1]["embedding"], other["embedding"])


@pytest.mark.parametrize("graph", [True, False])
def test_loss_is_the_cross_entropy_of_the_next_byte(graph):
    # Flax NNX has two modes, and which one is the default depends on its version.
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
        graphdef, params = build_model(model_config(CONFIG), seed=3)
        loss = jax.jit(make_loss(graphdef))(params, BATCH)
        logits = nnx.merge(graphdef, params)(jnp.asarray(BATCH.tokens))
    expected = cross_entropy(logits, BATCH.targets)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    # Small initial embeddings: every byte is about as likely as any other.
    np.testing.assert_allclose(expected, np.log(256), rtol=0.02)


def test_step_lowers_the_loss_and_donates_its_state(model):
    graphdef, params = model
    params = jax.tree.map(jnp.copy, params)
    optimizer = make_optimizer(TrainConfig(lr=1e-2, warmup_steps=0))
    step, opt_state = jax.jit(make_train_step(graphdef, optimizer), donate_argnums=(0, 1)), optimizer.init(params)
    first, losses = params["embedding"], []
    for _ in range(5):
        params, opt_state, metrics = step(params, opt_state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True)
    assert first.is_deleted()
    assert float(metrics["grad_norm"]) > 0


def test_program_does_not_grow_with_depth():
    """What is compiled is one layer's, so compile time does not grow with their number."""

    def program(n_layer):
        graphdef, params = abstract_model(model_config(TrainConfig(d_model=16, n_layer=n_layer, scan="sequential")))
        optimizer = make_optimizer(TrainConfig())
        step = jax.jit(make_train_step(graphdef, optimizer))
        return step.lower(params, jax.eval_shape(optimizer.init, params), BATCH).as_text()

    assert len(program(24)) < 1.02 * len(program(6))
