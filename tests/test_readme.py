"""The README's Python runs as it stands."""

import dataclasses
import importlib
import re
import shlex
from pathlib import Path

import pytest
from flax import nnx

from mamba_jax import MambaConfig, MambaLM

README = Path(__file__).parent.parent / "README.md"
SETTINGS = {"train": ("train.config", "TrainConfig")} | {
    f"train.{name}": (f"train.{name}", "Settings") for name in ("tokenize", "plot", "extrapolate")
}
COMMANDS = re.findall(r"^python -m (train\S*) (.*)$", README.read_text(encoding="utf-8"), re.MULTILINE)
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_are_blocks():
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block(block, tmp_path, monkeypatch):
    """With a small model in place of a published one."""
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    config = MambaConfig(d_model=16, n_layer=2, vocab_size=256)
    MambaLM(config, rngs=nnx.Rngs(0)).save_pretrained("small")
    exec(compile(block.replace("state-spaces/mamba-130m-hf", "small"), str(README), "exec"), {})


@pytest.mark.parametrize(("module", "rest"), COMMANDS, ids=[" ".join(command)[:60].strip() for command in COMMANDS])
def test_flags_of_the_training_commands_exist(module, rest):
    where, name = SETTINGS[module]
    fields = {field.name for field in dataclasses.fields(getattr(importlib.import_module(where), name))}
    flags = [word[2:].replace("-", "_") for word in shlex.split(rest, comments=True) if word.startswith("--")]
    assert {flag.removeprefix("no_") for flag in flags} <= fields
