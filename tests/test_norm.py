import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.norm import RMSNorm, along_last, rms_norm


@pytest.mark.parametrize("weighted", [False, True])
def test_values(weighted):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 5))
    scale = rng.standard_normal(5) if weighted else None
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * (1 if scale is None else scale)
    got = rms_norm(jnp.asarray(x, jnp.float32), None if scale is None else jnp.asarray(scale, jnp.float32), eps=0.1)
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_narrow_input_is_normed_in_float32():
    # The squares overflow float16, and the mean would be infinite.
    x = jnp.full((1, 4), 1000.0, jnp.float16)
    y = rms_norm(x, eps=1e-5)
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(np.asarray(y), 1)


def test_module():
    norm = RMSNorm(3, eps=1e-5, dtype=jnp.bfloat16)
    y = norm(jnp.asarray([[3.0, -3.0, 3.0]]))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y, np.float32), [[1, -1, 1]])
    assert norm.scale.dtype == jnp.float32


def test_along_last():
    vector = jnp.arange(3.0)
    np.testing.assert_array_equal(along_last(vector, (2, 1, 3)), jnp.broadcast_to(vector, (2, 1, 3)))
    np.testing.assert_array_equal(jax.grad(lambda v: along_last(v, (2, 5, 3)).sum())(vector), 10)
