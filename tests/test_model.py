import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_jax.config import MambaConfig
from mamba_jax.model import MambaLM

BATCH, LENGTH, VOCAB = 3, 8, 37


def config_of(**options):
    # The embedding is large enough for the layers to matter beside it.
    sizes = {"vocab_size": VOCAB, "d_model": 12, "n_layer": 3, "d_state": 3, "initializer_range": 1.0}
    return MambaConfig(**(sizes | {"scan": "sequential"} | options))


def model(**options):
    return MambaLM(config_of(**options), rngs=nnx.Rngs(0))


def tokens_of(length=LENGTH, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (BATCH, length)))


@pytest.fixture(scope="module")
def lm():
    return model()


@nnx.jit
def step(lm, tokens, state, mask=None, segment_ids=None):
    return lm(tokens, state=state, attention_mask=mask, segment_ids=segment_ids, return_state=True)


@nnx.jit
def logits_of(lm, tokens):
    return lm(tokens)


def parameters(lm):
    return {"/".join(path): v[...] for path, v in nnx.to_flat_state(nnx.state(lm, nnx.Param))}


def test_shapes(lm):
    logits, state = step(lm, tokens_of(), lm.init_state(BATCH))
    assert logits.shape == (BATCH, LENGTH, VOCAB)
    assert state.conv.shape == (3, BATCH, 3, 24)
    assert state.ssm.shape == (3, BATCH, 24, 3)
    assert lm.embedding.shape == (40, 12)  # rows of padding, which no logit is given for


def test_published_size():
    lm = nnx.eval_shape(lambda: MambaLM(MambaConfig.preset("mamba-130m"), rngs=nnx.Rngs(0)))
    assert sum(v.size for v in jax.tree.leaves(nnx.state(lm, nnx.Param))) == 129_135_360


def test_initial_values():
    """mad-lab 3, transformers 43717: no general initialiser overwrites what Mamba needs."""
    values = parameters(model(d_model=48, tie_embeddings=False, initializer_range=0.02, bias=True))
    assert all(v.dtype == jnp.float32 for v in values.values())
    dt = np.asarray(jax.nn.softplus(values["layers/mixer/dt_bias"]))
    assert dt.min() >= 0.999e-3
    assert dt.max() <= 0.1001
    assert len(np.unique(dt)) == dt.size  # one draw for each channel of each layer
    A_log = values["layers/mixer/A_log"]
    np.testing.assert_allclose(A_log, np.broadcast_to(np.log([1, 2, 3]), A_log.shape), rtol=1e-6)
    for name in ("layers/mixer/D", "layers/norm/scale", "norm_f/scale"):
        np.testing.assert_array_equal(values[name], 1)
    for name in ("layers/mixer/in_proj/bias", "layers/mixer/out_proj/bias"):
        np.testing.assert_array_equal(values[name], 0)
    np.testing.assert_allclose(values["embedding"].std(), 0.02, rtol=0.1)
    bounds = {
        "layers/mixer/in_proj/kernel": 48**-0.5,
        "layers/mixer/x_proj/kernel": 96**-0.5,
        "layers/mixer/dt_proj/kernel": 3**-0.5,
        "layers/mixer/out_proj/kernel": 96**-0.5 * 3**-0.5,  # three layers
        "layers/mixer/conv_weight": 0.5,
        "layers/mixer/conv_bias": 0.5,
        "lm_head/kernel": 48**-0.5,
    }
    for name, bound in bounds.items():
        assert 0.97 * bound < jnp.abs(values[name]).max() <= bound, name
    kernel = values["layers/mixer/in_proj/kernel"]
    assert not jnp.any(kernel[0] == kernel[1])  # layers are drawn independently


def test_decay_is_told_by_names(lm):
    """What is not to decay is A_log, D, and whatever has "bias" or "norm" in its path."""
    spared = {name for name in parameters(model(bias=True)) if re.search(r"A_log|/D$|bias|norm", name)}
    assert set(parameters(model(bias=True))) - spared == {
        "embedding",
        "layers/mixer/conv_weight",
        *(f"layers/mixer/{name}/kernel" for name in ("in_proj", "x_proj", "dt_proj", "out_proj")),
    }


def test_program_does_not_grow_with_depth():
    def equations(n_layer):
        lm = model(n_layer=n_layer)
        graphdef, params = nnx.split(lm)
        jaxpr = jax.make_jaxpr(jax.grad(lambda p: nnx.merge(graphdef, p)(tokens_of()).sum()))(params)
        return str(jaxpr).count("\n")

    assert equations(2) == equations(7)


@pytest.mark.parametrize("policy", ["nothing", "dots"])
def test_remat_changes_memory_alone(policy):
    tokens = tokens_of(64)

    def program(**options):
        graphdef, params = nnx.split(model(n_layer=6, **options))
        return jax.jit(jax.grad(lambda p: jnp.sum(nnx.merge(graphdef, p)(tokens) ** 2))).lower(params).compile(), params

    (plain, params), (remat, _) = program(), program(remat=True, remat_policy=policy)
    for got, expected in zip(jax.tree.leaves(remat(params)), jax.tree.leaves(plain(params)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * float(jnp.abs(expected).max()))
    assert remat.memory_analysis().temp_size_in_bytes < 0.7 * plain.memory_analysis().temp_size_in_bytes


def test_untied_head():
    lm = model(tie_embeddings=False)
    hidden = lm.hidden(tokens_of())
    expected = (np.asarray(hidden, np.float64) @ np.asarray(lm.lm_head.kernel[...], np.float64))[..., :VOCAB]
    np.testing.assert_allclose(lm.head(hidden), expected, atol=1e-5)


def test_tied_head_and_hidden(lm):
    """`hidden` and then `head` in pieces, as a chunked loss does it, is the whole call."""
    hidden, state = lm.hidden(tokens_of(), return_state=True)
    assert hidden.shape == (BATCH, LENGTH, 12)
    pieces = [lm.head(hidden[:, :3]), lm.head(hidden[:, 3:])]
    logits, expected = step(lm, tokens_of(), None)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), logits, atol=1e-5)
    np.testing.assert_allclose(state.ssm, expected.ssm, atol=1e-6)


def test_padding_rows_of_the_vocabulary_get_no_gradient(lm):
    graphdef, params = nnx.split(lm)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(jax.nn.log_softmax(nnx.merge(graphdef, p)(tokens_of()))[..., 0])))
    of_embedding = gradient(params)["embedding"][...]
    np.testing.assert_array_equal(of_embedding[VOCAB:], 0)
    assert jnp.all(jnp.any(of_embedding[:VOCAB] != 0, axis=1))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=6))
def test_any_split_is_one_pass(sizes):
    lm = SHARED.setdefault("lm", model())
    state, parts, start = lm.init_state(BATCH), [], 0
    for size in sizes:
        if start + size > LENGTH:
            break
        logits, state = step(lm, tokens_of()[:, start : start + size], state)
        parts.append(logits)
        start += size
    mask = np.broadcast_to(np.arange(LENGTH) < start, (BATCH, LENGTH)).astype(int)
    expected, last = step(lm, tokens_of(), None, mask)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), expected[:, :start], atol=1e-5)
    np.testing.assert_allclose(state.ssm, last.ssm, atol=1e-5)
    np.testing.assert_allclose(state.conv, last.conv, atol=1e-5)


SHARED = {}  # hypothesis calls a test many times with one set of fixtures; the model is made once for all of them


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_any_padding_documents_and_pieces(seed):
    """Each document of each row, cut up by padding and calls in any way, is what it is by itself."""
    lm = SHARED.setdefault("lm", model())
    rng = np.random.default_rng(seed)
    pieces, size = 3, LENGTH
    shape = (BATCH, pieces * size)
    mask = rng.random(shape) < rng.choice([0.1, 0.5, 0.9, 1.0], (BATCH, 1))
    ids = np.cumsum(rng.random(shape) < 0.2, axis=1) % 2  # an id comes back after one other
    tokens = np.where(mask, rng.integers(0, VOCAB, shape), -100)
    ids = np.where(mask, ids, rng.integers(0, 9, shape))

    state, parts = lm.init_state(BATCH), []
    for start in range(0, shape[1], size):
        piece = slice(start, start + size)
        logits, state = step(lm, jnp.asarray(tokens[:, piece]), state, mask[:, piece], ids[:, piece])
        parts.append(np.asarray(logits))
    logits = np.concatenate(parts, axis=1)

    for row in range(BATCH):
        where = np.flatnonzero(mask[row])
        begins = np.flatnonzero(np.diff(ids[row, where])) + 1
        for document in np.split(where, begins):
            alone = np.zeros(shape, int)
            alone[row, : document.size] = tokens[row, document]
            expected = logits_of(lm, jnp.asarray(alone))[row, : document.size]
            np.testing.assert_allclose(logits[row, document], expected, atol=2e-5)


def test_garbage_in_the_padding_changes_not_a_bit(lm):
    mask = np.ones((BATCH, LENGTH), int)
    mask[0, :5], mask[1, 3:], mask[2, 1:4] = 0, 0, 0
    results = []
    for garbage in (0, -100, 2**31 - 1):
        tokens = jnp.where(mask, tokens_of(), garbage)
        results.append(step(lm, tokens, None, mask))
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, results[0])


def test_reordered_states_continue_their_rows(lm):
    tokens, more = tokens_of(), tokens_of(seed=1)
    rows = jnp.asarray([2, 0, 0])
    _, state = step(lm, tokens, lm.init_state(BATCH))
    before = jax.tree.map(np.array, state)
    expected, _ = step(lm, more, state)
    got, _ = step(lm, more[rows], state.take(rows))
    np.testing.assert_allclose(got, expected[rows], atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state), before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_activations(dtype):
    lm, narrow = model(), model(dtype=dtype)
    logits, state = step(narrow, tokens_of(), narrow.init_state(BATCH))
    assert logits.dtype == state.conv.dtype == state.ssm.dtype == jnp.float32
    assert narrow.hidden(tokens_of()).dtype == dtype
    expected = logits_of(lm, tokens_of())
    np.testing.assert_allclose(logits, expected, atol=0.05 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("residual_in_fp32", [True, False])
def test_dtype_of_the_residual(residual_in_fp32):
    graphdef, params = nnx.split(model(dtype="bfloat16", residual_in_fp32=residual_in_fp32))
    jaxpr = str(jax.make_jaxpr(lambda p: nnx.merge(graphdef, p)(tokens_of(5)))(params))
    # The residual is what the scan over layers carries, hence the first of its results.
    carried = re.search(r"(\w+):(\w+)\[3,5,12\] = scan\[", jaxpr)
    assert carried is not None
    assert carried[2] == ("f32" if residual_in_fp32 else "bf16")


@pytest.mark.parametrize("graph", [True, False])
def test_both_modes_of_nnx(graph):
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
        lm = model(tie_embeddings=False)
        expected = nnx.jit(lm)(tokens_of())
        graphdef, params = nnx.split(lm)
        got = jax.jit(lambda p, t: nnx.merge(graphdef, p)(t))(params, tokens_of())
        np.testing.assert_allclose(got, expected, atol=1e-5)
        value, gradients = nnx.jit(nnx.value_and_grad(lambda lm: jnp.mean(lm(tokens_of()) ** 2)))(lm)
        np.testing.assert_allclose(value, jnp.mean(expected**2), rtol=1e-5)
        assert all(jnp.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_unknown_token_is_seen(lm):
    """An id outside the table gives NaN, not the embedding of some other token."""
    logits = logits_of(lm, jnp.full((BATCH, LENGTH), 1000))
    assert jnp.all(jnp.isnan(logits))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (jnp.zeros((2,), int), r"`tokens` must be integers of shape \(batch, length\), got int32 of shape \(2,\)"),
        (jnp.zeros((2, 3)), r"`tokens` must be integers of shape \(batch, length\), got float32 of shape \(2, 3\)"),
    ],
)
def test_wrong_tokens(lm, tokens, message):
    with pytest.raises(ValueError, match=message):
        lm(tokens)


def test_wrong_state(lm):
    other = model(n_layer=2).init_state(BATCH)
    with pytest.raises(ValueError, match=r"`state` must be of 3 layers, got `ssm` of shape \(2, 3, 24, 3\)"):
        lm(tokens_of(), state=other)
    with pytest.raises(ValueError, match=r"`state\.conv` must have shape \(3, 3, 24\), got \(5, 3, 24\)"):
        lm(tokens_of(), state=lm.init_state(5))
