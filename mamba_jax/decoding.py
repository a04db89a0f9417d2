"""The two compiled programs of generation: a piece of the prompt, and a block of new tokens.

Both take every array as an argument: a weight that is a constant of a program is compiled into it, and copied.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mamba_jax.model import MambaLM
from mamba_jax.packing import Rows
from mamba_jax.sampling import Sampling, choose
from mamba_jax.state import MambaState

BLOCK = 8
"""Tokens of a compiled block: enough for the way in and out (below 1 ms) not to count, few enough to watch."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitModel:
    """A language model prepared for decoding: itself, and its layers once more as arrays of their own.

    A product with a slice of the stack copies the slice first: apart, the products of one step of mamba-130m took a
    third of the time (2 cores, AVX2, float32, batch 1). Kernels stay (in, out): transposed, whole steps took 1.3 to 1.4
    times as long at batch 1 and 8. The layers take their memory twice while this lives.
    """

    model: Any  # nnx state of the whole model
    layers: list[Any]  # nnx state of each layer
    graphdef: nnx.GraphDef = dataclasses.field(metadata={"static": True})
    layer_graphdef: nnx.GraphDef = dataclasses.field(metadata={"static": True})

    def merged(self) -> MambaLM:
        """The module."""
        return nnx.merge(self.graphdef, self.model)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where each row of a batch stands. Shapes: b batch, v vocabulary."""

    token: jax.Array  # (b,) int32, the last token, which the model has yet to read
    states: list[MambaState]  # of each layer, before that token
    seen: jax.Array | None  # (b, v) bool, the tokens so far; None if no method asks


def split_model(lm: MambaLM) -> SplitModel:
    """Prepare a model for decoding; it is read, and not changed. Later changes of its parameters do not show."""
    graphdef, model = nnx.split(lm)
    layer_graphdef, stacked = nnx.split(lm.layers)
    return SplitModel(model, _unstack(stacked, lm.config.n_layer), graphdef, layer_graphdef)


@functools.partial(jax.jit, static_argnames="count")
def _unstack(stacked: Any, count: int) -> list[Any]:
    return [jax.tree.map(operator.itemgetter(i), stacked) for i in range(count)]


@jax.jit
def read_piece(
    model: SplitModel, tokens: jax.Array, mask: jax.Array, state: MambaState, hidden: jax.Array
) -> tuple[MambaState, jax.Array]:
    """A piece of the prompt: the state after it, and the activations of each row's last token so far.

    Args:
        model: of which the stacked layers are used.
        tokens: (b, l) int32.
        mask: (b, l) bool, False at padding.
        state: before the piece.
        hidden: (b, d_model), what this returned for the piece before; kept where a row has no token here.
    """
    every, state = model.merged().hidden(tokens, attention_mask=mask, state=state, return_state=True)
    last = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    newest = jnp.take_along_axis(every, last[:, None, None], axis=1)[:, 0]
    return state, jnp.where(jnp.any(mask, axis=1)[:, None], newest, hidden)


@jax.jit
def first_token(
    model: SplitModel,
    hidden: jax.Array,
    state: MambaState,
    seen: jax.Array | None,
    sampling: Sampling,
    key: jax.Array | None,
) -> Progress:
    """The first new token of each row, chosen after the prompt whose `hidden` and `state` these are."""
    token = choose(model.merged().head(hidden), sampling, _key_of(key, 0), seen)
    states = [jax.tree.map(operator.itemgetter(i), state) for i in range(len(model.layers))]
    return Progress(token=token, states=states, seen=_add(seen, token))


@jax.jit
def decode_block(
    model: SplitModel,
    progress: Progress,
    sampling: Sampling,
    key: jax.Array | None,
    start: jax.Array,
    count: jax.Array,
    stop: jax.Array,
) -> tuple[Progress, jax.Array]:
    """Up to `BLOCK` further tokens of each row.

    Args:
        model, progress, sampling: as they are.
        key: of the whole continuation. A token's draw depends on it and the token's number, not on the blocks.
        start: () int32, number of the first token of this block.
        count: () int32, how many are wanted; at most `BLOCK`.
        stop: (k,) int32, after which a row has only that token again. It ends early once every row has stopped.

    Returns:
        The progress, and (b, BLOCK) int32 of which the first `count` are new tokens.
    """
    lm = model.merged()

    def go_on(carry: tuple[jax.Array, Progress, jax.Array]) -> jax.Array:
        done, progress, _ = carry
        return (done < count) & ~jnp.all(_stopped(progress.token, stop))

    def step(carry: tuple[jax.Array, Progress, jax.Array]) -> tuple[jax.Array, Progress, jax.Array]:
        done, progress, tokens = carry
        logits, states = _one_token(lm, model, progress)
        token = choose(logits, sampling, _key_of(key, start + done), progress.seen)
        token = jnp.where(_stopped(progress.token, stop), progress.token, token)
        tokens = lax.dynamic_update_slice_in_dim(tokens, token[:, None], done, axis=1)
        return done + 1, Progress(token=token, states=states, seen=_add(progress.seen, token)), tokens

    tokens = jnp.zeros((progress.token.shape[0], BLOCK), jnp.int32)
    done, progress, tokens = lax.while_loop(go_on, step, (jnp.int32(0), progress, tokens))
    # It ended early if all rows have stopped; each then goes on with its stop token.
    tokens = jnp.where(jnp.arange(BLOCK) < done, tokens, progress.token[:, None])
    return progress, tokens


def _one_token(lm: MambaLM, model: SplitModel, progress: Progress) -> tuple[jax.Array, list[MambaState]]:
    """Logits (b, v) after each row's last token, and the layers' states."""
    residual = lm.embed(progress.token[:, None])
    states = []
    for params, state in zip(model.layers, progress.states):
        layer = nnx.merge(model.layer_graphdef, params)
        residual, state = layer(residual, Rows(), state, return_state=True)
        states.append(state)
    return lm.head(lm.norm_f(residual[:, 0])), states


def _stopped(token: jax.Array, stop: jax.Array) -> jax.Array:
    return jnp.any(token[:, None] == stop, axis=1)


def _key_of(key: jax.Array | None, number: int | jax.Array) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, number)


def _add(seen: jax.Array | None, token: jax.Array) -> jax.Array | None:
    return None if seen is None else seen.at[jnp.arange(token.shape[0]), token].set(True)
