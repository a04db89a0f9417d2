"""The portable kernels alone, as somebody calls them who does not use `mamba_jax`: values, gradients, dtypes, errors.

The suite of all scan forms runs them too, through `mamba_jax.selective_scan`; here is what is the kernels' own.
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_kernels
from mamba_jax.reference.oracle import selective_scan_oracle, selective_scan_oracle_gradients
from pallas_kernels import portable, tiling
from pallas_kernels.arguments import Arguments

FLOATING = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")


def make_arguments(b=2, l=5, d=4, n=3, g=1, *, gate=True, reset=True, constant=(), dtype=jnp.float32):
    """Random arguments: B, C in `constant` do not vary with time; all sequences have one dtype."""
    rng = np.random.default_rng(b + 10 * l + 100 * d)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    return Arguments(
        u=normal(b, l, d, dtype=dtype),
        delta=normal(b, l, d, dtype=dtype) / 2,
        A=-jnp.abs(normal(d, n)),
        B=normal(*((1, 1, d, n) if "B" in constant else (b, l, g, n)), dtype=dtype),
        C=normal(*((1, 1, d, n) if "C" in constant else (b, l, g, n)), dtype=dtype),
        D=normal(d),
        z=normal(b, l, d, dtype=dtype) if gate else None,
        delta_bias=normal(d),
        initial_state=normal(b, d, n),
        reset=jnp.asarray(rng.random((b, l)) < 0.2) if reset else None,
    )


def cotangents(arguments):
    rng = np.random.default_rng(0)
    dy, dlast = (rng.standard_normal(x.shape) for x in (arguments.u, arguments.initial_state))
    return jnp.asarray(dy, arguments.u.dtype), jnp.asarray(dlast, arguments.A.dtype)


@functools.partial(jax.jit, static_argnames="delta_softplus")
def run(arguments, dy, dlast, delta_softplus=True):
    """(y, last_state) and the gradients of their products with the cotangents, by name."""

    def scan(floating):
        return pallas_kernels.selective_scan(*arguments._replace(**floating), delta_softplus=delta_softplus)

    floating = {name: getattr(arguments, name) for name in FLOATING if getattr(arguments, name) is not None}
    results, pull = jax.vjp(scan, floating)
    return results, pull((dy, dlast))[0]


def oracle(arguments, dy, dlast, delta_softplus=True):
    """The same in float64, by a reverse recursion written by hand."""
    wide = {name: None if x is None else np.asarray(x, "float64") for name, x in arguments._asdict().items()}
    reset = wide.pop("reset")
    for name in ("B", "C"):
        if wide[name].shape[:3] == (1, 1, wide["u"].shape[2]):
            wide[name] = wide[name][0, 0]
    # The oracle takes ids, and starts from the initial state whatever the first id is.
    first = np.zeros_like(wide["u"][:, :1, 0]) if reset is None else reset[:, :1]
    wide["initial_state"] = np.where(first[..., None] != 0, 0, wide["initial_state"])
    options = {
        "delta_softplus": delta_softplus,
        "segment_ids": None if reset is None else np.cumsum(reset, 1).astype(int),
    }
    results = selective_scan_oracle(**wide, **options)
    gradients = selective_scan_oracle_gradients(
        **wide, **options, dy=np.asarray(dy, "float64"), dlast=np.asarray(dlast, "float64")
    )
    gradients["initial_state"] = np.where(first[..., None] != 0, 0, gradients["initial_state"])
    return results, gradients


def assert_same(got, wanted, tolerance):
    """The largest error, relative to the largest entry."""
    got, wanted = np.asarray(got, "float64"), np.asarray(wanted, "float64").reshape(got.shape)
    assert np.abs(got - wanted).max(initial=0) <= tolerance * np.abs(wanted).max(initial=1e-6)


CASES = {
    "all features": {},
    "one step": {"l": 1},
    "bare": {"gate": False, "reset": False, "l": 40},
    "constant B": {"constant": ("B",), "l": 33, "d": 6, "g": 2},
    "constant C": {"constant": ("C",), "l": 33, "d": 6, "g": 3},
    "constant both": {"constant": ("B", "C"), "l": 16},
    "ragged channels": {"d": 130, "l": 19, "n": 1},
    "groups": {"d": 6, "g": 3, "l": 17},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("delta_softplus", [True, False])
def test_float32_agrees_with_the_float64_oracle(name, delta_softplus):
    arguments = make_arguments(**CASES[name])
    if not delta_softplus:
        arguments = arguments._replace(delta=jnp.abs(arguments.delta), delta_bias=jnp.abs(arguments.delta_bias))
    dy, dlast = cotangents(arguments)
    results, gradients = run(arguments, dy, dlast, delta_softplus)
    wanted, wanted_gradients = oracle(arguments, dy, dlast, delta_softplus)
    for got, right in zip(results, wanted):
        assert_same(got, right, 2e-6)
    for key, got in gradients.items():
        assert_same(got, wanted_gradients[key], 2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_inputs_are_computed_in_float32(dtype):
    arguments = make_arguments(l=20, dtype=dtype)
    dy, dlast = cotangents(arguments)
    results, gradients = run(arguments, dy, dlast)
    wanted, wanted_gradients = oracle(arguments, dy, dlast)
    rounding = 2**-7 if dtype == "bfloat16" else 2**-10
    assert_same(results[0], wanted[0], rounding)
    assert_same(results[1], wanted[1], 2e-6)
    for key, got in gradients.items():
        narrow = key in ("u", "delta", "B", "C", "z")
        assert got.dtype == (dtype if narrow else "float32")
        assert_same(got, wanted_gradients[key], rounding if narrow else 2e-6)


def test_every_mixture_keeps_each_dtype():
    base = make_arguments()
    for i, name in enumerate(("u", "delta", "B", "C", "z")):
        dtype = ("bfloat16", "float16")[i % 2]
        arguments = base._replace(**{name: getattr(base, name).astype(dtype)})
        (y, last), gradients = run(arguments, *cotangents(arguments))
        assert y.dtype == arguments.u.dtype
        assert last.dtype == jnp.float32
        assert {key: g.dtype for key, g in gradients.items()} == {
            key: getattr(arguments, key).dtype for key in FLOATING
        }


def test_float64_on_the_interpreter():
    with jax.enable_x64(True):
        arguments = jax.tree.map(lambda x: x if x.dtype == bool else x.astype("float64"), make_arguments(l=18))
        dy, dlast = cotangents(arguments)
        results, gradients = run(arguments, dy, dlast)
        wanted, wanted_gradients = oracle(arguments, dy, dlast)
        for got, right in zip(results, wanted):
            assert_same(got, right, 1e-14)
        for key, got in gradients.items():
            assert_same(got, wanted_gradients[key], 1e-14)


@pytest.mark.parametrize("empty", [{"b": 0}, {"l": 0}, {"d": 0}, {"n": 0}])
def test_empty_sizes(empty):
    arguments = make_arguments(**empty)
    (y, last), gradients = run(arguments, *cotangents(arguments))
    np.testing.assert_array_equal(last, arguments.initial_state)
    gate = arguments.z * jax.nn.sigmoid(arguments.z)
    np.testing.assert_allclose(y, arguments.D * arguments.u * gate, rtol=1e-6)
    assert all(g.shape == getattr(arguments, key).shape for key, g in gradients.items())


def test_padding_leaves_no_trace():
    """delta = -1e4 under softplus makes Delta exactly 0: the state stays as it was, and nothing flows back."""
    arguments = make_arguments(l=20, reset=False)
    padded = arguments._replace(delta=arguments.delta.at[:, 12:].set(-1e4))
    short = Arguments(*(x[:, :12] if x is not None and x.shape[:2] == (2, 20) else x for x in arguments))
    dy, dlast = cotangents(arguments)
    (_, last), gradients = run(padded, dy.at[:, 12:].set(0), dlast)
    (_, short_last), short_gradients = run(short, dy[:, :12], dlast)
    np.testing.assert_array_equal(last, short_last)
    for key in ("A", "D", "delta_bias", "initial_state"):
        np.testing.assert_array_equal(gradients[key], short_gradients[key])
    for key in ("u", "delta", "B"):
        np.testing.assert_array_equal(gradients[key][:, 12:], 0)
        np.testing.assert_array_equal(gradients[key][:, :12], short_gradients[key])


def test_same_bits_every_run():
    arguments = make_arguments(l=37, d=260)
    first = run(arguments, *cotangents(arguments))
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, run(arguments, *cotangents(arguments)), first)


def test_vmap():
    batches = [make_arguments(l=l) for l in (5, 5)]
    batches[1] = jax.tree.map(lambda x: x if x.dtype == bool else x * 0.9, batches[1])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)
    got = jax.vmap(lambda a: run(a, *cotangents(batches[0])))(stacked)
    for i, arguments in enumerate(batches):
        wanted = run(arguments, *cotangents(batches[0]))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x[i], y, rtol=1e-5, atol=1e-6), got, wanted)  # noqa: B023


def test_replicated_on_a_mesh_with_explicit_axes():
    arguments = make_arguments()
    wanted = run(arguments, *cotangents(arguments))
    with jax.set_mesh(jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Explicit,))):
        got = run(arguments, *cotangents(arguments))
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_many_batch_rows_and_channels():
    """More programs than a GPU's second and third grid axis hold."""
    arguments = make_arguments(b=65537, l=1, d=1, n=1)
    y, _ = pallas_kernels.selective_scan(*arguments, delta_softplus=True)
    wanted, _ = oracle(arguments, *cotangents(arguments))
    assert_same(y, wanted[0], 2e-6)


# -- what a GPU's tiling does, run by the interpreter ------------------------------------------------------------------


@pytest.mark.parametrize("l", [1, 2, 5, 16, 19, 33])
def test_several_steps_at_once_reach_past_the_end_in_safety(l):
    """Triton's kernels take two steps at once: the interpreter can do the same."""
    arguments = make_arguments(l=l, d=6, n=3)
    dy, dlast = cotangents(arguments)
    cut = tiling.interpreter_tiling(arguments.sizes)
    wide = dataclasses.replace(cut, forward_unroll=4, backward_unroll=2, channels=4)
    wanted, wanted_gradients = oracle(arguments, dy, dlast)
    y, last, kept = portable.forward(arguments, wide, delta_softplus=True, keep_states=True)
    gradients = portable.backward(arguments, kept, dy, dlast, wide, delta_softplus=True)
    assert_same(y, wanted[0], 2e-6)
    assert_same(last, wanted[1], 2e-6)
    for key in FLOATING:
        assert_same(getattr(gradients, key), wanted_gradients[key], 2e-6)


def test_rows_of_nan_beside_the_inputs_do_no_harm():
    """Buffers full of NaN are freed before each run: a row that no program writes would show them."""
    arguments = make_arguments(l=5, d=130)
    wanted = run(arguments, *cotangents(arguments))
    for _ in range(3):
        garbage = [jnp.full(x.shape, jnp.nan) for x in (*arguments[:9], *arguments[:9])]
        jax.block_until_ready(garbage)
        del garbage
        got = run(arguments, *cotangents(arguments))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)


# -- errors, and programs for other platforms --------------------------------------------------------------------------


def scan_of_u(arguments):
    return lambda u: jnp.sum(pallas_kernels.selective_scan(*arguments._replace(u=u), delta_softplus=True)[0] ** 2)


def test_second_derivatives_name_the_other_forms():
    arguments = make_arguments()
    with pytest.raises(NotImplementedError, match=r"second derivatives.*sequential.*associative"):
        jax.hessian(scan_of_u(arguments))(arguments.u)
    with pytest.raises(NotImplementedError, match=r"second derivatives.*sequential.*associative"):
        jax.grad(lambda u: jnp.sum(jax.grad(scan_of_u(arguments))(u)))(arguments.u)


def test_forward_mode_is_refused():
    arguments = make_arguments()
    with pytest.raises((NotImplementedError, TypeError), match=r"forward[- ]mode"):
        jax.jvp(scan_of_u(arguments), (arguments.u,), (arguments.u,))


def test_complex_is_refused():
    arguments = make_arguments()
    with pytest.raises(NotImplementedError, match=r"real.*sequential.*associative"):
        pallas_kernels.selective_scan(*arguments._replace(A=arguments.A + 1j), delta_softplus=True)


GPU = AbstractMesh((1,), ("d",), abstract_device=AbstractDevice("NVIDIA A100", None, platform="gpu"))


def lower(arguments, platform):
    """The program of `run` for a platform that may not be there."""
    inputs = arguments, *cotangents(arguments)  # before the mesh: nothing runs on a device that is not there
    with jax.sharding.use_abstract_mesh(GPU):
        return run.trace(*inputs).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["all features", "constant both", "ragged channels"])
def test_lowers_for_cuda_as_two_triton_kernels(name, dtype):
    with warnings.catch_warnings():  # nothing is left of the filter that silences the deprecation of Triton
        text = lower(make_arguments(**CASES[name], dtype=dtype), "cuda")
    assert text.count("__gpu$xla.gpu.triton") == 2


def test_float64_on_a_gpu_is_refused_only_there():
    with jax.enable_x64(True):
        arguments = jax.tree.map(lambda x: x if x.dtype == bool else x.astype("float64"), make_arguments())
        assert "triton" not in lower(arguments, "cpu")
        with pytest.raises(NotImplementedError, match=r"float64.*sequential.*associative"):
            lower(arguments, "cuda")


@pytest.mark.parametrize("platform", ["tpu", "rocm"])
def test_other_platforms_are_refused(platform):
    with pytest.raises(NotImplementedError, match=r"NVIDIA.*sequential.*associative"):
        lower(make_arguments(), platform)
