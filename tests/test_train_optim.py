"""train.optim: no decay where Mamba must have none, the schedule, clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mamba_jax import MambaConfig
from train.config import TrainConfig
from train.optim import decayed, global_norm, learning_rate, make_optimizer
from train.step import build_model

CONFIG = TrainConfig(lr=0.1, weight_decay=0.5, warmup_steps=0)
DECAYED = {"embedding", "in_proj.kernel", "x_proj.kernel", "dt_proj.kernel", "out_proj.kernel", "conv_weight"}
NOT_DECAYED = {"A_log", "D", "dt_bias", "conv_bias", "norm.scale", "norm_f.scale"}
SELECTION = {"x_proj.kernel", "dt_proj.kernel"}  # where there is none, B and C are parameters


@pytest.fixture(scope="module")
def params():
    return build_model(MambaConfig(vocab_size=256, d_model=16, n_layer=2), seed=0)[1]


def by_name(tree):
    """Leaves by their path, without the names of the modules that only group others."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(k.key for k in path if k.key not in ("layers", "mixer")): leaf for path, leaf in leaves}


def test_zero_gradients_leave_what_has_no_decay(params):
    # state-spaces/mamba 798: decay on A_log and D
    optimizer = make_optimizer(CONFIG)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zero, optimizer.init(params), params)
    before, after = by_name(params), by_name(optax.apply_updates(params, updates))
    assert set(before) == DECAYED | NOT_DECAYED
    for name in NOT_DECAYED:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    for name in DECAYED:
        np.testing.assert_allclose(after[name], 0.95 * before[name], rtol=1e-6, err_msg=name)
    assert {name for name, applies in by_name(decayed(params)).items() if applies} == DECAYED


def test_constant_B_and_C_have_no_decay():
    _, params = build_model(MambaConfig(vocab_size=256, d_model=16, n_layer=2, selective=False), seed=0)
    applied = by_name(decayed(params))
    assert set(applied) == (DECAYED - SELECTION) | NOT_DECAYED | {"B", "C"}
    assert {name for name, applies in applied.items() if applies} == DECAYED - SELECTION


def test_moments_are_float32(params):
    state = make_optimizer(CONFIG).init(params)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(params))
    assert {leaf.dtype for leaf in moments} == {jnp.dtype("float32")}


def test_rate_warms_up_and_falls_by_half_a_cosine():
    rate = learning_rate(TrainConfig(lr=1.0, min_lr=0.1, warmup_steps=4, decay_steps=14, steps=5))
    np.testing.assert_allclose([rate(i) for i in range(5)], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    np.testing.assert_allclose(rate(9), 0.55, rtol=1e-6)
    np.testing.assert_allclose([rate(14), rate(100)], 0.1, rtol=1e-6)


def test_a_short_run_is_the_beginning_of_a_longer_one():
    short, long = (learning_rate(TrainConfig(steps=steps, decay_steps=100)) for steps in (5, 100))
    assert [float(short(i)) for i in range(100)] == [float(long(i)) for i in range(100)]
    # One that goes beyond the cosine stretches it instead of idling at its end.
    assert float(learning_rate(TrainConfig(steps=200, decay_steps=100))(100)) > TrainConfig().min_lr * 2


def test_large_gradients_are_clipped():
    def moment_of(scale):
        optimizer, params = make_optimizer(TrainConfig(grad_clip=1.0)), {"kernel": jnp.zeros((2,))}
        _, state = optimizer.update({"kernel": scale * jnp.array([3.0, 4.0])}, optimizer.init(params), params)
        return next(leaf for leaf in jax.tree.leaves(state) if leaf.ndim)

    np.testing.assert_allclose(moment_of(1.0), moment_of(1e6), rtol=1e-6)
    np.testing.assert_allclose(moment_of(0.01), 0.05 * moment_of(1.0), rtol=1e-5)


def test_global_norm():
    assert float(global_norm({"a": jnp.array([3.0]), "b": jnp.array([[4.0]], jnp.bfloat16)})) == 5.0
