import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax.block import Mamba
from mamba_jax.reference.oracle import selective_scan_oracle
from mamba_jax.state import MambaState

BATCH, LENGTH, WIDTH = 4, 9, 10
FORMS = ("sequential", "associative", "pallas")


def block(**options):
    """A small block of odd sizes in which nothing is zero or one: biases, D and norms take part."""
    options = {"d_state": 3, "expand": 1.5, "dt_rank": 2, "bias": True, "scan": "sequential"} | options
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Mamba(WIDTH, **options, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(1)

    def draw(leaf):
        return jnp.asarray(0.4 * rng.standard_normal(leaf.shape), leaf.dtype)

    return nnx.merge(graphdef, jax.tree.map(draw, params))


def activations(length=LENGTH, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((BATCH, length, WIDTH)), jnp.float32)


COMPILED = {}


def call(layer, x, state=None, mask=None, segment_ids=None):
    """(y, state) of the block, compiled once for each shape in all tests together."""
    graphdef, params = nnx.split(layer)

    def forward(params, x, state, mask, segment_ids):
        layer = nnx.merge(graphdef, params)
        return layer(x, state=state, attention_mask=mask, segment_ids=segment_ids, return_state=True)

    return COMPILED.setdefault(graphdef, jax.jit(forward))(params, x, state, mask, segment_ids)


def assert_close(got, expected):
    """In float32, of values from the smallest to some 100: compilers order the sums differently."""
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-5)


def assert_states_close(got, expected):
    jax.tree.map(assert_close, got, expected)


def silu(x):
    return x / (1 + np.exp(-x))


def in_numpy(layer, x):
    """The block in float64 NumPy, from its definition: (b, l, d_model) -> same, and the last state."""
    p = {"/".join(path): np.asarray(v, np.float64) for path, v in nnx.to_flat_state(nnx.state(layer, nnx.Param))}
    x, z = np.split(np.asarray(x, np.float64) @ p["in_proj/kernel"] + p["in_proj/bias"], 2, axis=-1)
    inputs = np.pad(x, ((0, 0), (layer.d_conv - 1, 0), (0, 0)))
    u = silu(sum(p["conv_weight"][k] * inputs[:, k : k + x.shape[1]] for k in range(layer.d_conv)) + p["conv_bias"])
    if layer.selective:
        dt, B, C = np.split(u @ p["x_proj/kernel"], [layer.dt_rank, layer.dt_rank + layer.d_state], axis=-1)
        if layer.bcdt_norm_eps is not None:
            dt, B, C = (v / np.sqrt((v**2).mean(-1, keepdims=True) + layer.bcdt_norm_eps) for v in (dt, B, C))
        delta = dt @ p["dt_proj/kernel"]
    else:
        delta, B, C = np.zeros_like(u), p["B"], p["C"]
    y, h = selective_scan_oracle(
        u, delta, -np.exp(p["A_log"]), B, C, p["D"], z, p["dt_bias"], delta_softplus=True
    )  # fmt: skip
    return y @ p["out_proj/kernel"] + p["out_proj/bias"], inputs[:, x.shape[1] :], h


@pytest.mark.parametrize("options", [{}, {"use_bcdt_norm": True, "mixer_rms_eps": 0.01}, {"selective": False}])
@pytest.mark.parametrize("scan", FORMS)
def test_definition(scan, options):
    layer, x = block(scan=scan, **options), activations()
    y, state = call(layer, x)
    expected, window, h = in_numpy(layer, x)
    assert_close(y, expected)
    assert_close(state.conv, window)
    assert_close(state.ssm, h)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4])
def test_short_prompts_continue_like_the_full_pass(length):
    """state-spaces/mamba 56: prompts shorter than the convolution."""
    layer, x = block(), activations()
    expected, _ = call(layer, x)
    first, state = call(layer, x[:, :length], layer.init_state(BATCH))
    second, _ = call(layer, x[:, length : length + 5], state)
    assert_close(jnp.concatenate([first, second], axis=1), expected[:, : length + 5])


@pytest.mark.parametrize("selective", [True, False])
def test_token_by_token_is_the_full_pass(selective):
    """state-spaces/mamba 500, 187: step and forward agree, in outputs and states."""
    layer, x = block(selective=selective), activations()
    expected, last = call(layer, x)
    state, ys = layer.init_state(BATCH), []
    for t in range(LENGTH):
        y, state = call(layer, x[:, t : t + 1], state)
        ys.append(y)
    assert_close(jnp.concatenate(ys, axis=1), expected)
    assert_states_close(state, last)


# 1 for tokens; each row has five, among padding of every kind.
MASK = np.array(
    [
        [1, 1, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1, 1],
        [0, 1, 0, 1, 1, 0, 0, 1, 1],
        [1, 0, 0, 1, 0, 1, 1, 1, 0],
    ]
)


def padded(x, filler):
    """The tokens of x (4, 5, d) put where MASK has them, `filler` elsewhere."""
    full = np.full((*MASK.shape, WIDTH), filler, np.float32)
    full[MASK == 1] = np.asarray(x).reshape(-1, WIDTH)
    return jnp.asarray(full)


@pytest.mark.parametrize("options", [{}, {"conv_bias": False}, {"selective": False}])
def test_padding_changes_nothing(options):
    """transformers 31540, state-spaces/mamba 66: with biases, before and after, and for the state that continues."""
    layer, x, more = block(**options), activations(5), activations(5, seed=1)
    y, state = call(layer, x)
    y_padded, state_padded = call(layer, padded(x, 7.0), None, MASK)
    assert_close(y_padded[MASK == 1].reshape(y.shape), y)
    np.testing.assert_array_equal(y_padded[MASK == 0], 0)
    assert_states_close(state_padded, state)

    y, last = call(layer, more, state)
    y_padded, last_padded = call(layer, padded(more, 7.0), state_padded, MASK)
    assert_close(y_padded[MASK == 1].reshape(y.shape), y)
    assert_states_close(last_padded, last)


@pytest.mark.parametrize("filler", [np.nan, np.inf, 1e30])
def test_what_stands_in_the_padding_changes_not_a_bit(filler):
    layer, x = block(), activations(5)
    expected = call(layer, padded(x, 0.0), None, MASK)
    got = call(layer, padded(x, filler), None, MASK)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.fixture(scope="module")
def gradients_without_padding():
    return gradients(block(), activations(5), None)


def gradients(layer, x, mask):
    """Of some loss, with respect to (parameters, x)."""
    graphdef, params = nnx.split(layer)

    def loss(params, x):
        return jnp.sum(jnp.sin(nnx.merge(graphdef, params)(x, attention_mask=mask)))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)


@pytest.mark.parametrize("scan", FORMS)
def test_gradients_through_padding(scan, gradients_without_padding):
    of_params, of_x = gradients_without_padding
    of_params_padded, of_x_padded = gradients(block(scan=scan), padded(activations(5), np.nan), MASK)
    np.testing.assert_array_equal(of_x_padded[MASK == 0], 0)
    np.testing.assert_allclose(of_x_padded[MASK == 1].reshape(of_x.shape), of_x, atol=1e-5, rtol=1e-4)
    for got, expected in zip(jax.tree.leaves(of_params_padded), jax.tree.leaves(of_params), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=1e-4)


def test_a_row_of_padding_keeps_its_state():
    layer, x = block(), activations()
    _, state = call(layer, x)
    y, after = call(layer, x[:, :5], state, np.zeros((BATCH, 5), MASK.dtype))
    np.testing.assert_array_equal(y, 0)
    jax.tree.map(np.testing.assert_array_equal, after, state)


# Row 0 returns to an earlier id, one token later; the ids are arbitrary numbers.
SEGMENTS = np.array([[4, 4, -1, 4, 4, 4, 4, 0, 0], [2**31 - 1] * 5 + [3] * 4, [0] * 9, [7] * 8 + [6]])
# (row, start, stop) of each document
DOCUMENTS = [(0, 0, 2), (0, 2, 3), (0, 3, 7), (0, 7, 9), (1, 0, 5), (1, 5, 9), (2, 0, 9), (3, 0, 8), (3, 8, 9)]


@pytest.fixture(scope="module")
def separate_documents():
    """(y, last state) of each document by itself: its tokens first in a row, whose rest causality keeps out."""
    layer, x, results = block(), activations(), []
    for row, start, stop in DOCUMENTS:
        alone = jnp.zeros_like(x).at[0, : stop - start].set(x[row, start:stop])
        mask = np.arange(LENGTH) < np.array([[stop - start]] * BATCH)
        y, state = call(layer, alone, None, mask)
        results.append((y[0, : stop - start], state.take([0])))
    return results


@pytest.mark.parametrize("scan", FORMS)
def test_packed_documents_equal_separate_ones(scan, separate_documents):
    """state-spaces/mamba 180, 244: in scan and convolution."""
    y, state = call(block(scan=scan), activations(), None, None, SEGMENTS)
    for (row, start, stop), (expected, last) in zip(DOCUMENTS, separate_documents, strict=True):
        assert_close(y[row, start:stop], expected)
        if stop == LENGTH:
            assert_close(state.conv[row], last.conv[0])
            assert_close(state.ssm[row], last.ssm[0])
    np.testing.assert_array_equal(state.segment_id, SEGMENTS[:, -1])


@pytest.mark.parametrize("scan", FORMS)
def test_gradients_across_documents_are_zero(scan):
    layer, x = block(scan=scan), activations()
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(layer(x, segment_ids=SEGMENTS)[0, 3:7]))))(x)
    np.testing.assert_array_equal(gradient[0, :3], 0)
    np.testing.assert_array_equal(gradient[0, 7:], 0)
    np.testing.assert_array_equal(gradient[1:], 0)
    assert jnp.abs(gradient[0, 3:7]).min() > 0


@pytest.mark.parametrize("split", [1, 3, 8])
def test_documents_go_on_over_calls(split):
    """The state remembers each row's document: another id starts afresh, the same one goes on."""
    layer, x = block(), activations()
    expected, last = call(layer, x, None, None, SEGMENTS)
    first, state = call(layer, x[:, :split], layer.init_state(BATCH), None, SEGMENTS[:, :split])
    second, state = call(layer, x[:, split:], state, None, SEGMENTS[:, split:])
    assert_close(jnp.concatenate([first, second], axis=1), expected)
    assert_states_close(state, last)


def test_without_ids_the_document_goes_on():
    layer, x = block(), activations()
    _, state = call(layer, x[:, :4], None, None, np.full((BATCH, 4), 5))
    plain = call(layer, x[:, 4:], state)
    np.testing.assert_array_equal(plain[1].segment_id, 5)
    with_ids = call(layer, x[:, 4:], state, None, np.full((BATCH, 5), 5))
    assert_states_close(with_ids, plain)


def test_the_first_ids_after_a_call_without_any_go_on():
    """No id is special: 0 is an id like any other, and a row that never had one takes the first that comes."""
    layer, x = block(), activations()
    expected, _ = call(layer, x)
    for segment in (0, 5):
        _, state = call(layer, x[:, :4])
        y, _ = call(layer, x[:, 4:], state, None, np.full((BATCH, 5), segment))
        assert_close(y, expected[:, 4:])


def test_ids_at_padding_are_not_read():
    layer, x = block(), activations(5)
    segments = np.array([[1, 1, 2, 2, 2]] * 4)
    expected = call(layer, x, None, None, segments)
    for filler in (1, 9):
        ids = np.full(MASK.shape, filler)
        ids[MASK == 1] = segments.reshape(-1)
        y, state = call(layer, padded(x, np.nan), None, MASK, ids)
        assert_close(y[MASK == 1].reshape(expected[0].shape), expected[0])
        assert_states_close(state, expected[1])


def test_the_callers_state_can_be_used_again():
    layer, x = block(), activations()
    _, state = call(layer, x)
    before = jax.tree.map(np.array, state)
    first = call(layer, x, state)
    second = call(layer, x, state)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), before)


def test_a_state_of_two_arrays_is_enough():
    layer, x = block(), activations()
    zero = layer.init_state(BATCH)
    expected = call(layer, x, zero, None, SEGMENTS)
    got = call(layer, x, MambaState(conv=zero.conv, ssm=zero.ssm), None, SEGMENTS)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_activations(dtype):
    """state-spaces/mamba 6, 923; vllm 13466: parameters, effective A and states stay float32."""
    x = activations()
    wide, narrow = block(), block(dtype=dtype)
    y, state = call(narrow, x.astype(dtype))
    assert y.dtype == dtype
    assert state.conv.dtype == state.ssm.dtype == jnp.float32
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(narrow)))
    np.testing.assert_allclose(np.asarray(y, np.float32), call(wide, x)[0], atol=0.1, rtol=3e-2)

    # One step from a state of ones with nothing added (B = C = 0) shows exp(Delta A) by itself.
    narrow.x_proj.kernel[...] = jnp.zeros_like(narrow.x_proj.kernel[...])
    ones = MambaState(conv=jnp.zeros_like(state.conv), ssm=jnp.ones_like(state.ssm))
    _, after = call(narrow, x[:, :1].astype(dtype), ones)
    Delta = np.log1p(np.exp(np.asarray(narrow.dt_bias[...], np.float64)))
    decay = np.exp(-Delta[:, None] * np.exp(np.asarray(narrow.A_log[...], np.float64)))
    assert_close(after.ssm, np.broadcast_to(decay, after.ssm.shape))


@pytest.mark.parametrize("graph", [True, False])
def test_both_modes_of_nnx(graph):
    x = activations()
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
        layer = block()
        expected = call(layer, x)[0]
        assert_close(nnx.jit(layer)(x), expected)
        assert_close(jax.jit(layer)(x), expected)
        gradients = nnx.jit(nnx.grad(lambda layer: jnp.sum(layer(x) ** 2)))(layer)
        assert all(jnp.any(leaf) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": jnp.zeros((2, WIDTH))}, r"`x` must have shape \(batch, length, 10\), got \(2, 10\)"),
        ({"x": jnp.zeros((2, 3, 4))}, r"`x` must have shape \(batch, length, 10\), got \(2, 3, 4\)"),
        ({"attention_mask": np.ones((2, 4))}, r"`attention_mask` must have shape .* = \(4, 9\), got \(2, 4\)"),
        ({"segment_ids": np.ones((9,), int)}, r"`segment_ids` must have shape .* = \(4, 9\), got \(9,\)"),
        ({"segment_ids": np.ones((4, 9))}, "`segment_ids` must be of an integer dtype, got float"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        block()(**({"x": activations()} | arguments))


def test_wrong_state():
    layer = block()
    with pytest.raises(ValueError, match=r"`state\.conv` must have shape \(4, 3, 15\), got \(5, 3, 15\)"):
        layer(activations(), state=layer.init_state(5))


@pytest.mark.parametrize("argument", ["d_state", "scan", "dt_rank"])
def test_wrong_construction(argument):
    with pytest.raises(ValueError, match=f"`{argument}` must be"):
        block(**{argument: "none"})
