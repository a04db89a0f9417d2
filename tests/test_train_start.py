"""train.start: a run that begins with the parameters of a checkpoint."""

import tomllib

import jax
import numpy as np
import pytest
from checkpoint_files import parameters_of, random_model

from mamba_jax.config import MambaConfig
from mamba_jax.model import MambaLM
from train.__main__ import main
from train.config import TrainConfig
from train.devices import make_mesh
from train.errors import UsageError
from train.start import starting_point
from train.step import model_config

# Sizes that no setting of `train` can express: they are the checkpoint's all the same.
MODEL = MambaConfig(vocab_size=260, d_model=8, n_layer=2, d_inner=13, d_state=4, bias=True, tie_embeddings=False)
QUICK = ["--seq-len", "16", "--batch-size", "2", "--eval-batches", "1", "--sample-tokens", "0", "--lr", "1e-30"]


@pytest.fixture
def checkpoint(tmp_path):
    random_model(MODEL).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_parameters_and_sizes_are_the_checkpoints(checkpoint):
    config = TrainConfig(init_from=checkpoint, scan="associative", n_layer=2)
    config, model, params = starting_point(config, make_mesh(""))
    assert model == MODEL.replace(scan="associative")
    assert (config.d_model, config.n_layer, config.d_state, config.vocab_size) == (8, 2, 4, 260)
    np.testing.assert_array_equal(params["embedding"], random_model(MODEL).embedding[...])


def test_a_new_model_without_it():
    config = TrainConfig(d_model=16)
    assert starting_point(config, make_mesh("")) == (config, model_config(config), None)


def test_mistakes(checkpoint, tmp_path):
    with pytest.raises(UsageError, match=r"(?s)--d-model 24: the model of --init-from has 8.*--n-layer 7"):
        starting_point(TrainConfig(init_from=checkpoint, d_model=24, n_layer=7), make_mesh(""))
    with pytest.raises(UsageError, match="--init-from: there is no folder"):
        starting_point(TrainConfig(init_from=str(tmp_path / "nothing")), make_mesh(""))


def test_a_run_from_a_checkpoint_and_its_resumption(checkpoint, tmp_path):
    """With a rate of nothing the run keeps the parameters; resumed, it no longer needs the checkpoint."""
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(b"line %d of a text that counts\n" % i for i in range(200)))
    run = tmp_path / "run"
    common = ["--data", str(text), "--run-dir", str(run), *QUICK, "--min-lr", "0"]
    assert main([*common, "--init-from", checkpoint, "--steps", "1"]) == 0
    settings = tomllib.loads((run / "config.toml").read_text())
    assert (settings["init_from"], settings["d_model"]) == (checkpoint, 8)

    (tmp_path / "model" / "config.json").unlink()
    assert main([*common, "--resume", "--steps", "2"]) == 0
    got = MambaLM.from_pretrained(run)
    assert got.config == MODEL
    expected = parameters_of(random_model(MODEL))
    for name, value in parameters_of(got).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=0, err_msg=name)
    assert np.isfinite(got(jax.numpy.zeros((1, 3), int))).all()
