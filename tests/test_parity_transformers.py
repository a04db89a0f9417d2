"""Ours against transformers' PyTorch Mamba: small random models of odd sizes, the weights carried over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax.block import Mamba
from mamba_jax.config import MambaConfig
from mamba_jax.model import MambaLM

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.parity,
    # transformers' remarks on its missing CUDA kernels and on its own deprecations are not ours to fix.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

BATCH, LENGTH = 2, 13
# (our fields, transformers' fields of the same meaning)
MODELS = {
    "plain": (MambaConfig(vocab_size=37, d_model=20, n_layer=3, d_state=5), {}),
    "biases, untied, odd width": (
        MambaConfig(
            vocab_size=29, d_model=15, n_layer=2, d_state=3, d_conv=3, expand=3, dt_rank=4, bias=True,
            tie_embeddings=False,
        ),
        {"use_bias": True, "tie_word_embeddings": False},
    ),
    "no convolution bias, residual in dtype": (
        MambaConfig(vocab_size=31, d_model=9, n_layer=2, d_state=7, d_conv=5, conv_bias=False, residual_in_fp32=False),
        {"use_conv_bias": False, "residual_in_fp32": False},
    ),
    "falcon": (
        MambaConfig(
            vocab_size=33, d_model=18, n_layer=2, d_inner=23, d_state=6, tie_embeddings=False, use_bcdt_norm=True,
            mixer_rms_eps=1e-3,
        ),
        {"tie_word_embeddings": False, "mixer_rms_eps": 1e-3},
    ),
}  # fmt: skip


@pytest.fixture(params=MODELS, ids=lambda name: name.replace(" ", "-"))
def models(request):
    """(our model, transformers' model with the same weights)."""
    config, extra = MODELS[request.param]
    # transformers knows no padded vocabulary: there every row of the embedding is a token.
    config = config.replace(pad_vocab_size_multiple=1)
    if config.use_bcdt_norm:
        config_class, model_class = transformers.FalconMambaConfig, transformers.FalconMambaForCausalLM
    else:
        config_class, model_class = transformers.MambaConfig, transformers.MambaForCausalLM
    torch.manual_seed(0)
    theirs = model_class(
        config_class(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layer,
            state_size=config.d_state,
            conv_kernel=config.d_conv,
            expand=config.expand,
            intermediate_size=config.d_inner,
            time_step_rank=config.dt_rank,
            # Large enough for the logits to tell models apart, and for the layers to matter beside the embedding.
            initializer_range=0.5,
            **({"use_bias": False} | extra),
        )
    ).float()
    theirs.config.intermediate_size = config.d_inner
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))  # else D, norms and biases are all ones or zeros
    ours = MambaLM(config, rngs=nnx.Rngs(0))
    nnx.update(ours, weights_of(theirs, ours))
    return ours, theirs.eval()


def weights_of(theirs, ours):
    """The state of `ours`, taken from the tensors of `theirs`."""
    return as_ours(dict(theirs.named_parameters()), ours)


def as_ours(tensors, ours):
    """Tensors under transformers' names, or gradients of them, as the NNX state of `ours`."""
    arrays = {name: t.detach().numpy() for name, t in tensors.items()}
    layers = ours.config.n_layer

    def stacked(name):
        return np.stack([arrays.pop(f"backbone.layers.{i}.{name}") for i in range(layers)])

    values = {
        ("embedding",): arrays.pop("backbone.embeddings.weight"),
        ("norm_f", "scale"): arrays.pop("backbone.norm_f.weight"),
        ("layers", "norm", "scale"): stacked("norm.weight"),
        ("layers", "mixer", "A_log"): stacked("mixer.A_log"),
        ("layers", "mixer", "D"): stacked("mixer.D"),
        ("layers", "mixer", "dt_bias"): stacked("mixer.dt_proj.bias"),
        ("layers", "mixer", "conv_weight"): stacked("mixer.conv1d.weight")[:, :, 0].swapaxes(1, 2),
    }
    for name in ("in_proj", "x_proj", "dt_proj", "out_proj"):
        values["layers", "mixer", name, "kernel"] = stacked(f"mixer.{name}.weight").swapaxes(1, 2)
    if ours.config.bias:
        for name in ("in_proj", "out_proj"):
            values["layers", "mixer", name, "bias"] = stacked(f"mixer.{name}.bias")
    if ours.config.conv_bias:
        values["layers", "mixer", "conv_bias"] = stacked("mixer.conv1d.bias")
    if not ours.config.tie_embeddings:
        values["lm_head", "kernel"] = arrays.pop("lm_head.weight").T
    assert not arrays, f"not carried over: {sorted(arrays)}"

    state = nnx.state(ours, nnx.Param)
    flat = dict(nnx.to_flat_state(state))
    assert set(flat) == set(values)
    for path, variable in flat.items():
        assert variable.shape == values[path].shape, path
    return nnx.from_flat_state([(path, flat[path].replace(jnp.asarray(values[path]))) for path in flat])


def tokens_of(config, length=LENGTH):
    return np.random.default_rng(0).integers(0, config.vocab_size, (BATCH, length))


def assert_close(ours, theirs, relative):
    """Within `relative` of the largest value."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=relative * max(np.abs(theirs).max(), 1e-6))


def test_logits(models):
    ours, theirs = models
    tokens = tokens_of(ours.config)
    with torch.no_grad():
        expected = theirs(torch.as_tensor(tokens)).logits.numpy()
    assert np.ptp(expected) > 1  # the comparison would be empty between models that say nothing
    assert_close(nnx.jit(lambda lm, t: lm(t))(ours, jnp.asarray(tokens)), expected, 1e-5)


def test_gradients(models):
    ours, theirs = models
    tokens = tokens_of(ours.config)
    logits = theirs(torch.as_tensor(tokens)).logits
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.as_tensor(tokens)[:, 1:].flatten()).backward()
    named = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    expected = dict(nnx.to_flat_state(as_ours(named, ours)))

    def loss(lm):
        log_p = jax.nn.log_softmax(lm(jnp.asarray(tokens))[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_p, jnp.asarray(tokens)[:, 1:, None], axis=-1))

    graphdef, params = nnx.split(ours)
    got = dict(nnx.to_flat_state(jax.jit(jax.grad(lambda p: loss(nnx.merge(graphdef, p))))(params)))
    assert set(got) == set(expected)
    for path in got:
        assert_close(got[path][...], expected[path][...], 1e-3)


def test_cached_decoding(models):
    """Our token-by-token logits and transformers' with its cache are those of the full pass."""
    ours, theirs = models
    tokens = tokens_of(ours.config)
    prompt = 6
    expected = []
    with torch.no_grad():
        output = theirs(torch.as_tensor(tokens[:, :prompt]), use_cache=True)
        expected.append(output.logits.numpy())
        for t in range(prompt, LENGTH):
            output = theirs(torch.as_tensor(tokens[:, t : t + 1]), use_cache=True, **cache_of(output))
            expected.append(output.logits.numpy())
    run = nnx.jit(lambda lm, t, s: lm(t, state=s, return_state=True))
    logits, state = run(ours, jnp.asarray(tokens[:, :prompt]), ours.init_state(BATCH))
    got = [logits]
    for t in range(prompt, LENGTH):
        logits, state = run(ours, jnp.asarray(tokens[:, t : t + 1]), state)
        got.append(logits)
    assert_close(jnp.concatenate(got, axis=1), np.concatenate(expected, axis=1), 1e-5)


def cache_of(output):
    """The keyword under which this version of transformers takes the cache that it returned."""
    for name in ("cache", "past_key_values", "cache_params"):
        if getattr(output, name, None) is not None:
            return {name: output[name]}
    raise AssertionError(f"no cache in {list(output)}")


def test_one_mixer():
    """The block alone, on activations, with its gradient with respect to them."""
    from transformers.models.mamba.modeling_mamba import MambaMixer

    torch.manual_seed(0)
    config = transformers.MambaConfig(
        hidden_size=14, state_size=5, conv_kernel=4, expand=2, time_step_rank=3, num_hidden_layers=1, vocab_size=8
    )
    theirs = MambaMixer(config, layer_idx=0).eval()
    ours = Mamba(14, d_state=5, dt_rank=3, rngs=nnx.Rngs(0))
    array = {name: jnp.asarray(p.detach().numpy()) for name, p in theirs.named_parameters()}
    for name in ("A_log", "D"):
        getattr(ours, name)[...] = array[name]
    for name in ("in_proj", "x_proj", "dt_proj", "out_proj"):
        getattr(ours, name).kernel[...] = array[f"{name}.weight"].T
    ours.dt_bias[...] = array["dt_proj.bias"]
    ours.conv_weight[...] = array["conv1d.weight"][:, 0].T
    ours.conv_bias[...] = array["conv1d.bias"]

    x = np.random.default_rng(0).standard_normal((BATCH, LENGTH, 14), dtype=np.float32)
    x_torch = torch.as_tensor(x).requires_grad_()
    y_torch = theirs(x_torch)
    (y_torch**2).sum().backward()
    gradient, y = jax.jit(jax.grad(lambda x: (jnp.sum(ours(x) ** 2), ours(x)), has_aux=True))(jnp.asarray(x))
    assert_close(y, y_torch.detach(), 1e-5)
    assert_close(gradient, x_torch.grad, 1e-3)
