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


def documents_groups_mixture():
    """Packed documents, three groups, a ragged length, every dtype."""
    return _features(b=2, l=1000, d=1536, n=16, g=3, dtypes=("bfloat16", "float32", "float16", "bfloat16"))


def constant_projections():
    """B and C that do not vary: their gradients are sums in registers."""
    return _features(b=2, l=1024, d=512, n=16, g=1, dtypes=("float32",) * 4, constant="BC", documents=False)


def constant_B_mixture():
    """All at once that takes registers beside a B that does not vary and its sums."""
    return _mixture("B")


def constant_C_mixture():
    """The same with C."""
    return _mixture("C")


def _mixture(constant):
    dtypes = ("bfloat16", "float32", "float16", "bfloat16")
    return _features(b=2, l=1000, d=1536, n=16, g=1, dtypes=dtypes, constant=constant)


def narrow_state():
    """Sizes that must be padded for the copy engine; no gate."""
    return _features(b=2, l=77, d=36, n=3, g=2, dtypes=("float16",) * 4, gate=False)


def many_states():
    """More states than a program holds."""
    return _features(b=2, l=512, d=256, n=40, g=1, dtypes=("bfloat16",) * 4)


def _features(*, b, l, d, n, g, dtypes, gate=True, constant="", documents=True):
    u, delta, z, projection = dtypes
    shape = jax.ShapeDtypeStruct
    projections = {name: shape((d, n) if name in constant else (b, l, g, n), projection) for name in "BC"}
    arrays = {
        "u": shape((b, l, d), u),
        "delta": shape((b, l, d), delta),
        "A": shape((d, n), "float32"),
        **projections,
    }
    if gate:
        arrays["z"] = shape((b, l, d), z)

    def loss(arrays, segment_ids):
        ids = segment_ids if documents else None
        y = selective_scan(**arrays, delta_softplus=True, segment_ids=ids, scan="pallas")
        return jnp.sum(y.astype(jnp.float32) ** 2)

    return jax.grad(loss), [arrays, shape((b, l), "int32")]
