"""`python -m train --scan pallas` trains a small model on Python's own source; `--help` lists every flag."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from train.config import parse
from train.report import Report, ReportHandler, exit_code


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code: 0 done, 1 training stopped, 2 the user's mistake, 130 interrupted."""
    report = Report()
    logging.basicConfig(handlers=[ReportHandler(report)])
    # What orbax raises it logs as well, with a traceback; it is for us to say, in one line.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    def command() -> None:
        config = parse(arguments)
        # JAX is loaded only now: a wrong flag is answered at once.
        from mamba_jax.memory import keep_freed_memory
        from mamba_jax.vectors import use_widest_vectors
        from train.dry_run import dry_run
        from train.launch import train
        from train.task_run import TaskRun
        from train.text_run import TextRun

        keep_freed_memory()
        use_widest_vectors()
        if config.dry_run:
            dry_run(config, report)
        else:
            train(config, report, TextRun if config.task == "lm" else TaskRun)

    return exit_code(command, "Cannot train", "Training stopped", "Interrupted before the first step.")


def _unraisable(error: sys.UnraisableHookArgs) -> None:
    """After a write that failed, tensorstore reports to event loops that orbax has closed, once for each array."""
    if str(error.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(error)


if __name__ == "__main__":
    sys.unraisablehook = _unraisable
    sys.exit(main(sys.argv[1:]))
