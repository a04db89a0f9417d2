"""train.checkpoint: what is saved comes back to the bit, whole or not at all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.checkpoint import Checkpoints, check_same_model
from train.config import TrainConfig
from train.errors import UsageError
from train.optim import make_optimizer


def state(seed):
    params = {"a": {"kernel": jax.random.normal(jax.random.key(seed), (3, 5))}, "D": jnp.full((2,), 1 / 3)}
    return {
        "params": params,
        "opt_state": make_optimizer(TrainConfig()).init(params),
        "key": jax.random.key_data(jax.random.key(seed)),
    }


def close_after(checkpoints, function):
    try:
        return function(checkpoints)
    finally:
        checkpoints.close()


def test_state_comes_back_in_another_process_life(tmp_path):
    saved = state(1)
    close_after(Checkpoints(tmp_path, keep=2), lambda c: c.save(7, saved, {"step": 7, "model": {"d_model": 3}}))

    def read(checkpoints):
        return checkpoints.latest_step(), checkpoints.meta(7), checkpoints.restore(7, state(2))

    step, meta, restored = close_after(Checkpoints(tmp_path, keep=2), read)
    assert (step, meta) == (7, {"step": 7, "model": {"d_model": 3}})
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_arrays_may_be_donated_once_save_returns(tmp_path):
    saved, expected = state(1), state(1)

    def save(checkpoints):
        checkpoints.save(1, saved, {})
        for leaf in jax.tree.leaves(saved):
            leaf.delete()
        return checkpoints.restore(checkpoints.latest_step(), expected)

    restored = close_after(Checkpoints(tmp_path, keep=1), save)
    np.testing.assert_array_equal(restored["params"]["a"]["kernel"], expected["params"]["a"]["kernel"])


def test_only_the_newest_are_kept(tmp_path):
    def save(checkpoints):
        for step in (1, 2, 3):
            checkpoints.save(step, state(step), {})

    close_after(Checkpoints(tmp_path, keep=2), save)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]


def test_no_checkpoint_is_none(tmp_path):
    assert close_after(Checkpoints(tmp_path, keep=1), lambda checkpoints: checkpoints.latest_step()) is None


def test_another_model_is_named_with_all_that_differs(tmp_path):
    saved = {"d_model": 3, "n_layer": 2, "dt_rank": 1}
    check_same_model(saved, dict(saved), tmp_path)
    with pytest.raises(UsageError, match=r"(?s)d_model: 3 there, 4 asked for.*n_layer: 2 there, 1 asked for"):
        check_same_model(saved, {"d_model": 4, "n_layer": 1, "dt_rank": 1}, tmp_path)
