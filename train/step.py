"""The training step and the validation step: pure functions of parameters, moments and a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from mamba_jax import MambaConfig, MambaLM
from train.config import TrainConfig
from train.data import Batch
from train.errors import UsageError
from train.loss import accuracy, cross_entropy
from train.optim import global_norm

Params = Any  # nested dicts of arrays, as the modules are named


def model_config(config: TrainConfig) -> MambaConfig:
    """The model's part of the settings: every field that goes by the same name.

    Raises:
        UsageError: if they make no model.
    """
    names = {field.name for field in dataclasses.fields(MambaConfig)}
    try:
        return MambaConfig(**{name: value for name, value in config.settings().items() if name in names})
    except ValueError as error:
        raise UsageError(str(error)) from None


def build_model(config: MambaConfig, seed: int) -> tuple[nnx.GraphDef, Params]:
    """A new model, split into what is static and its parameters as plain nested dicts."""

    # Compiled as one program: run one by one, the initialisers' operations take seconds to compile.
    make = jax.jit(lambda key: nnx.to_pure_dict(nnx.state(MambaLM(config, rngs=nnx.Rngs(key)))))
    return model_graph(config), make(jax.random.key(seed))


def model_graph(config: MambaConfig) -> nnx.GraphDef:
    """What is static of a model."""
    return nnx.graphdef(nnx.eval_shape(lambda: MambaLM(config, rngs=nnx.Rngs(0))))


def make_loss(graphdef: nnx.GraphDef) -> Callable[[Params, Batch], jax.Array]:
    """loss(params, batch): the mean cross-entropy in nats."""

    def loss(params: Params, batch: Batch) -> jax.Array:
        return cross_entropy(nnx.merge(graphdef, params)(batch.tokens, segment_ids=batch.segment_ids), batch.targets)

    return loss


def make_train_step(graphdef: nnx.GraphDef, optimizer: optax.GradientTransformationExtraArgs) -> Any:
    """train_step(params, opt_state, batch) -> (params, opt_state, metrics), jitted; the first two are donated.

    metrics: `loss` in nats and `grad_norm` before clipping, both of the parameters that came in; `skipped`, how many
    steps the optimizer has left out so far.
    """
    loss = make_loss(graphdef)

    def train_step(params: Params, opt_state: Any, batch: Batch) -> tuple[Params, Any, dict[str, jax.Array]]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params, loss=value)
        metrics = {"loss": value, "grad_norm": global_norm(gradients), "skipped": opt_state.skipped}
        return optax.apply_updates(params, updates), opt_state, metrics

    return jax.jit(train_step, donate_argnums=(0, 1))


def make_eval_step(graphdef: nnx.GraphDef) -> Any:
    """eval_step(params, batch) -> mean cross-entropy in nats, jitted."""
    return jax.jit(make_loss(graphdef))


def make_answers_step(graphdef: nnx.GraphDef) -> Any:
    """answers_step(params, batch) -> {`loss` in nats, `accuracy`, the share of right answers}, jitted."""

    def answers_step(params: Params, batch: Batch) -> dict[str, jax.Array]:
        logits = nnx.merge(graphdef, params)(batch.tokens, segment_ids=batch.segment_ids)
        return {"loss": cross_entropy(logits, batch.targets), "accuracy": accuracy(logits, batch.targets)}

    return jax.jit(answers_step)


def count_parameters(params: Params) -> int:
    """Number of parameters; a tied head counts once."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
