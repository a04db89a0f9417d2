"""Memory: what a call takes beyond its inputs and results, and what the machine has left."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_of_torch_call(function: Callable[[], Any], device: str) -> tuple[Any, int | None]:
    """`function()` and the bytes that it took at its peak beyond what was taken before, its results included.

    On a GPU by PyTorch's allocator. On a CPU by the peak of resident memory, which includes what the C library keeps
    for later and, at a first call, code that is loaded; None where the system does not tell (it is read in /proc).
    """
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # memory freed earlier would be used again unseen
        _RESET.write_text("5")  # sets VmHWM, the peak, to what is resident now
        before = _resident("VmRSS")
    except (OSError, AttributeError):
        return function(), None
    result = function()
    return result, max(0, _resident("VmHWM") - before)


def _resident(name: str) -> int:
    match = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
    if match is None:
        raise OSError(f"{_STATUS} has no {name}")
    return int(match[1]) * 1024


def available_bytes() -> int:
    """Memory of the machine that is free, or could be made free."""
    try:
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        match = None
    if match is not None:
        return int(match[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
