"""A run that learns a synthetic task: the loop of `loop.py`, scored by the share of right answers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from train.config import TrainConfig
from train.data import ALL, Batch, take_rows
from train.loop import Run
from train.report import Report
from train.step import compile_eval_step, make_answers
from train.task_plots import draw_accuracy
from train.tasks import SyntheticTask, make_task


class TaskRun(Run):
    """`Run` on a task's batches, scored by `val_accuracy`."""

    corpus: SyntheticTask
    last_validation: dict[str, Any]

    @classmethod
    def load(cls, config: TrainConfig, report: Report) -> SyntheticTask:
        """The task."""
        return make_task(config)

    def _compile_validation(self, batch: Batch) -> None:
        # Held-out sequences fill a row each, where those of training may be packed.
        with self.report.wait("compiling the validation step"):
            self.eval_step = compile_eval_step(
                make_answers(self.graphdef), self.mesh, self.params, self._placed(self._held_out[0])
            )
        # The lines of the steps name the last validation's accuracy.
        self.last_validation = {}

    def _shown(self, scores: dict[str, float]) -> str:
        return f"val_accuracy {self.last_validation['val_accuracy']:.2%}" if self.last_validation else "val_accuracy -"

    def _validation_scores(self) -> dict[str, float]:
        scores = [self._evaluate(batch) for batch in self._validation_batches()]
        return {f"val_{name}": float(np.mean([score[name] for score in scores])) for name in ("accuracy", "loss")}

    def _report_validation(self) -> None:
        self.report.accuracy(self.last_validation, 1 / self.corpus.n_answers, self.validation_s)

    def _draw(self, records: list[dict[str, Any]], path: Path, title: str) -> None:
        draw_accuracy(records, path, title, 1 / self.corpus.n_answers)

    def _score(self) -> str:
        return f"{self.last_validation['val_accuracy']:.2%} of the answers on held-out sequences are right"

    def _batch(self, step: int, rows: slice = ALL) -> Batch:
        config = self.config
        batch = self.corpus.training_batch(seed=config.seed, step=step, batch_size=config.batch_size)
        return take_rows(batch, rows)

    def _validation_batches(self) -> list[Batch]:
        return self._held_out

    @functools.cached_property
    def _held_out(self) -> list[Batch]:
        config = self.config
        return list(self.corpus.validation_batches(n_batches=config.eval_batches, batch_size=config.batch_size))
