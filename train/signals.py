"""SIGINT and SIGTERM: while the run steps, they are held back until a step is complete and can be saved."""

from __future__ import annotations

import contextlib
import signal
import types
from collections.abc import Iterator
from typing import Any


class Interrupted(KeyboardInterrupt):
    """A signal that ends the run; `exit_code` is what a shell expects of a program that it ended."""

    def __init__(self, number: int) -> None:
        """Args: `number` of the signal."""
        super().__init__(number)
        self.name = signal.Signals(number).name
        self.exit_code = 128 + number


class Signals:
    """Within it, SIGINT and SIGTERM raise `Interrupted`; within `held`, only the second one does.

    Outside the main thread, where Python handles no signals, it changes nothing.
    """

    def __init__(self) -> None:
        self.received: Interrupted | None = None  # the one that is held back
        self._holding = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        with contextlib.suppress(ValueError):  # not the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep a signal in `received`, for the run to look at when it can end."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False

    def _handle(self, number: int, _: types.FrameType | None) -> None:
        interrupted = Interrupted(number)
        if not self._holding or self.received is not None:
            raise interrupted
        self.received = interrupted
