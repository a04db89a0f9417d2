"""Text from a model, one byte at a time, through the streaming state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def sample_bytes(
    graphdef: nnx.GraphDef, params: Any, prompt: bytes, n_tokens: int, *, temperature: float, key: jax.Array
) -> bytes:
    """The continuation of a prompt, `n_tokens` bytes long.

    The prompt goes through the same one-token step as what follows it: one small program, whatever the prompt.
    """
    # An empty prompt has nothing to go on from; a line's end is the most neutral start.
    given = jnp.asarray(np.frombuffer(prompt or b"\n", np.uint8), jnp.int32)
    length = len(given) + n_tokens - 1

    @jax.jit
    def run(params: Any, key: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, params)

        def step(carry: tuple[Any, jax.Array], inputs: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            state, chosen = carry
            position, key = inputs
            token = jnp.where(position < len(given), given[jnp.minimum(position, len(given) - 1)], chosen)
            logits, state = model(token[None, None], state=state, return_state=True)
            logits = logits[0, 0, :256].astype(jnp.float32)
            scaled = logits / temperature if temperature > 0 else logits
            chosen = jax.random.categorical(key, scaled) if temperature > 0 else jnp.argmax(scaled)
            chosen = chosen.astype(jnp.int32)
            return (state, chosen), chosen

        inputs = (jnp.arange(length), jax.random.split(key, length))
        _, tokens = jax.lax.scan(step, (model.init_state(1), given[0]), inputs)
        return tokens[len(given) - 1 :]

    return np.asarray(run(params, key)).astype(np.uint8).tobytes()
