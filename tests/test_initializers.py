import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax import initializers

KEY = jax.random.key(0)


def test_a_log():
    A = -np.exp(initializers.a_log(KEY, (5, 4)))
    np.testing.assert_allclose(A, np.tile([-1, -2, -3, -4], (5, 1)), rtol=1e-6)


def test_dt_bias_is_log_uniform():
    dt = np.asarray(jax.nn.softplus(initializers.dt_bias(0.001, 0.1)(KEY, (4000,))))
    assert dt.min() >= 0.001 * (1 - 1e-4)
    assert dt.max() <= 0.1 * (1 + 1e-4)
    # The quartiles of a log-uniform variable on [1e-3, 1e-1]; 4000 draws put them within 5 standard errors.
    np.testing.assert_allclose(np.quantile(np.log10(dt), [0.25, 0.5, 0.75]), [-2.5, -2, -1.5], atol=0.08)


def test_dt_bias_floor():
    dt = jax.nn.softplus(initializers.dt_bias(1e-6, 1e-5, 1e-4)(KEY, (50,)))
    np.testing.assert_allclose(dt, 1e-4, rtol=1e-3)


@pytest.mark.parametrize(("scale", "bound"), [(1.0, 0.25), (2.0, 0.5)])
def test_dt_projection(scale, bound):
    weight = initializers.dt_projection(16, "random", scale)(KEY, (16, 500))
    assert bound * 0.99 < jnp.abs(weight).max() <= bound
    assert jnp.abs(weight.mean()) < 0.02 * bound
    np.testing.assert_array_equal(initializers.dt_projection(16, "constant", scale)(KEY, (16, 5)), bound)


def test_projection():
    weight = initializers.projection(100, scale=0.5)(KEY, (100, 80))
    assert 0.0499 < jnp.abs(weight).max() <= 0.05
    np.testing.assert_allclose(weight.std(), 0.05 / np.sqrt(3), rtol=0.03)


def test_embedding():
    table = initializers.embedding(0.02)(KEY, (200, 50), jnp.float32)
    np.testing.assert_allclose(table.std(), 0.02, rtol=0.03)
