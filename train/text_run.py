"""A run that learns text: bits per byte beside a bigram model's, and a sample at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_jax.text import TOKENIZER, Bytes
from train.config import TrainConfig
from train.corpus import Corpus, load_corpus
from train.data import ALL, Batch, training_batch, validation_batches
from train.devices import is_first_process, whole
from train.loop import Run
from train.loss import bigram_bits_per_byte, bits_per_byte
from train.metrics import draw_loss
from train.report import Report, score_in_words
from train.sample import find_tokenizer, write_sample
from train.step import compile_eval_step, make_loss


class TextRun(Run):
    """`Run` on windows of text or of tokens."""

    corpus: Corpus

    @classmethod
    def load(cls, config: TrainConfig, report: Report) -> Corpus:
        """The text."""
        return load_corpus(config, report, find_tokenizer(config))

    def _compile_validation(self, batch: Batch) -> None:
        with self.report.wait("compiling the validation step"):
            self.eval_step = compile_eval_step(make_loss(self.graphdef), self.mesh, self.params, batch)
        self.baseline = {}
        if self.corpus.unit == "bytes":
            with self.report.wait("counting byte pairs for the bigram model"):
                text = self.corpus.train.parts[0].tokens
                self.baseline = {"bigram_bpb": bigram_bits_per_byte(text, self._validation_batches())}

    def _batch(self, step: int, rows: slice = ALL) -> Batch:
        """Rows of the batch of a step."""
        batch = training_batch(self.corpus.train, seed=self.config.seed, step=step, rows=rows, **self._batch_shape())
        self.corpus.check(batch, self.config.vocab_size)
        return batch

    def _validation_batches(self) -> list[Batch]:
        n_batches = self.config.eval_batches
        return list(validation_batches(self.corpus.validation, n_batches=n_batches, **self._batch_shape()))

    def _batch_shape(self) -> dict[str, Any]:
        config = self.config
        return {"batch_size": config.batch_size, "seq_len": config.seq_len, "separator": self.corpus.separator}

    def _scores(self, loss: float) -> dict[str, float]:
        """What a step's record says beside its loss in nats: bits a byte, or a token where its bytes are not known."""
        bytes_per_token = self.corpus.bytes_per_token
        name = "bpt" if bytes_per_token is None else "bpb"
        return {name: bits_per_byte(loss, bytes_per_token or 1.0)}

    def _shown(self, scores: dict[str, float]) -> str:
        return " ".join(f"{name} {value:.3f}" for name, value in scores.items())

    def _validation_scores(self) -> dict[str, float]:
        losses = [float(self._evaluate(batch)) for batch in self._validation_batches()]
        scores = self._scores(float(np.mean(losses)))
        return {f"val_{name}": value for name, value in scores.items()} | self.baseline

    def _report_validation(self) -> None:
        self.report.validation(self.last_validation, self.validation_s)

    def _draw(self, records: list[dict[str, Any]], path: Path, title: str) -> None:
        draw_loss(records, path, title)

    def _score(self) -> str:
        return score_in_words(self.last_validation)

    def _write_beside(self) -> None:
        """The tokenizer, for whoever wants to read what the model writes."""
        if self.corpus.tokenizer is not None:
            self.corpus.tokenizer.save(self.run_dir / TOKENIZER)

    def _show_sample(self) -> None:
        config = self.config
        if config.sample_tokens == 0:
            return
        tokenizer = Bytes() if self.corpus.unit == "bytes" else self.corpus.tokenizer
        if tokenizer is None:
            self.report.line("no sample: the tokens' --tokenizer is not known", style="yellow")
            return
        what = f"writing a sample of {config.sample_tokens} {self.corpus.unit}, at temperature {config.temperature:g}"
        with self.report.wait(what):
            # On one device, which must hold all parameters: what one token takes is too little to be shared.
            params, key = whole((self.params, self.key))
            if not is_first_process():
                return
            key = jax.random.fold_in(jax.random.wrap_key_data(jnp.asarray(key)), self.step)
            model = nnx.merge(self.graphdef, jax.tree.map(jnp.asarray, params))
            text = write_sample(model, tokenizer, config, key)
        (self.run_dir / "sample.txt").write_bytes(text)
        self.report.sample(text)
