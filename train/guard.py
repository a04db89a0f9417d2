"""An optimizer that leaves a step out whose loss or gradient is not finite, or whose loss is a spike."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

# Weight of the past in the running mean of the loss: it looks back over some 50 steps.
_DECAY = 0.98
# Before so many steps the loss falls too fast for its mean to say what a spike is.
_LEAST_STEPS = 20


class GuardState(NamedTuple):
    """What the guard keeps beside the optimizer's own state."""

    total: jax.Array  # () float32, exponentially weighted sum of the losses of the steps taken, in nats
    weight: jax.Array  # () float32, sum of their weights
    taken: jax.Array  # () int32, steps taken
    skipped: jax.Array  # () int32, steps left out
    inner: Any


def guarded(
    optimizer: optax.GradientTransformation, spike_factor: float | None
) -> optax.GradientTransformationExtraArgs:
    """`optimizer`, but a bad step changes neither parameters nor moments, and does not count for its schedule.

    A step is bad if its loss or a part of its gradient is not finite, or if its loss is more than `spike_factor` times
    the running mean of the losses of the steps taken. That mean is part of the optimizer's state, and so is saved and
    restored with it. `update` takes the step's loss in nats as `loss=`.

    Args:
        optimizer: any.
        spike_factor: None lets spikes pass.
    """

    def init(params: Any) -> GuardState:
        # Four arrays and not one four times: each is donated to the training step.
        total, weight = (jnp.zeros((), jnp.float32) for _ in range(2))
        taken, skipped = (jnp.zeros((), jnp.int32) for _ in range(2))
        return GuardState(total, weight, taken, skipped, optimizer.init(params))

    def update(
        updates: Any, state: Any, params: Any = None, *, loss: ArrayLike = 0.0, **_: Any
    ) -> tuple[Any, GuardState]:
        good = jnp.isfinite(loss)
        for leaf in jax.tree.leaves(updates):
            good &= jnp.all(jnp.isfinite(leaf))
        if spike_factor is not None:
            mean = state.total / jnp.maximum(state.weight, 1e-30)
            good &= (state.taken < _LEAST_STEPS) | (loss <= spike_factor * mean)
        new, inner = optimizer.update(updates, state.inner, params)
        new = jax.tree.map(lambda leaf: jnp.where(good, leaf, 0), new)
        inner = jax.tree.map(lambda after, before: jnp.where(good, after, before), inner, state.inner)
        counted = GuardState(
            total=_DECAY * state.total + (1 - _DECAY) * loss,
            weight=_DECAY * state.weight + (1 - _DECAY),
            taken=state.taken + 1,
            skipped=state.skipped,
            inner=None,
        )
        left_out = state._replace(skipped=state.skipped + 1, inner=None)
        counts = jax.tree.map(lambda after, before: jnp.where(good, after, before), counted, left_out)
        return new, counts._replace(inner=inner)

    return optax.GradientTransformationExtraArgs(init, update)
