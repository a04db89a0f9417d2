"""Checkpoints in and out, without PyTorch: what is written is read back bit for bit, and every fault is named."""

import dataclasses
import json
import pickle
import sys
import tracemalloc

import jax
import numpy as np
import pytest
from checkpoint_files import (
    CONFIGS,
    FALCON,
    TIED,
    UNTIED,
    assert_same_parameters,
    edit_json,
    parameters_of,
    random_model,
)
from jax.sharding import PartitionSpec

from mamba_jax.checkpoints.safetensors_file import read_safetensors, write_safetensors
from mamba_jax.checkpoints.torch_file import read_torch_zip
from mamba_jax.config import MambaConfig
from mamba_jax.model import MambaLM

WEIGHTS = {"hf": "model.safetensors", "original": "pytorch_model.bin"}


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it now raises ImportError


def error_of(folder, **arguments):
    """The message of the one error that loading ends in."""
    with pytest.raises(ValueError) as caught:
        MambaLM.from_pretrained(folder, **arguments)
    return str(caught.value)


def rewrite(path, change):
    """Write a safetensors file again with its {name: array} changed by `change`."""
    arrays = {name: np.array(tensor.read()) for name, tensor in read_safetensors(path).items()}
    change(arrays)
    layout = [(name, array.shape) for name, array in arrays.items()]
    write_safetensors(path, layout, np.dtype(np.float32), iter(arrays.values()))


# Round trips


@pytest.mark.parametrize("name", CONFIGS)
def test_hf_round_trip_is_exact(tmp_path, name):
    lm = random_model(CONFIGS[name])
    lm.save_pretrained(tmp_path / "model")
    again = MambaLM.from_pretrained(tmp_path / "model")
    assert again.config == lm.config
    assert_same_parameters(lm, again)
    again.save_pretrained(tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_original_round_trip_is_exact(tmp_path, name, without_torch):
    lm = random_model(CONFIGS[name])
    lm.save_pretrained(tmp_path / "model", format="original")
    again = MambaLM.from_pretrained(tmp_path / "model")
    assert again.config == lm.config
    assert_same_parameters(lm, again)
    again.save_pretrained(tmp_path / "again", format="original")
    for file in ("config.json", "pytorch_model.bin"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "model" / file).read_bytes()


def test_several_files(tmp_path):
    lm = random_model(TIED)
    lm.save_pretrained(tmp_path, max_shard_bytes=3000)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert_same_parameters(lm, MambaLM.from_pretrained(tmp_path))


@pytest.mark.parametrize("format", WEIGHTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes(tmp_path, format, dtype, without_torch):
    """Rounded once on the way out; read exactly, as float32."""
    lm = random_model(TIED)
    lm.save_pretrained(tmp_path, format=format, dtype=dtype)
    got = parameters_of(MambaLM.from_pretrained(tmp_path))
    for name, value in parameters_of(lm).items():
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], np.asarray(value, jax.numpy.dtype(dtype)).astype(np.float32))


def test_how_a_model_is_computed_is_the_callers(tmp_path):
    random_model(dataclasses.replace(TIED, scan="associative")).save_pretrained(tmp_path)
    config = MambaLM.from_pretrained(tmp_path, scan="sequential", dtype=jax.numpy.bfloat16, remat=True).config
    assert (config.scan, config.dtype, config.remat) == ("sequential", "bfloat16", True)
    assert MambaLM.from_pretrained(tmp_path).config.scan == "auto"


def test_another_checkpoint_in_the_folder_is_replaced(tmp_path):
    random_model(TIED, seed=1).save_pretrained(tmp_path, max_shard_bytes=3000)
    lm = random_model(UNTIED)
    lm.save_pretrained(tmp_path, format="original")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "pytorch_model.bin"]
    assert_same_parameters(lm, MambaLM.from_pretrained(tmp_path))


def test_a_failed_save_leaves_what_was_there(tmp_path):
    lm = random_model(TIED)
    lm.save_pretrained(tmp_path)
    broken = random_model(TIED, seed=1)
    broken.layers.mixer.D.set_value(jax.numpy.zeros((3, 2)))  # deleted arrays cannot be read
    broken.layers.mixer.D[...].delete()
    with pytest.raises(RuntimeError):
        broken.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_same_parameters(lm, MambaLM.from_pretrained(tmp_path))


# Configurations


def test_published_configs():
    """As they stand beside the published weights."""
    from mamba_jax.checkpoints.configs import read_config

    problems = []
    original = {
        "d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": True, "residual_in_fp32": True,
        "fused_add_norm": True, "pad_vocab_size_multiple": 8,
    }  # fmt: skip
    assert read_config(original, problems) == (MambaConfig.preset("mamba-130m"), "original")

    shared = {
        "bos_token_id": 0, "conv_kernel": 4, "eos_token_id": 0, "hidden_act": "silu", "initializer_range": 0.1,
        "layer_norm_epsilon": 1e-05, "pad_token_id": 0, "rescale_prenorm_residual": False, "residual_in_fp32": True,
        "state_size": 16, "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1,
        "time_step_min": 0.001, "time_step_scale": 1.0, "torch_dtype": "float32", "transformers_version": "4.39.0",
        "use_bias": False, "use_cache": True, "use_conv_bias": True,
    }  # fmt: skip
    converted = original | shared | {
        "architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24,
        "vocab_size": 50280, "expand": 2, "intermediate_size": 1536, "d_inner": 1536, "time_step_rank": 48,
    }  # fmt: skip
    config, format = read_config(converted, problems)
    assert format == "hf" and not problems
    assert (config.padded_vocab_size, config.d_inner, config.dt_rank, config.tie_embeddings) == (50280, 1536, 48, True)

    falcon = shared | {
        "architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba", "hidden_size": 4096,
        "num_hidden_layers": 64, "vocab_size": 65024, "expand": 16, "intermediate_size": 8192, "time_step_rank": 256,
        "tie_word_embeddings": False, "use_falcon_mambapy": False,
    }  # fmt: skip
    config, _ = read_config(falcon, problems)
    assert not problems
    assert (config.d_inner, config.use_bcdt_norm, config.mixer_rms_eps, config.tie_embeddings) == (
        8192,
        True,
        1e-6,
        False,
    )


def test_config_faults_are_listed_together(tmp_path):
    random_model(TIED).save_pretrained(tmp_path)
    edit_json(
        tmp_path / "config.json", sliding_window=7, hidden_act="gelu", state_size=-3, use_bias="no", conv_kernel=0
    )
    message = error_of(tmp_path)
    for part in (
        "`sliding_window` is unknown",
        "`hidden_act` is 'gelu'",
        "`state_size` must be",
        "`conv_kernel` must be",
    ):
        assert part in message
    assert "`use_bias` must be true or false, got 'no'" in message
    assert len(message.splitlines()) == 6


def test_original_config_faults_are_listed_together(tmp_path):
    random_model(TIED).save_pretrained(tmp_path, format="original")
    edit_json(
        tmp_path / "config.json", n_layer=None, rms_norm=False, hidden=3, attn_layer_idx=[1],
        ssm_cfg={"layer": "Mamba2", "headdim": 64},
    )  # fmt: skip
    message = error_of(tmp_path)
    for part in ("`n_layer` is missing", "`rms_norm` is False", "`hidden` is unknown", "`attn_layer_idx` is [1]"):
        assert part in message
    assert "`ssm_cfg.layer` is 'Mamba2'" in message and "`ssm_cfg.headdim` is unknown" in message


def test_contradicting_companion_keys(tmp_path):
    random_model(TIED).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", d_model=11, ssm_cfg={"d_state": 16})
    message = error_of(tmp_path)
    assert "`d_model` is 11" in message and "`d_state` is 16" in message


def test_another_kind_of_model(tmp_path):
    random_model(TIED).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", model_type="mamba2")
    assert "`model_type` is 'mamba2'" in error_of(tmp_path)


def test_what_the_original_format_cannot_express(tmp_path):
    with pytest.raises(ValueError, match=r"(?s)'hf' can.*`use_bcdt_norm`.*`norm_eps`"):
        random_model(FALCON).save_pretrained(tmp_path / "model", format="original")
    assert not (tmp_path / "model").exists()


def test_extra_config(tmp_path):
    lm = random_model(TIED)
    lm.save_pretrained(tmp_path, extra_config={"eos_token_id": 11})
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 11
    with pytest.raises(ValueError, match=r"`extra_config`.*`eos` is unknown"):
        lm.save_pretrained(tmp_path, extra_config={"eos": 11})
    with pytest.raises(ValueError, match=r"`extra_config`.*another one"):
        lm.save_pretrained(tmp_path, extra_config={"state_size": 11})


@pytest.mark.parametrize("argument", [{"format": "gguf"}, {"dtype": "int8"}])
def test_wrong_choices(tmp_path, argument):
    with pytest.raises(ValueError, match=f"`{next(iter(argument))}` must be one of"):
        random_model(TIED).save_pretrained(tmp_path, **argument)


# Tensors


def test_tensor_faults_are_listed_together(tmp_path):
    random_model(TIED).save_pretrained(tmp_path)

    def change(arrays):
        del arrays["backbone.layers.1.mixer.D"]
        arrays["backbone.layers.2.mixer.A_log"] = arrays["backbone.layers.2.mixer.A_log"][:, :-1]
        arrays["backbone.layers.0.mixer.D2"] = arrays["backbone.norm_f.weight"]

    rewrite(tmp_path / "model.safetensors", change)
    edit_json(tmp_path / "config.json", sliding_window=7)
    lines = error_of(tmp_path).splitlines()[1:]
    assert [line.strip() for line in lines] == [
        "config key `sliding_window` is unknown (its value is 7)",
        "tensor `backbone.layers.1.mixer.D` is missing",
        "tensor `backbone.layers.0.mixer.D2` is unknown",
        "tensor `backbone.layers.2.mixer.A_log` has shape (20, 4) instead of (20, 5)",
    ]


def test_integers_are_no_parameters(tmp_path):
    random_model(TIED).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32","shape":[40,10]', b'"I32","shape":[40,10]'))
    assert "`backbone.embeddings.weight` holds int32, not floating-point numbers" in error_of(tmp_path)


def test_tied_head_in_the_file(tmp_path):
    """Some files hold it all the same: fine if it is the embedding, an error if it is not."""
    lm = random_model(TIED)
    lm.save_pretrained(tmp_path)
    rewrite(tmp_path / "model.safetensors", lambda a: a.update({"lm_head.weight": a["backbone.embeddings.weight"]}))
    assert_same_parameters(lm, MambaLM.from_pretrained(tmp_path))
    rewrite(tmp_path / "model.safetensors", lambda a: a.update({"lm_head.weight": a["backbone.embeddings.weight"] + 1}))
    assert "`lm_head.weight` differs from `backbone.embeddings.weight`" in error_of(tmp_path)


def test_the_embeddings_other_name(tmp_path):
    lm = random_model(TIED)
    lm.save_pretrained(tmp_path)
    rewrite(
        tmp_path / "model.safetensors",
        lambda a: a.update({"backbone.embedding.weight": a.pop("backbone.embeddings.weight")}),
    )
    assert_same_parameters(lm, MambaLM.from_pretrained(tmp_path))


# Files


def test_no_such_folder(tmp_path):
    assert "there is no folder" in error_of(tmp_path / "nothing")
    assert "OWNER/MODEL" in error_of(str(tmp_path / "nothing"))
    assert "holds no config.json" in error_of(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "is a file" in error_of(tmp_path / "config.json")


def test_hub_out_of_reach(monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = error_of("nobody/no-such-model-anywhere")
    assert "there is no folder nobody/no-such-model-anywhere, and the Hugging Face hub did not give it" in message


def test_hub_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'mamba-jax\[pretrained\]'"):
        MambaLM.from_pretrained("state-spaces/mamba-130m")


def test_hub_name(tmp_path, monkeypatch):
    """The snapshot's folder is what is loaded; a .bin is asked for only where there are no safetensors."""
    hub = pytest.importorskip("huggingface_hub")
    asked = []
    lm = random_model(TIED)

    def snapshot_download(name, *, revision, allow_patterns):
        asked.append((name, revision))
        if "pytorch_model*.bin*" in allow_patterns:
            lm.save_pretrained(tmp_path, format="original")
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    assert_same_parameters(lm, MambaLM.from_pretrained("state-spaces/mamba-130m", revision="main"))
    assert asked == [("state-spaces/mamba-130m", "main")] * 2


@pytest.mark.parametrize("format", WEIGHTS)
@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.99])
def test_truncated_files(tmp_path, format, kept, without_torch):
    random_model(TIED).save_pretrained(tmp_path, format=format)
    path = tmp_path / WEIGHTS[format]
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    message = error_of(tmp_path)
    assert f"{path.name} is " in message and "truncated" in message and "is missing" not in message


def test_damaged_json(tmp_path):
    random_model(TIED).save_pretrained(tmp_path)
    for content, expected in (
        ("{", "is not valid JSON"),
        ("[1]", "must hold a table"),
        ("\udc80", "is not valid JSON"),
    ):
        (tmp_path / "config.json").write_text(content, errors="surrogateescape")
        assert expected in error_of(tmp_path)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "a.safetensors is damaged or truncated"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}, "a.safetensors is damaged or truncated"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}, "a.safetensors is damaged or truncated"),
        ({"dtype": "F32", "shape": [2]}, "a.safetensors is damaged or truncated"),
        ({"dtype": "U64", "shape": [1], "data_offsets": [0, 8]}, "`a` has elements of type U64, not known here"),
    ],
)
def test_damaged_safetensors_headers(tmp_path, entry, expected):
    header = json.dumps({"a": entry}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=expected):
        read_safetensors(path)


def test_missing_weights_and_shards(tmp_path):
    random_model(TIED).save_pretrained(tmp_path, max_shard_bytes=3000)
    first, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    first.unlink()
    message = error_of(tmp_path)
    assert f"{first.name} is missing; model.safetensors.index.json names it" in message
    edit_json(tmp_path / "model.safetensors.index.json", weight_map={"a": "../secret.safetensors"})
    assert "'../secret.safetensors', which is no .safetensors file beside it" in error_of(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "there is none of model.safetensors" in error_of(tmp_path)


# Pickles


class Evil:
    """Would make a folder if anything in it ran."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


def replace_pickle(path, content):
    """The same zip archive with another data.pkl."""
    import zipfile

    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, content if name.endswith("/data.pkl") else data)


def test_code_in_a_pickle_is_refused(tmp_path, without_torch):
    random_model(TIED).save_pretrained(tmp_path, format="original")
    replace_pickle(tmp_path / "pytorch_model.bin", pickle.dumps({"a": Evil(tmp_path / "ran")}, protocol=2))
    message = error_of(tmp_path)
    assert "pytorch_model.bin was refused" in message and "mkdir`" in message
    assert not (tmp_path / "ran").exists()


def rebuild(storage=("storage", b"FloatStorage", "0", "cpu", 4), offset=0, shape=(4,), stride=(1,)):
    """A pickle of one tensor, made by hand from PyTorch's own parts."""
    _, kind, key, device, numel = storage

    def dump(value):
        return pickle.dumps(value, protocol=2)[2:-1]  # without its frame: protocol and stop

    parts = [
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((", dump("storage"), b"ctorch\n", kind, b"\n", dump(key),
        dump(device), dump(numel), b"tQ", dump(offset), dump(shape), dump(stride), b"\x89)tR.",
    ]  # fmt: skip
    tensor = b"".join(parts)
    return b"\x80\x02}" + dump("a") + tensor[2:-1] + b"s."


def write_zip(path, content, numbers=(1, 2, 3, 4), compression=0, byteorder=b"little"):
    import zipfile

    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("any name/data.pkl", content)
        archive.writestr("any name/byteorder", byteorder)
        archive.writestr("any name/data/0", np.asarray(numbers, np.float32).tobytes())


def test_reading_a_handmade_file(tmp_path):
    """Views of one storage too: a transposed matrix, and one that begins in the middle."""
    path = tmp_path / "a.bin"
    write_zip(path, rebuild(shape=(2, 2), stride=(1, 2)))
    np.testing.assert_array_equal(read_torch_zip(path)["a"].read(), [[1, 3], [2, 4]])
    write_zip(path, rebuild(offset=2, shape=(2,)))
    np.testing.assert_array_equal(read_torch_zip(path)["a"].read(), [3, 4])
    write_zip(path, rebuild(offset=4, shape=(0, 3), stride=(3, 1)))
    assert read_torch_zip(path)["a"].read().shape == (0, 3)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (rebuild(offset=1), "ends behind its storage"),
        (rebuild(offset=-1), "is damaged"),
        (rebuild(stride=(2,)), "ends behind its storage"),
        (rebuild(storage=("storage", b"FloatStorage", "0", "cpu", 5)), "16 bytes instead of 20"),
        (rebuild(storage=("storage", b"FloatStorage", "7", "cpu", 4)), "is damaged"),
        (rebuild(storage=("storage", b"QUInt8Storage", "0", "cpu", 4)), "refused.*torch.QUInt8Storage"),
        (b"\x80\x02cbuiltins\neval\n(X\x01\x00\x00\x001tR.", "refused.*builtins.eval"),
        (b"\x80\x02ccollections\nOrderedDict\n}X\x01\x00\x00\x00akb.", "is damaged"),
        (pickle.dumps([1], protocol=2), "holds a list"),
        (pickle.dumps({"a": 1}, protocol=2), "also holds 'a'"),
        (b"\x80\x02}", "is damaged"),
    ],
)
def test_faulty_pickles(tmp_path, content, expected):
    path = tmp_path / "a.bin"
    write_zip(path, content)
    with pytest.raises(ValueError, match=expected):
        read_torch_zip(path)


def test_files_that_cannot_be_mapped(tmp_path):
    path = tmp_path / "a.bin"
    write_zip(path, rebuild(), compression=8)
    with pytest.raises(ValueError, match="compressed"):
        read_torch_zip(path)
    write_zip(path, rebuild(), byteorder=b"big")
    with pytest.raises(ValueError, match="endian"):
        read_torch_zip(path)
    path.write_bytes(pickle.dumps({}, protocol=2))
    with pytest.raises(ValueError, match=r"before version 1\.6, which only PyTorch reads"):
        read_torch_zip(path)


# Memory, progress, devices


@pytest.mark.parametrize("format", WEIGHTS)
def test_memory(tmp_path, format, without_torch):
    """Beside the model itself, not even one more tensor is held: parts of the file are mapped while they are copied."""
    config = MambaConfig(vocab_size=256, d_model=128, n_layer=12)
    random_model(config).save_pretrained(tmp_path, format=format)
    lm = MambaLM.from_pretrained(tmp_path)  # what is made once in a process is made now
    model_bytes = sum(value.nbytes for value in parameters_of(lm).values())
    tracemalloc.start()
    MambaLM.from_pretrained(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert model_bytes > 5e6
    assert model_bytes <= peak < 1.1 * model_bytes


def test_progress(tmp_path):
    random_model(TIED).save_pretrained(tmp_path)
    calls = []
    MambaLM.from_pretrained(tmp_path, progress=lambda done, total: calls.append((done, total)))
    done, totals = zip(*calls)
    assert list(done) == sorted(done) and done[0] < done[-1] == totals[0] and len(set(totals)) == 1
    assert len(calls) > 3 * TIED.n_layer


def test_progress_bar(tmp_path, monkeypatch):
    """On a terminal a bar is drawn, on standard error."""
    import io

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    random_model(TIED).save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "stderr", Terminal())
    MambaLM.from_pretrained(tmp_path)
    assert f"loading {tmp_path.name}" in sys.stderr.getvalue()


def test_placing_on_a_mesh(tmp_path):
    lm = random_model(MambaConfig(vocab_size=37, d_model=10, n_layer=2, d_state=5, expand=2, dt_rank=2))
    lm.save_pretrained(tmp_path)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def partition(path, shape):
        return PartitionSpec(None, "model") if path[-1] in ("D", "A_log", "dt_bias") else PartitionSpec()

    split = MambaLM.from_pretrained(tmp_path, mesh=mesh, partition=partition)
    assert split.layers.mixer.A_log[...].sharding.spec == PartitionSpec(None, "model")
    assert split.layers.mixer.A_log[...].addressable_shards[1].data.shape == (2, 5, 5)
    assert split.embedding[...].sharding.is_fully_replicated
    assert_same_parameters(lm, split)
    whole = MambaLM.from_pretrained(tmp_path, mesh=mesh)
    assert len(whole.embedding[...].sharding.device_set) == 4
    with pytest.raises(ValueError, match="`partition` needs a `mesh`"):
        MambaLM.from_pretrained(tmp_path, partition=partition)
