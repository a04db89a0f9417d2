"""From settings to a run that goes: devices, checkpoint, model, data, folder."""

from __future__ import annotations

import functools
from pathlib import Path

from train.checkpoint import Checkpoints
from train.config import TrainConfig
from train.devices import agreed, is_first_process, make_mesh, start
from train.folder import new_folder
from train.loop import Run
from train.report import Report
from train.resume import Found, checkpoint_folder, find_checkpoint
from train.signals import Signals
from train.start import check_splits, starting_point
from train.tracking import check_trackers


def train(config: TrainConfig, report: Report, kind: type[Run]) -> None:
    """Train as the settings say, to the end or until something stops it, and report on it.

    Args:
        config: the settings.
        report: where the run says what it does.
        kind: what is learned: a subclass of `Run`.

    Raises:
        UsageError: the settings cannot be met; nothing has been written then.
        TrainingStopped: a loss that will not do, a checkpoint that cannot be read or written, or an interruption.
    """
    start(config.mesh, config.distributed)
    if not is_first_process():
        report.silence()
    mesh = make_mesh(config.mesh)
    with Signals() as signals:
        found = Found(None, {})
        if config.resume and config.run_dir is not None:
            with report.wait("checking the checkpoints"):
                found = find_checkpoint(Path(config.run_dir))
            step = None if found.step is None else checkpoint_folder(Path(config.run_dir), found.step)
            config, architecture, params = starting_point(config, mesh, step)
        else:
            config, architecture, params = starting_point(config, mesh)
        check_splits(config, architecture)
        check_trackers(config)
        corpus = kind.load(config, report)
        if config.resume and config.run_dir is not None:
            run_dir = Path(config.run_dir)
        else:
            name = "bytes" if config.task == "lm" else config.task
            name = name if config.config is None else Path(config.config).stem
            run_dir = Path(agreed(functools.partial(new_folder, config.run_dir, name)))
        checkpoints = Checkpoints(run_dir, config.keep_checkpoints, config.keep_every)
        try:
            run = kind(config, mesh, corpus, run_dir, checkpoints, report, signals)
            run.prepare(architecture, params, found)
            if run.step >= config.steps:
                report.line(f"{run_dir} is at step {run.step} of {config.steps} already: more --steps would go on")
            else:
                run.go()
        finally:
            checkpoints.close()
