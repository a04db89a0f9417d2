"""Checkpoints in and out, without PyTorch: what is written is read back bit for bit, and every fault is named."""

import dataclasses
import json
import sys
import tracemalloc

import jax
import numpy as np
import pytest
from checkpoint_files import (
    CONFIGS,
    TIED,
    UNTIED,
    WEIGHTS,
    assert_same_parameters,
    edit_json,
    error_of,
    parameters_of,
    random_model,
)
from jax.sharding import PartitionSpec

from mamba_jax.checkpoints.safetensors_file import read_safetensors, write_safetensors
from mamba_jax.config import MambaConfig
from mamba_jax.model import MambaLM


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
