"""How this process keeps its memory."""

from __future__ import annotations

import ctypes

# glibc's numbers of what `mallopt` sets (malloc.h).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_INT_MAX = 2**31 - 1


def keep_freed_memory() -> None:
    """Keep what is freed for what is asked for next, rather than give it back to the system. glibc alone knows how.

    XLA asks for a step's temporaries anew at each step. glibc maps blocks of that size for each request, and the system
    then fills them with zeros page by page. That was two fifths of the time of `python -m train --config
    configs/induction_heads_small.toml` on 2 cores, 2026-12-02. To be called before JAX starts its threads: each would
    have an arena of its own. It holds for the whole process.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, TypeError):
        return  # another C library
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, _INT_MAX)
