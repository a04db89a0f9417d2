"""The README's Python runs as it stands."""

import re
from pathlib import Path

import pytest
from flax import nnx

from mamba_jax import MambaConfig, MambaLM

README = Path(__file__).parent.parent / "README.md"
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
