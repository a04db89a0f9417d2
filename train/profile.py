"""`--profile START:STOP`: what the device did during these steps, for TensorBoard's or Perfetto's viewer."""

from __future__ import annotations

from pathlib import Path

import jax

from train.errors import UsageError


def profiled_steps(text: str | None) -> tuple[int, int] | None:
    """START:STOP as two steps, both included; None for None.

    Raises:
        UsageError: it is something else.
    """
    if text is None:
        return None
    start, _, stop = text.partition(":")
    if not (start.isdecimal() and stop.isdecimal() and 1 <= int(start) <= int(stop)):
        raise UsageError(f"--profile {text}: START:STOP is wanted, the first and the last step, such as 10:12")
    return int(start), int(stop)


class Profile:
    """A trace over some steps, written to a folder; one that the run's end cuts short is written all the same."""

    def __init__(self, steps: tuple[int, int] | None, folder: Path) -> None:
        """Args: the first and the last step, None for no trace at all; where to."""
        self._steps, self._folder = steps, folder
        self._tracing = False

    def before(self, step: int) -> None:
        """Begin, if this step is the first."""
        if self._steps is not None and step == self._steps[0]:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True

    def after(self, step: int) -> Path | None:
        """End, if this step was the last; returns where the trace is then."""
        if self._steps is None or step != self._steps[1]:
            return None
        return self.close()

    def close(self) -> Path | None:
        """Write what there is; returns where it is, None if there is nothing."""
        if not self._tracing:
            return None
        self._tracing = False
        jax.profiler.stop_trace()
        return self._folder
