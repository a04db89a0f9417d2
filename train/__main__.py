"""`python -m train --scan pallas` trains a small model on Python's own source; `--help` lists every flag."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from train.config import parse
from train.errors import TrainingStopped, UsageError
from train.report import Report, ReportHandler, print_error


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code: 0 done, 1 training stopped, 2 the user's mistake, 130 interrupted."""
    report = Report()
    logging.basicConfig(handlers=[ReportHandler(report)])
    # What orbax raises it logs as well, with a traceback; it is for us to say, in one line.
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        config = parse(arguments)
        # JAX is loaded only now: a wrong flag is answered at once.
        from train.dry_run import dry_run
        from train.loop import Run, train
        from train.task_run import TaskRun

        if config.dry_run:
            dry_run(config, report)
            return 0
        train(config, report, Run if config.task == "lm" else TaskRun)
    except UsageError as error:
        print_error("Cannot train", str(error))
        return 2
    except TrainingStopped as error:
        print_error("Training stopped", str(error))
        return error.exit_code
    except OSError as error:
        print_error("Training stopped", f"{error.filename or 'a file'}: {error.strerror or error}")
        return 1
    except KeyboardInterrupt:
        print_error("Training stopped", "Interrupted before the first step.")
        return 130
    return 0


def _unraisable(error: sys.UnraisableHookArgs) -> None:
    """After a write that failed, tensorstore reports to event loops that orbax has closed, once for each array."""
    if str(error.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(error)


if __name__ == "__main__":
    sys.unraisablehook = _unraisable
    sys.exit(main(sys.argv[1:]))
