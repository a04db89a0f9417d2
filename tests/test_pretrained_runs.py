"""The folder of a training run as a checkpoint."""

import dataclasses
import json

import jax
import pytest
from checkpoint_files import TIED, UNTIED, assert_same_parameters, random_model
from flax import nnx
from jax.sharding import PartitionSpec

from mamba_jax.model import MambaLM
from train.checkpoint import Checkpoints


def save_run(folder, models):
    """What `python -m train` leaves behind: one checkpoint for each model, at steps 1, 2, ..."""
    (folder / "config.toml").write_text("")
    checkpoints = Checkpoints(folder, keep=3)
    for step, lm in enumerate(models, start=1):
        params = nnx.to_pure_dict(nnx.state(lm))
        moments = jax.tree.map(jax.numpy.zeros_like, params)
        fields = {name: value for name, value in dataclasses.asdict(lm.config).items() if name != "scan"}
        state = {"params": params, "opt_state": (moments,), "key": jax.random.key_data(jax.random.key(0))}
        checkpoints.save(step, state, {"model": fields, "step": step})
    checkpoints.latest_step()  # waits
    checkpoints.close()


def test_loading_and_exporting(tmp_path):
    """The newest step's parameters, as a model like any other."""
    run = tmp_path / "run"
    run.mkdir()
    lm = random_model(UNTIED)
    save_run(run, [random_model(UNTIED, seed=1), lm])
    got = MambaLM.from_pretrained(run, scan="associative")
    assert got.config == lm.config.replace(scan="associative")
    assert_same_parameters(lm, got)
    got.save_pretrained(tmp_path / "exported")
    assert_same_parameters(lm, MambaLM.from_pretrained(tmp_path / "exported"))


def test_a_model_without_selection_stays_a_run(tmp_path):
    """Its folder loads; a published format has no place for it, and a file that says so is refused."""
    run, exported = tmp_path / "run", tmp_path / "exported"
    run.mkdir()
    lm = random_model(TIED.replace(selective=False))
    save_run(run, [lm])
    got = MambaLM.from_pretrained(run)
    assert got.config == lm.config
    assert_same_parameters(lm, got)
    for format in ("hf", "original"):
        with pytest.raises(ValueError, match=r"^a model with `selective=False` has no published format[^\n]*$"):
            got.save_pretrained(exported, format=format)
    assert not exported.exists()
    random_model(TIED).save_pretrained(exported)
    config = json.loads((exported / "config.json").read_text())
    (exported / "config.json").write_text(json.dumps(config | {"mamba_jax": {"selective": False}}))
    with pytest.raises(ValueError, match=r"config key `mamba_jax.selective` is unknown"):
        MambaLM.from_pretrained(exported)


def test_placing_on_a_mesh(tmp_path):
    lm = random_model(TIED)
    save_run(tmp_path, [lm])
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def partition(path, shape):
        return PartitionSpec(None, "model") if path[-1] == "D" else PartitionSpec()

    got = MambaLM.from_pretrained(tmp_path, mesh=mesh, partition=partition)
    assert got.layers.mixer.D[...].sharding.spec == PartitionSpec(None, "model")
    assert_same_parameters(lm, got)


def test_faults(tmp_path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        MambaLM.from_pretrained(tmp_path)
    save_run(tmp_path, [random_model(TIED)])
    record = tmp_path / "checkpoints" / "1" / "meta" / "metadata"
    meta = json.loads(record.read_text())
    fields = meta["model"] | {"d_state": TIED.d_state + 1, "tie_embeddings": False}
    record.write_text(json.dumps(meta | {"model": fields}))
    with pytest.raises(ValueError) as caught:
        MambaLM.from_pretrained(tmp_path)
    message = str(caught.value)
    assert "`lm_head.kernel` is missing" in message
    assert "`layers.mixer.A_log` has shape (3, 20, 5) instead of (3, 20, 6)" in message
    record.write_text(json.dumps(meta | {"model": fields | {"heads": 3, "d_conv": 0}}))
    with pytest.raises(ValueError, match=r"(?s)`model\.heads` is unknown.*`d_conv` must be"):
        MambaLM.from_pretrained(tmp_path)
    record.write_text("{")
    with pytest.raises(ValueError, match="cannot be loaded"):
        MambaLM.from_pretrained(tmp_path)


def test_a_run_is_read_without_the_train_package(tmp_path):
    """mamba_jax never imports train."""
    import subprocess
    import sys

    save_run(tmp_path, [random_model(TIED)])
    load = f"from mamba_jax import MambaLM; MambaLM.from_pretrained({str(tmp_path)!r})"
    code = f"import sys; {load}; print('train' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
