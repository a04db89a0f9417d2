"""The numbers of a run: on the screen, in metrics.jsonl and with the trackers; and how long the rest will take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from train.config import TrainConfig
from train.devices import is_first_process
from train.flops import memory_gib, utilisation
from train.mesh import count_devices
from train.metrics import Metrics
from train.report import Report
from train.tracking import open_trackers

# Weight of the past in the mean time of a step.
_DECAY = 0.9


class Watch:
    """Takes what is measured at each step and validation.

    Args:
        config: the settings.
        flops: of a training step.
        run_dir: the run's folder; what its files say of steps after `step` is replaced.
        step: the step that the run goes on from.
        report: the screen.
    """

    def __init__(self, config: TrainConfig, flops: float, run_dir: Path, step: int, report: Report) -> None:
        self._config, self._flops, self._report = config, flops, report
        self._devices = count_devices(config.mesh)
        self._writers = []
        if is_first_process():
            self._writers = [Metrics(run_dir / "metrics.jsonl", step), *open_trackers(config, run_dir, step)]
        self._step_s = self._validation_s = 0.0

    def step(self, record: dict[str, Any], shown: str, seconds: float) -> None:
        """A training step: its numbers, what its line says of the score, and how long it took."""
        config = self._config
        record = record | {
            "step_ms": 1000 * seconds,
            "tokens_per_s": config.batch_size * config.seq_len / seconds,
            "mfu": utilisation(self._flops, seconds, self._devices),
            "memory_gib": memory_gib(),
        }
        self._write(record)
        self._step_s = seconds if self._step_s == 0 else _DECAY * self._step_s + (1 - _DECAY) * seconds
        step = record["step"]
        validations = math.ceil(config.steps / config.eval_every) - (step - 1) // config.eval_every
        eta_s = (config.steps - step) * self._step_s + validations * self._validation_s
        printed = step == 1 or step % config.log_every == 0 or step == config.steps
        self._report.step(record, config.steps, eta_s, shown, printed=printed)

    def validation(self, record: dict[str, Any], seconds: float) -> None:
        """A validation's numbers, and how long it took."""
        self._write(record)
        self._validation_s = seconds

    def close(self) -> None:
        """Write what is still waiting."""
        for writer in self._writers:
            writer.close()

    def _write(self, record: dict[str, Any]) -> None:
        for writer in self._writers:
            writer.write(record)
