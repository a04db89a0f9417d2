"""The sample at the end of a run, and the tokenizer that it is written with."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np

from mamba_jax import MambaLM, generate
from mamba_jax.text import TOKENIZER, Bytes, Subwords, load_tokenizer
from train.config import TrainConfig
from train.errors import UsageError
from train.tokens import SUFFIX


def find_tokenizer(config: TrainConfig) -> Subwords | None:
    """The tokenizer that is asked for, or that lies beside token files; None for bytes, and where none is known.

    Raises:
        UsageError: it cannot be read, or its library is missing.
    """
    where = config.tokenizer
    if where is None and config.data is not None:
        data = Path(config.data)
        folder = data if data.is_dir() else data.parent
        if (folder / TOKENIZER).exists() and (data.suffix == SUFFIX or any(data.glob(f"*{SUFFIX}"))):
            where = str(folder)
    if where is None:
        return None
    try:
        return load_tokenizer(where)
    except (ValueError, ImportError) as error:
        raise UsageError(f"--tokenizer: {error}") from None


def write_sample(model: MambaLM, tokenizer: Subwords | Bytes, config: TrainConfig, key: jax.Array) -> bytes:
    """The prompt and what the model writes after it, as bytes, since a sample of bytes need not be UTF-8."""
    prompt = tokenizer.encode(config.sample_prompt)
    if not prompt:
        # An empty prompt has nothing to go on from; a line's end is the most neutral beginning.
        prompt = tokenizer.encode("\n")
    tokens = generate(
        model, np.asarray([prompt], np.int32), config.sample_tokens, temperature=config.temperature, key=key
    )
    if isinstance(tokenizer, Bytes):
        return np.asarray(tokens[0]).astype(np.uint8).tobytes()
    decoder = tokenizer.decoder()
    return (decoder.push(np.asarray(tokens[0]).tolist()) + decoder.finish()).encode()
