"""What `gpu_report --function` compiles for the tests: the public scan and its gradient, at real sizes."""

import functools

import jax
import jax.numpy as jnp

from mamba_jax import selective_scan

SIZES = (8, 2048, 2048, 16)  # b, l, d, n
SMALL_BATCH = (1, 2048, 1536, 16)


def scan(*arguments):
    """With softplus, skip, gate, initial and last state."""
    *arguments, initial_state = arguments
    options = {"delta_softplus": True, "initial_state": initial_state, "return_last_state": True, "scan": "pallas"}
    return selective_scan(*arguments, **options)


def gradient(*arguments):
    """Of a loss on y and the last state, in every argument."""

    def loss(*arguments):
        y, last_state = scan(*arguments)
        return jnp.sum(y.astype(jnp.float32) ** 2) + jnp.sum(last_state**2)

    return jax.grad(loss, range(len(arguments)))(*arguments)


def _case(function, sizes, dtype):
    b, l, d, n = sizes
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    sequence, projection = jax.ShapeDtypeStruct((b, l, d), dtype), jax.ShapeDtypeStruct((b, l, n), dtype)
    return function, [
        *(sequence, sequence, shape((d, n)), projection, projection),
        *(shape((d,)), sequence, shape((d,)), shape((b, d, n))),
    ]


def forward_float32():
    return _case(scan, SIZES, jnp.float32)


def forward_bfloat16():
    return _case(scan, SIZES, jnp.bfloat16)


def gradient_float32():
    return _case(gradient, SIZES, jnp.float32)


def gradient_bfloat16():
    return _case(gradient, SIZES, jnp.bfloat16)


def split_bfloat16():
    return _case(gradient, SMALL_BATCH, jnp.bfloat16)
