"""`python -m mamba_jax.bench --models`: whole language models beside `transformers`: forward, training, decoding.

All hold the same weights: ours are made at random, saved, and read by transformers.
Axis legend: b batch, l length.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import tempfile
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from flax import nnx

from mamba_jax.bench import timing
from mamba_jax.bench.calls import Call, Unavailable
from mamba_jax.bench.model_calls import DecodeCall, ForwardCall, TrainingCall, TransformersCall
from mamba_jax.bench.problem import relative_error
from mamba_jax.bench.report import Screen
from mamba_jax.bench.results import model_rows
from mamba_jax.bench.settings import Settings
from mamba_jax.config import MambaConfig, default_d_inner
from mamba_jax.model import MambaLM
from mamba_jax.scan.api import Scan

ModelPass = Literal["forward", "training step", "decoding"]

LENGTHS: dict[ModelPass, tuple[int, ...]] = {"forward": (64, 512), "training step": (16, 128), "decoding": (32,)}
"""For decoding, the number of new tokens after a prompt of 16. On a CPU transformers cannot bear more in its time."""

PROMPT = 16
TOLERANCE = 1e-3
"""Of logits, losses and the logits of chosen tokens, over the largest."""

MODELS: dict[str, MambaConfig] = {
    "small": MambaConfig(vocab_size=256, d_model=192, n_layer=4),
    "mamba-130m": MambaConfig.preset("mamba-130m"),
}
TRANSFORMERS = "transformers"
FORMS: tuple[Scan, ...] = ("sequential", "associative", "pallas")
TITLES = {TRANSFORMERS: "transformers, slow path"} | {form: f"ours, {form}" for form in FORMS}


@dataclasses.dataclass(frozen=True)
class ModelProblem:
    """Random tokens for one model; all that comes out, transformers' too, is checked against our sequential form."""

    model: str
    batch: int
    length: int
    seed: int
    dtype: str = "float32"

    @property
    def config(self) -> MambaConfig:
        return MODELS[self.model]

    @property
    def channels(self) -> int:
        return default_d_inner(self.config.d_model, self.config.expand)

    @property
    def state(self) -> int:
        return self.config.d_state

    @property
    def tokens(self) -> np.ndarray:
        """(b, l + 1): the first l are read, the last l predicted."""
        return self._draw(self.length + 1)

    @property
    def prompt(self) -> np.ndarray:
        """(b, 16)."""
        return self._draw(PROMPT)

    def _draw(self, length: int) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        return rng.integers(0, self.config.vocab_size, (self.batch, length), dtype=np.int32)

    def mistake(self, results: dict[str, np.ndarray]) -> str | None:
        """What is wrong; None if nothing is. The losses are those of two steps, so that the first update counts."""
        if "tokens" in results:
            return self._wrong_choice(results["tokens"])
        for name, got in results.items():
            want = _expected_logits(self) if name == "logits" else _expected_losses(self)
            error = relative_error(got[..., : want.shape[-1]], want)
            if not error <= TOLERANCE:
                return f"{name} are off by {error:.1e} of the largest"
        return None

    def _wrong_choice(self, tokens: np.ndarray) -> str | None:
        """Greedy decoding takes, at every step, a token whose logit is the largest up to rounding."""
        logits = _logits(self.model, self.seed, tokens)[:, PROMPT - 1 : -1]
        chosen = np.take_along_axis(logits, tokens[:, PROMPT:, None], axis=-1)[..., 0]
        short = float(np.max(logits.max(-1) - chosen) / np.max(np.abs(logits)))
        return None if short <= TOLERANCE else f"a chosen token's logit is {short:.1e} of the largest below the best"


@functools.cache
def make_model(name: str, scan: Scan, seed: int) -> MambaLM:
    """Our model with random weights, the same ones for every form."""
    return MambaLM(MODELS[name].replace(scan=scan), rngs=nnx.Rngs(seed))


def _logits(name: str, seed: int, tokens: np.ndarray) -> np.ndarray:
    return ForwardCall(make_model(name, "sequential", seed), tokens).checked_results()["logits"].astype(np.float64)


@functools.lru_cache(maxsize=1)
def _expected_logits(problem: ModelProblem) -> np.ndarray:
    return _logits(problem.model, problem.seed, problem.tokens[:, :-1])


@functools.lru_cache(maxsize=1)
def _expected_losses(problem: ModelProblem) -> np.ndarray:
    call = TrainingCall(make_model(problem.model, "sequential", problem.seed), problem.tokens)
    return call.checked_results()["losses"].astype(np.float64)


def implementations(folder_of: Callable[[str], str]) -> dict[str, timing.Implementation]:
    """transformers and our forms; `folder_of` says where a model's weights are saved."""

    def ours(form: Scan) -> Callable[[ModelProblem, ModelPass], Call]:
        def prepare(problem: ModelProblem, which: ModelPass) -> Call:
            lm = make_model(problem.model, form, problem.seed)
            if which == "forward":
                return ForwardCall(lm, problem.tokens[:, :-1])
            if which == "training step":
                return TrainingCall(lm, problem.tokens)
            if form != "sequential":
                raise Unavailable("decoding a token needs no scan: the same for every form")
            return DecodeCall(lm, problem.prompt, problem.length)

        return prepare

    def theirs(problem: ModelProblem, which: ModelPass) -> Call:
        for package in ("torch", "transformers"):
            if importlib.util.find_spec(package) is None:
                raise Unavailable(f"{package} is not installed")
        return TransformersCall(folder_of(problem.model), which, problem.tokens, problem.prompt, problem.length)

    rows = {TRANSFORMERS: timing.Implementation(TITLES[TRANSFORMERS], theirs, rival=True)}
    return rows | {form: timing.Implementation(TITLES[form], ours(form)) for form in FORMS}


def run_models(settings: Settings, screen: Screen) -> tuple[dict[str, Any], int]:
    """Measure and print; what goes into the JSON file, and the exit code: 1 if an implementation is wrong."""
    budget = timing.Budget(settings.budget_s, settings.compile_budget_s, settings.repeats)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root, screen.status() as say:

        @functools.cache
        def folder_of(name: str) -> str:
            make_model(name, "sequential", settings.seed).save_pretrained(f"{root}/{name}")
            return f"{root}/{name}"

        for model in MODELS:
            for which, lengths in LENGTHS.items():
                problem_at = functools.partial(_problem, model, settings.batch, settings.seed)
                tell = functools.partial(_tell, say, model)
                measured = timing.measure(implementations(folder_of), which, lengths, problem_at, budget, tell)
                rows += model_rows(model, TRANSFORMERS, measured)
            make_model.cache_clear()
    screen.models(rows, TITLES)
    return {"model_rows": rows}, int(any(row["wrong"] for row in rows))


def _problem(model: str, batch: int, seed: int, length: int) -> ModelProblem:
    return ModelProblem(model, batch, length, seed)


def _tell(say: Callable[[str], None], model: str, text: str) -> None:
    say(f"{model}, {text}")
