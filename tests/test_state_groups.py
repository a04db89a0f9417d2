"""More states than a GPU's kernels hold: cut into groups, the scan and its gradients stay what they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import portable, state_groups, tiling
from pallas_kernels.arguments import Arguments


@pytest.mark.parametrize("constant", [False, True])
def test_groups_give_what_one_program_gives(constant):
    b, l, d, n = 1, 5, 4, 37  # three groups of 13 states, the last of them padded
    keys = iter(jax.random.split(jax.random.key(0), 12))

    def normal(*shape):
        return jax.random.normal(next(keys), shape)

    projection = (1, 1, d, n) if constant else (b, l, 1, n)
    arguments = Arguments(
        *(normal(b, l, d), normal(b, l, d), -jnp.exp(normal(d, n)), normal(*projection), normal(*projection)),
        *(normal(d), normal(b, l, d), normal(d), normal(b, d, n), jnp.arange(l)[None] == 3),
    )
    dy, dlast = normal(b, l, d), normal(b, d, n)
    cut = tiling.interpreter_tiling(arguments.sizes)

    def whole(arguments, dy, dlast):
        forward = portable.forward(arguments, cut, delta_softplus=True, keep_states=True)
        return forward, portable.backward(arguments, forward[2], dy, dlast, cut, delta_softplus=True)

    def grouped(arguments, dy, dlast):
        forward = state_groups.forward(portable, arguments, cut, delta_softplus=True, keep_states=True)
        return forward, state_groups.backward(portable, arguments, forward[2], dy, dlast, cut, delta_softplus=True)

    def same(got, wanted):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())

    jax.tree.map(same, jax.jit(grouped)(arguments, dy, dlast), jax.jit(whole)(arguments, dy, dlast))
