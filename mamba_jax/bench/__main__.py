"""`python -m mamba_jax.bench [--lengths ...] [--channels N] [--json FILE] [--plots DIR] ...`; `--help` for more."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code: 0 done, 1 an implementation is wrong, 2 the user's mistake."""
    if "--gpu-check" in arguments:  # a command of its own, as it must do without rich and tyro
        from mamba_jax.bench.gpu_check import command

        return command(arguments)
    from mamba_jax.bench.report import Screen
    from mamba_jax.bench.settings import UsageError, parse

    screen = Screen()
    try:
        settings = parse(arguments)
        _set_up(settings.keep_memory, settings.widest_vectors)
        from mamba_jax.bench.run import run

        return run(settings, screen)
    except UsageError as error:
        screen.error(str(error))
        return 2


def _set_up(keep_memory: bool, widest_vectors: bool) -> None:
    """What must be set before JAX and PyTorch start: a device a core, no caches, as compile time is measured, what
    becomes of freed memory, and how wide vectors are.
    """
    if keep_memory:
        from mamba_jax.memory import keep_freed_memory

        keep_freed_memory()
    if widest_vectors:
        from mamba_jax.vectors import use_widest_vectors

        use_widest_vectors()
    os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    import jax

    jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
