"""configs/: every file is a run that can begin, and those of the paper are the paper's."""

from pathlib import Path

import pytest

from mamba_jax import MambaConfig
from train.config import parse
from train.step import model_config

FOLDER = Path(__file__).parent.parent / "configs"
# arXiv 2312.00752, table 12: GPT-3's rates and tokens a step; the last from arXiv 2005.14165, table 2.1.
PUBLISHED = {
    "mamba-130m": (6e-4, 2**19),
    "mamba-370m": (3e-4, 2**19),
    "mamba-790m": (2.5e-4, 2**19),
    "mamba-1.4b": (2e-4, 2**20),
    "mamba-2.8b": (1.6e-4, 2**20),
}


def read(name):
    return parse(["--config", str(FOLDER / f"{name}.toml")])


def test_the_usual_ones_are_there():
    assert {path.stem for path in FOLDER.iterdir()} >= {*PUBLISHED, "bytes", "long-context", "fine-tune"}


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.iterdir()))
def test_each_makes_a_model(name):
    config = read(name)
    model_config(config)
    # A schedule much longer than the run would leave it at a high rate.
    assert config.warmup_steps < config.steps <= config.decay_steps <= 1.25 * config.steps


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_runs(name):
    config, model = read(name), MambaConfig.preset(name)
    rate, tokens = PUBLISHED[name]
    assert model_config(config) == model.replace(dtype="bfloat16", remat=True)
    assert config.lr == pytest.approx(5 * rate)
    assert config.batch_size * config.seq_len == tokens
    assert 300e9 - tokens < config.steps * tokens <= 300e9
    assert (config.min_lr, config.weight_decay, config.grad_clip, config.beta2) == (1e-5, 0.1, 1.0, 0.95)
