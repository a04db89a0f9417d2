"""Checkpoints that transformers and PyTorch made, opened by us, and ours opened by them."""

import collections
import sys

import checkpoint_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import assert_same_parameters, edit_json, parameters_of
from flax import nnx

from mamba_jax.checkpoints.parameters import parameters, take_apart
from mamba_jax.checkpoints.safetensors_file import read_safetensors
from mamba_jax.checkpoints.torch_file import read_torch, read_torch_zip
from mamba_jax.model import MambaLM

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.parity,
    # transformers' remarks on its missing CUDA kernels and on its own deprecations are not ours to mend.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

BATCH, LENGTH = 2, 13
SIZES = {"hidden_size": 9, "num_hidden_layers": 2, "vocab_size": 31, "state_size": 5}
MODELS = {
    "mamba": ("Mamba", {}),
    "biases, untied": (
        "Mamba",
        {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False, "conv_kernel": 3, "time_step_rank": 4},
    ),
    "falcon": (
        "FalconMamba",
        # `expand` disagrees with `intermediate_size`, as in a published configuration.
        {
            "intermediate_size": 23, "expand": 16, "time_step_rank": 4, "tie_word_embeddings": False,
            "mixer_rms_eps": 1e-3,
        },
    ),
}  # fmt: skip


@pytest.fixture(params=MODELS, ids=lambda name: name.replace(" ", "-"))
def theirs(request):
    """transformers' model, none of whose parameters are all ones or zeros."""
    kind, fields = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(initializer_range=0.5, **(SIZES | fields))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def folder(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


TOKENS = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (BATCH, LENGTH))


def their_logits(model):
    with torch.no_grad():
        return model(torch.as_tensor(TOKENS)).logits.numpy()


def test_logits_and_gradients(theirs, folder):
    ours = MambaLM.from_pretrained(folder)
    logits = theirs(torch.as_tensor(TOKENS)).logits
    flat, targets = logits[:, :-1].flatten(0, 1), torch.as_tensor(TOKENS)[:, 1:].flatten()
    torch.nn.functional.cross_entropy(flat, targets).backward()
    expected = {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}

    def loss(params):
        logits = nnx.merge(graphdef, params)(jnp.asarray(TOKENS))
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), jnp.asarray(TOKENS)[:, 1:, None], axis=-1)
        return -jnp.mean(log_p), logits

    graphdef, params = nnx.split(ours)
    gradients, got = jax.jit(jax.grad(loss, has_aux=True))(params)
    assert np.ptp(logits.detach().numpy()) > 1  # models that say nothing would all agree
    np.testing.assert_allclose(got, logits.detach().numpy(), rtol=0, atol=2e-4)

    values = {tuple(map(str, path)): np.asarray(value[...]) for path, value in nnx.to_flat_state(gradients)}
    named = {
        name: array
        for parameter in parameters(ours.config, "hf")
        for name, array in zip(parameter.names, take_apart(parameter, values[parameter.path], np.dtype(np.float32)))
    }
    assert set(named) == set(expected)
    for name, gradient in expected.items():
        np.testing.assert_allclose(named[name], gradient, rtol=0, atol=1e-3 * np.abs(gradient).max(), err_msg=name)


def test_what_we_write_opens_in_transformers(theirs, folder, tmp_path):
    MambaLM.from_pretrained(folder).save_pretrained(tmp_path / "ours")
    again, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    np.testing.assert_array_equal(their_logits(again.eval()), their_logits(theirs))
    # The same tensors under the same names, bit for bit.
    source, copy = (read_safetensors(path / "model.safetensors") for path in (folder, tmp_path / "ours"))
    assert set(source) == set(copy)
    for name, tensor in source.items():
        assert tensor.read().tobytes() == copy[name].read().tobytes()
    safetensors = pytest.importorskip("safetensors.numpy")
    assert set(safetensors.load_file(tmp_path / "ours" / "model.safetensors")) == set(source)


def test_several_files(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="4KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    ours = MambaLM.from_pretrained(tmp_path / "many")
    assert_same_parameters(ours, MambaLM.from_pretrained(tmp_path / "one"))
    ours.save_pretrained(tmp_path / "ours", max_shard_bytes=4000)
    again = type(theirs).from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_array_equal(their_logits(again), their_logits(theirs))


def test_bfloat16(theirs, tmp_path):
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    got = parameters_of(MambaLM.from_pretrained(tmp_path))
    np.testing.assert_array_equal(got["embedding"], theirs.backbone.embeddings.weight.detach().float().numpy())


def test_our_padded_vocabulary_in_transformers(tmp_path):
    """Its logits are ours and, behind them, those of the padding rows."""
    ours = checkpoint_files.random_model(checkpoint_files.TIED)
    ours.save_pretrained(tmp_path)
    theirs = transformers.MambaForCausalLM.from_pretrained(tmp_path).eval()
    expected = their_logits(theirs)
    assert expected.shape[-1] == 40
    np.testing.assert_allclose(ours(jnp.asarray(TOKENS)), expected[..., :37], rtol=0, atol=2e-4)


# The original format: transformers' tensors under the original names.


def original(theirs, folder, dtype=torch.float32):
    """Write the original checkpoint of transformers' Mamba, its vocabulary of 31 padded to 32."""
    config = theirs.config
    tensors = collections.OrderedDict(theirs.to(dtype).state_dict())
    embedding = torch.nn.functional.pad(tensors.pop("backbone.embeddings.weight"), (0, 0, 0, 1))
    head = torch.nn.functional.pad(tensors.pop("lm_head.weight"), (0, 0, 0, 1))
    tensors["backbone.embedding.weight"] = embedding
    tensors["lm_head.weight"] = embedding if config.tie_word_embeddings else head
    folder.mkdir()
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text("{}")
    edit_json(
        folder / "config.json", d_model=config.hidden_size, n_layer=config.num_hidden_layers, vocab_size=31,
        rms_norm=True, residual_in_fp32=True, fused_add_norm=True, pad_vocab_size_multiple=8,
        tie_embeddings=None if config.tie_word_embeddings else False,
        ssm_cfg={
            "d_state": config.state_size, "d_conv": config.conv_kernel, "expand": config.expand,
            "dt_rank": config.time_step_rank, "bias": config.use_bias, "conv_bias": config.use_conv_bias,
        },
    )  # fmt: skip


@pytest.mark.parametrize("theirs", ["mamba", "biases, untied"], indirect=True)
@pytest.mark.parametrize("torch_there", [True, False])
def test_original_format(theirs, tmp_path, monkeypatch, torch_there):
    expected = their_logits(theirs)
    original(theirs, tmp_path / "theirs")
    if not torch_there:
        monkeypatch.setitem(sys.modules, "torch", None)
    ours = MambaLM.from_pretrained(tmp_path / "theirs")
    assert (ours.config.vocab_size, ours.embedding.shape[0]) == (31, 32)
    np.testing.assert_allclose(ours(jnp.asarray(TOKENS)), expected, rtol=0, atol=2e-4)

    ours.save_pretrained(tmp_path / "ours", format="original")
    source, copy = (torch.load(tmp_path / name / "pytorch_model.bin", weights_only=True) for name in ("theirs", "ours"))
    assert set(source) == set(copy)
    for name, tensor in source.items():
        assert torch.equal(tensor, copy[name]), name
    shared = copy["lm_head.weight"].data_ptr() == copy["backbone.embedding.weight"].data_ptr()
    assert shared == theirs.config.tie_word_embeddings


@pytest.mark.parametrize("theirs", ["mamba"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_both_readers_agree(theirs, tmp_path, dtype):
    original(theirs, tmp_path / "theirs", dtype)
    path = tmp_path / "theirs" / "pytorch_model.bin"
    one, other = read_torch(path), read_torch_zip(path)
    assert set(one) == set(other)
    for name, tensor in one.items():
        assert (tensor.shape, tensor.dtype) == (other[name].shape, other[name].dtype)
        assert tensor.read().tobytes() == other[name].read().tobytes()


@pytest.mark.parametrize("theirs", ["mamba"], indirect=True)
def test_the_old_torch_format(theirs, tmp_path):
    original(theirs, tmp_path / "new")
    original(theirs, tmp_path / "old")
    path = tmp_path / "old" / "pytorch_model.bin"
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    assert_same_parameters(MambaLM.from_pretrained(tmp_path / "old"), MambaLM.from_pretrained(tmp_path / "new"))


class Evil:
    """Would make a folder if anything in it ran."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("reader", [read_torch, read_torch_zip])
def test_code_is_refused_by_both_readers(tmp_path, reader):
    torch.save({"a": torch.zeros(2), "b": Evil(tmp_path / "ran")}, tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"a\.bin was refused.*mkdir"):
        reader(tmp_path / "a.bin")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_truncated_for_torch(tmp_path, kept):
    torch.save({"a": torch.zeros(200)}, tmp_path / "a.bin")
    content = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match=r"a\.bin is truncated or damaged"):
        read_torch(tmp_path / "a.bin")
