"""`python -m mamba_jax.bench.inference`: a forward pass and decoding beside `transformers`, and reading the weights.

All hold the same random weights; both sides' logits are compared before anything is timed. Decoding is timed without
the prompt, and set beside the time that NumPy takes merely to read the weights from memory.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from mamba_jax.bench.model_calls import ForwardCall
from mamba_jax.bench.problem import relative_error
from mamba_jax.bench.timing import PAUSE_S
from mamba_jax.config import MambaConfig
from mamba_jax.decoding import BLOCK, decode_block, first_token, read_piece, split_model
from mamba_jax.generation import stop_tokens
from mamba_jax.model import MambaLM
from mamba_jax.sampling import make_sampling

PROMPT = 16
TOLERANCE = 1e-3
"""Of the logits, over the largest."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Time a model's forward pass and decoding in rounds in which each side takes its turn; medians are reported."""

    model: Literal["mamba-130m", "mamba-370m", "mamba-790m", "mamba-1.4b", "mamba-2.8b"] = "mamba-130m"
    """Sizes of the model; its weights are random."""
    length: int = 512
    """Tokens of the forward pass."""
    batches: tuple[int, ...] = (1, 8)
    """Rows of the batch in decoding."""
    repeats: int = 5
    """Rounds."""
    cores: int = os.cpu_count() or 1
    """Threads of PyTorch, and of reading the weights."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    settings = tyro.cli(Settings, prog="python -m mamba_jax.bench.inference", args=list(arguments))
    lm = MambaLM(MambaConfig.preset(settings.model), rngs=nnx.Rngs(0))
    theirs = _Transformers(lm, settings.cores)
    rng = np.random.default_rng(0)
    print(f"{settings.model}, random float32 weights, {settings.cores} threads; medians of {settings.repeats} rounds")

    tokens = rng.integers(0, lm.config.vocab_size, (1, settings.length), dtype=np.int32)
    ours = ForwardCall(lm, tokens)
    _check("forward pass", ours.checked_results()["logits"], theirs.forward(tokens))
    calls = {"ours": ours.run, "transformers": lambda: theirs.forward(tokens)}
    _report(f"forward pass of {settings.length} tokens", _interleaved(calls, settings.repeats))

    for batch in settings.batches:
        prompt = rng.integers(0, lm.config.vocab_size, (batch, PROMPT), dtype=np.int32)
        decoder = _Decoder(lm, prompt, settings.cores)
        _check(f"prompt at batch {batch}", decoder.logits, theirs.read_prompt(prompt))
        calls = {"ours": decoder.run, "transformers": theirs.decode, "reading the weights": decoder.read_weights}
        times_ms = _interleaved(calls, settings.repeats)
        # The first two make a block of tokens; the weights are read once.
        for name in ("ours", "transformers"):
            times_ms[name] = [ms / BLOCK for ms in times_ms[name]]
        _report(f"decoding at batch {batch}, one step", times_ms)
    return 0


class _Decoder:
    """Ours: a block of decoding after a prompt, always the same one."""

    def __init__(self, lm: MambaLM, prompt: np.ndarray, cores: int) -> None:
        sampling, stop = make_sampling(temperature=0), stop_tokens(None)
        model = split_model(lm)
        hidden = jnp.zeros((len(prompt), lm.config.d_model))
        state, hidden = read_piece(model, prompt, np.ones(prompt.shape, bool), lm.init_state(len(prompt)), hidden)
        self.logits = np.asarray(lm.head(hidden))
        progress = first_token(model, hidden, state, None, sampling, None)
        self._arguments = (model, progress, sampling, None, np.int32(1), np.int32(BLOCK), stop)
        # What a step reads: the layers and the head, which is the embedding.
        leaves = [*jax.tree.leaves(model.layers), lm.embedding[...]]
        # Parts of some MB, so that the cores have equal shares.
        self._weights = [part for leaf in leaves for part in np.array_split(np.asarray(leaf).reshape(-1), cores)]
        self._pool = concurrent.futures.ThreadPoolExecutor(cores)

    def run(self) -> None:
        """`BLOCK` tokens."""
        jax.block_until_ready(decode_block(*self._arguments))

    def read_weights(self) -> None:
        """The largest of all weights, on all cores: no step at batch 1 does less. Their sum takes NumPy longer."""
        list(self._pool.map(np.max, self._weights))


class _Transformers:
    """PyTorch: transformers' model with our weights, on as many threads as there are cores."""

    def __init__(self, lm: MambaLM, cores: int) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()  # the slow path is announced once per layer otherwise
        torch.set_num_threads(cores)
        self._torch = torch
        with tempfile.TemporaryDirectory() as folder:
            lm.save_pretrained(folder)
            self._model = transformers.MambaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def forward(self, tokens: np.ndarray) -> np.ndarray:
        """(b, l) -> (b, l, v)."""
        with self._torch.no_grad():
            return self._model(self._torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits.numpy()

    def read_prompt(self, prompt: np.ndarray) -> np.ndarray:
        """(b, l) -> (b, v), the logits after it; `decode` goes on from here."""
        with self._torch.no_grad():
            output = self._model(self._torch.from_numpy(prompt.astype(np.int64)), use_cache=True)
        self._output = output
        return output.logits[:, -1].numpy()

    def decode(self) -> None:
        """`BLOCK` further tokens, greedily; the cache goes on from call to call."""
        with self._torch.no_grad():
            for _ in range(BLOCK):
                token = self._output.logits[:, -1].argmax(-1, keepdim=True)
                # Its name depends on transformers' version.
                name = "cache_params" if getattr(self._output, "cache_params", None) is not None else "past_key_values"
                cache = {name: getattr(self._output, name)}
                self._output = self._model(token, use_cache=True, **cache)


def _interleaved(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call in rounds in which each takes its turn, so that a busy machine slows all alike."""
    times_ms: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            time.sleep(PAUSE_S)
            begun = time.perf_counter()
            call()
            times_ms[name].append((time.perf_counter() - begun) * 1e3)
    return times_ms


def _check(what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    error = relative_error(ours, theirs[..., : ours.shape[-1]])
    if not error <= TOLERANCE:
        raise RuntimeError(f"{what}: ours and transformers' logits differ by {error:.1e} of the largest")


def _report(what: str, times_ms: dict[str, list[float]]) -> None:
    """A line for each call: median, fastest, slowest, and how many times as long as ours."""
    print(what)
    ours_ms = float(np.median(times_ms["ours"]))
    for name, values in times_ms.items():
        median_ms = float(np.median(values))
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(f"  {name:<20} {median_ms:9.1f} ms  ({spread}), {median_ms / ours_ms:.2f} times ours", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
