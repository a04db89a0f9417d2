"""What happens while a program is lowered, and only then."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import compat


def test_only_the_branch_that_is_lowered_acts():
    said = []

    def branch(name):
        return lambda x: compat.at_lowering(x, lambda: said.append(name)) + 1

    traced = jax.jit(lambda x: lax.platform_dependent(x, cpu=branch("cpu"), cuda=branch("cuda"))).trace(jnp.ones(3))
    assert said == []
    traced.lower(lowering_platforms=("cpu",))
    assert set(said) == {"cpu"}


def test_an_action_changes_nothing():
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(compat.at_lowering(x, lambda: None), x)
    np.testing.assert_array_equal(jax.vmap(lambda row: compat.at_lowering(row, lambda: None))(x), x)


def test_an_action_can_refuse():
    def refuse():
        raise NotImplementedError("not here")

    with pytest.raises(NotImplementedError, match="not here"):
        jax.jit(lambda x: compat.at_lowering(x, refuse)).lower(jnp.ones(3))


def test_only_the_deprecation_of_triton_is_silenced():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.accept_triton_deprecation()
        warnings.warn("The Pallas Triton backend is deprecated and will be removed", DeprecationWarning, stacklevel=1)
        with pytest.raises(DeprecationWarning, match="something else"):
            warnings.warn("something else", DeprecationWarning, stacklevel=1)
