"""The training step and the validation step: pure functions of parameters, moments and a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mamba_jax import MambaConfig, MambaLM
from mamba_jax.parallel import layout_of
from train.config import TrainConfig
from train.data import Batch
from train.errors import UsageError
from train.loss import NOT_ASKED, accuracy, chunked_cross_entropy, chunks_for, cross_entropy
from train.optim import global_norm
from train.sharding import shardings

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


def abstract_model(config: MambaConfig) -> tuple[nnx.GraphDef, Params]:
    """What `build_model` gives, with shapes and dtypes for parameters."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: MambaLM(config, rngs=nnx.Rngs(0))))
    return graphdef, nnx.to_pure_dict(state)


def build_model(config: MambaConfig, seed: int, mesh: Mesh | None = None) -> tuple[nnx.GraphDef, Params]:
    """A new model, split into what is static and its parameters as plain nested dicts, each made where it will be."""

    def make(key: jax.Array) -> Params:
        return nnx.to_pure_dict(nnx.state(MambaLM(config, rngs=nnx.Rngs(key))))

    # Compiled as one program: run one by one, the initialisers' operations take seconds to compile.
    where = None if mesh is None else shardings(jax.eval_shape(make, jax.random.key(0)), mesh)
    return model_graph(config), jax.block_until_ready(jax.jit(make, out_shardings=where)(jax.random.key(seed)))


def model_graph(config: MambaConfig) -> nnx.GraphDef:
    """What is static of a model."""
    return abstract_model(config)[0]


def make_loss(graphdef: nnx.GraphDef) -> Callable[[Params, Batch], jax.Array]:
    """loss(params, batch): the mean cross-entropy in nats."""

    def loss(params: Params, batch: Batch) -> jax.Array:
        lm = nnx.merge(graphdef, params)
        hidden = lm.hidden(batch.tokens, segment_ids=batch.segment_ids)
        b, l, d_model = hidden.shape
        layout = layout_of(b, l, d_model)
        parts, devices = (1, 1) if layout is None else (layout.parts, layout.devices)
        chunks = chunks_for(b, l, lm.config.vocab_size, devices=devices)
        return chunked_cross_entropy(lm.head, hidden, batch.targets, chunks=chunks, parts=parts)

    return loss


def make_train_step(
    graphdef: nnx.GraphDef, optimizer: optax.GradientTransformationExtraArgs, *, accumulate: int = 1
) -> Callable[[Params, Any, Batch], tuple[Params, Any, dict[str, jax.Array]]]:
    """train_step(params, opt_state, batch) -> (params, opt_state, metrics), to be compiled by `compile_train_step`.

    metrics: `loss` in nats and `grad_norm` before clipping, both of the parameters that came in; `skipped`, how many
    steps the optimizer has left out so far.

    Args:
        graphdef: of the model.
        optimizer: its `update` takes the loss.
        accumulate: into how many parts a batch is divided, whose gradients are added up one after the other.
    """
    loss_and_gradients = _accumulated(jax.value_and_grad(make_loss(graphdef)), accumulate)

    def train_step(params: Params, opt_state: Any, batch: Batch) -> tuple[Params, Any, dict[str, jax.Array]]:
        value, gradients = loss_and_gradients(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params, loss=value)
        metrics = {"loss": value, "grad_norm": global_norm(gradients), "skipped": opt_state.skipped}
        return optax.apply_updates(params, updates), opt_state, metrics

    return train_step


def _accumulated(loss_and_gradients: Callable[[Params, Batch], Any], parts: int) -> Callable[[Params, Batch], Any]:
    """The same function of a batch, computed for one part of its rows after the other: the mean over its targets."""
    if parts == 1:
        return loss_and_gradients

    def cut(x: jax.Array) -> jax.Array:
        """(b, l) -> (parts, b / parts, l), so that each part has rows of every device."""
        return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)

    def function(params: Params, batch: Batch) -> Any:
        asked = jnp.sum(batch.targets != NOT_ASKED)

        def add_part(total: Any, part: Batch) -> tuple[Any, None]:
            share = jnp.sum(part.targets != NOT_ASKED) / asked
            return jax.tree.map(lambda sum_, new: sum_ + share * new, total, loss_and_gradients(params, part)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros((), jnp.float32), params))
        return lax.scan(add_part, zeros, jax.tree.map(cut, batch))[0]

    return function


def compile_train_step(train_step: Callable[..., Any], mesh: Mesh, params: Params, opt_state: Any, batch: Batch) -> Any:
    """The step compiled for arrays like these (abstract ones will do); parameters and moments stay where they are, and
    what is passed for them is donated.
    """
    kept = (shardings(params, mesh), shardings(opt_state, mesh), NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        jitted = jax.jit(train_step, donate_argnums=(0, 1), out_shardings=kept)
        return jitted.lower(params, opt_state, batch).compile()


def compile_eval_step(function: Callable[[Params, Batch], Any], mesh: Mesh, params: Params, batch: Batch) -> Any:
    """`function`, whose results are numbers, compiled for arrays like these."""
    with jax.set_mesh(mesh):
        return jax.jit(function, out_shardings=NamedSharding(mesh, P())).lower(params, batch).compile()


def init_optimizer(optimizer: optax.GradientTransformation, params: Params, mesh: Mesh) -> Any:
    """The optimizer's first state, each moment where its parameter is."""
    where = shardings(jax.eval_shape(optimizer.init, params), mesh)
    return jax.block_until_ready(jax.jit(optimizer.init, out_shardings=where)(params))


def make_answers(graphdef: nnx.GraphDef) -> Callable[[Params, Batch], dict[str, jax.Array]]:
    """answers(params, batch) -> {`loss` in nats, `accuracy`, the share of right answers}."""

    def answers(params: Params, batch: Batch) -> dict[str, jax.Array]:
        logits = nnx.merge(graphdef, params)(batch.tokens, segment_ids=batch.segment_ids)
        return {"loss": cross_entropy(logits, batch.targets), "accuracy": accuracy(logits, batch.targets)}

    return answers


def count_parameters(params: Params) -> int:
    """Number of parameters; a tied head counts once."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
