"""AdamW with warm-up, a cosine, clipping, and no weight decay where Mamba must have none."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from train.config import TrainConfig
from train.guard import guarded

_UNDECAYED_NAMES = ("A_log", "B", "C", "D")
_UNDECAYED_PARTS = ("bias", "norm")


def learning_rate(config: TrainConfig) -> optax.Schedule:
    """The rate at each count of steps taken: a straight line up to `lr`, then half a cosine down to `min_lr`.

    Its length is `decay_steps`, or `steps` if that is more. So a run of up to `decay_steps`
    steps is the beginning of a longer one, and resumed with more steps, up to those, it equals one that never ended.
    """
    return optax.warmup_cosine_decay_schedule(
        # The first step's rate is one part of the way up, not zero: no step is wasted.
        init_value=config.lr / (config.warmup_steps + 1),
        peak_value=config.lr,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.decay_steps, config.steps, config.warmup_steps + 1),
        end_value=min(config.min_lr, config.lr),
    )


def decayed(params: Any) -> Any:
    """A tree of booleans: True where weight decay applies, so not on A_log, B, C and D, biases and norms.

    Source: `mamba_ssm` marks A_log, D and dt_proj.bias `_no_weight_decay`. Decay would pull the poles of the recurrence
    to one place and the step sizes away from their initial range (state-spaces/mamba issue 798).
    """

    def applies(path: tuple[Any, ...], _: Any) -> bool:
        names = [str(key.key) for key in path]
        return not any(name in _UNDECAYED_NAMES or any(part in name for part in _UNDECAYED_PARTS) for name in names)

    return jax.tree_util.tree_map_with_path(applies, params)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformationExtraArgs:
    """Clip by global norm, then AdamW, both behind a guard; the moments are float32 like the parameters."""
    clipped = optax.chain(
        optax.clip_by_global_norm(config.grad_clip),
        optax.adamw(
            learning_rate(config), b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay, mask=decayed
        ),
    )
    return guarded(clipped, config.spike_factor)


def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm of all leaves together, in float32. (optax's own function has another name in each version.)"""
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)))
