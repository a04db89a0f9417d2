"""A whole model made ready for one pass: `MambaLM` and transformers' Mamba, as `timing` calls them.

Axis legend: b batch, l length, v vocabulary.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from mamba_jax.bench.calls import MIB
from mamba_jax.bench.memory import peak_of_torch_call
from mamba_jax.generation import generate, split_model
from mamba_jax.model import MambaLM

LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1
"""Of AdamW, on both sides; the other numbers are those that optax and PyTorch have in common."""


class ForwardCall:
    """tokens (b, l) -> logits (b, l, v)."""

    def __init__(self, lm: MambaLM, tokens: np.ndarray) -> None:
        self._arguments = (*nnx.split(lm)[1:], jnp.asarray(tokens))
        graphdef = nnx.graphdef(lm)
        begun = time.perf_counter()
        lowered = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens)).lower(*self._arguments)
        self._compiled = lowered.compile()
        self.compile_s: float | None = time.perf_counter() - begun
        self.temp_mib = _temp_mib(self._compiled)

    def run(self) -> None:
        jax.block_until_ready(self._compiled(*self._arguments))

    def checked_results(self) -> dict[str, np.ndarray]:
        return {"logits": np.asarray(self._compiled(*self._arguments))}


class TrainingCall:
    """One step on tokens (b, l + 1): mean cross-entropy, its gradient, AdamW. Every call goes on from the last."""

    def __init__(self, lm: MambaLM, tokens: np.ndarray) -> None:
        graphdef, params = nnx.split(lm)
        optimizer = optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)

        def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
            logits = nnx.merge(graphdef, params)(tokens[:, :-1])
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

        def step(params: Any, moments: Any, tokens: jax.Array) -> Any:
            loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
            updates, moments = optimizer.update(gradients, moments, params)
            return optax.apply_updates(params, updates), moments, loss

        self._tokens = jnp.asarray(tokens)
        # A copy: the step gives the memory of its arguments back, and the model is not ours to change.
        self._params = jax.tree.map(jnp.copy, params)
        self._moments = optimizer.init(self._params)
        begun = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(self._params, self._moments, self._tokens)
        self._compiled = lowered.compile()
        self.compile_s: float | None = time.perf_counter() - begun
        self.temp_mib = _temp_mib(self._compiled)

    def run(self) -> None:
        jax.block_until_ready(self._step())

    def _step(self) -> jax.Array:
        self._params, self._moments, loss = self._compiled(self._params, self._moments, self._tokens)
        return loss

    def checked_results(self) -> dict[str, np.ndarray]:
        return {"losses": np.array([self._step(), self._step()])}


class DecodeCall:
    """A prompt (b, l) read, then `new` tokens, greedily."""

    def __init__(self, lm: MambaLM, prompt: np.ndarray, new: int) -> None:
        self.temp_mib: float | None = None
        self._prompt, self._new = prompt, new
        self._model = split_model(lm)
        begun = time.perf_counter()
        self.run()
        compiled = time.perf_counter()
        self.run()
        self.compile_s: float | None = max(0.0, compiled - begun - (time.perf_counter() - compiled))

    def run(self) -> None:
        jax.block_until_ready(self._generate())

    def _generate(self) -> jax.Array:
        return generate(self._model, self._prompt, self._new, temperature=0)

    def checked_results(self) -> dict[str, np.ndarray]:
        return {"tokens": np.asarray(self._generate())}


def _temp_mib(compiled: Any) -> float | None:
    analysis = compiled.memory_analysis()
    return None if analysis is None else analysis.temp_size_in_bytes / MIB


class TransformersCall:
    """The same three passes in PyTorch, with transformers' model in `folder`; on the GPU where PyTorch has one."""

    def __init__(self, folder: str, which: str, tokens: np.ndarray, prompt: np.ndarray, new: int) -> None:
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()  # the slow path is announced once per layer otherwise
        self._torch, self._which, self._new = torch, which, new
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model_class: Any = transformers.MambaForCausalLM
        self._model = model_class.from_pretrained(folder, dtype=torch.float32).to(self._device)
        self._tokens, self._prompt = (torch.from_numpy(v.astype(np.int64)).to(self._device) for v in (tokens, prompt))
        self._model.train(which == "training step")
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, foreach=True
        )
        self.compile_s: float | None = None
        self.temp_mib: float | None = None

    def run(self) -> None:
        self._call()
        if self._device == "cuda":
            self._torch.cuda.synchronize()

    def _call(self) -> Any:
        if self._which == "training step":
            return self._step()
        with self._torch.no_grad():
            if self._which == "forward":
                return self._model(self._tokens[:, :-1]).logits
            return self._model.generate(
                self._prompt,
                attention_mask=self._torch.ones_like(self._prompt),
                max_new_tokens=self._new,
                min_new_tokens=self._new,
                do_sample=False,
                pad_token_id=0,
            )

    def _step(self) -> Any:
        self._optimizer.zero_grad(set_to_none=True)
        logits = self._model(self._tokens[:, :-1], use_cache=False).logits
        loss = self._torch.nn.functional.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def checked_results(self) -> dict[str, np.ndarray]:
        result, peak = peak_of_torch_call(self._call, self._device)
        if peak is not None:
            self.temp_mib = max(0, peak - result.numel() * result.element_size()) / MIB
        if self._which == "training step":
            return {"losses": np.array([result.item(), self._step().item()])}
        return {"logits" if self._which == "forward" else "tokens": result.cpu().numpy()}
