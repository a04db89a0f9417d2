"""mamba_jax.parallel: the model over meshes of eight virtual CPU devices computes what it computes on one."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mamba_jax import MambaConfig, MambaLM
from mamba_jax.parallel import layout_of

CONFIG = MambaConfig(vocab_size=37, d_model=16, n_layer=2, d_state=4, bias=True)
TOKENS = np.random.default_rng(0).integers(0, 37, (4, 16)).astype(np.int32)
# A document that ends at the border of two parts, one within a part, one that spans parts.
DOCUMENTS = np.array([[0] * 8 + [1] * 8, [3] * 3 + [1] * 13, [2] * 16, [0] * 5 + [1] * 2 + [5] * 9], np.int32)
STATE_BEFORE = TOKENS[:, ::-1][:, :5]


def make_mesh(**sizes):
    kinds = (AxisType.Auto,) * len(sizes)
    devices = jax.devices("cpu")[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


def everything(scan):
    """A jitted function of (params, tokens, ids): logits and last state after other tokens; gradient of both."""
    graphdef, params = nnx.split(MambaLM(CONFIG.replace(scan=scan), rngs=nnx.Rngs(0)))

    def call(params, tokens, documents):
        lm = nnx.merge(graphdef, params)
        _, state = lm(STATE_BEFORE, return_state=True)
        logits, state = lm(tokens, state=state, segment_ids=documents, return_state=True)
        return jnp.mean(logits**2) + jnp.mean(state.ssm**2) + jnp.mean(state.conv**2), (logits, state)

    options = {"xla_backend_optimization_level": 0}
    return jax.jit(jax.value_and_grad(call, has_aux=True), compiler_options=options), params


@pytest.mark.parametrize("scan", cases.FORMS)
def test_every_axis_at_once(scan):
    """Documents, a state before, the state after and all gradients, over rows, length and channels."""
    one, params = everything(scan)
    want = one(params, TOKENS, DOCUMENTS)
    with jax.set_mesh(make_mesh(data=2, seq=2, tensor=2)):
        got = everything(scan)[0](params, TOKENS, DOCUMENTS)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * max(1e-3, np.abs(b).max()))


def test_nothing_is_gathered_over_rows_and_length():
    mesh = make_mesh(data=2, seq=4)
    lm = MambaLM(CONFIG.replace(scan="sequential"), rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(lm)
    tokens = jax.device_put(np.tile(TOKENS, 2), NamedSharding(mesh, P("data", "seq")))
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(lambda params, tokens: jnp.mean(nnx.merge(graphdef, params).hidden(tokens) ** 2)))
        program = gradient.lower(params, tokens).compile().as_text()
    assert "all-gather" not in program
    assert "all-to-all" not in program
    assert "collective-permute" in program


def test_layout():
    assert layout_of(8, 8, 8) is None
    with jax.set_mesh(make_mesh(data=2, fsdp=1, seq=2, tensor=2)):
        layout = layout_of(8, 8, 8)
        assert (layout.rows, layout.length, layout.channels) == (("data",), "seq", "tensor")
        # What an axis does not divide stays whole, and so does a length of parts shorter than the convolution's window.
        layout = layout_of(3, 4, 6, shortest=3)
        assert (layout.rows, layout.length, layout.channels) == (None, None, "tensor")
        assert layout_of(3, 5, 7) is None
    with jax.set_mesh(make_mesh(data=2, fsdp=2)):
        assert layout_of(4, 1, 1).rows == ("data", "fsdp")
        assert layout_of(2, 1, 1).rows == ("data",)
    explicit = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(explicit):
        assert layout_of(4, 1, 1) is None


def test_inside_a_callers_shard_map():
    """Axes that the caller has taken by hand are no longer ours to split over."""
    lm = MambaLM(CONFIG.replace(scan="sequential"), rngs=nnx.Rngs(0))
    mesh = make_mesh(data=4)
    with jax.set_mesh(mesh):
        parts = jax.shard_map(lambda tokens: lm.hidden(tokens), in_specs=P("data"), out_specs=P("data"))
        got = jax.jit(parts)(TOKENS)
    np.testing.assert_allclose(got, jax.jit(lm.hidden)(TOKENS), rtol=1e-4, atol=1e-5)
