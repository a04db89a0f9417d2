"""The two ways in which the command ends early, each with one message and no traceback."""

from __future__ import annotations


class UsageError(ValueError):
    """A mistake that the user can mend; the command's exit code is 2."""


class TrainingStopped(RuntimeError):
    """Training could not go on, or was told not to; what is on disk is whole. `exit_code` is the command's."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
