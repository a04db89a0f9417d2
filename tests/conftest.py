"""Set-up that all tests share: one compilation cache for the whole run, and eight virtual CPU devices."""

import atexit
import gc
import itertools
import os
import shutil
import sys
import tempfile

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # An environment variable and not a config value, so that the commands which tests start share the cache too.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="mamba-jax-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
# Programs that compile faster than this are compiled again sooner than written to disk and read back. With 0.3,
# tests that start commands took 1.1 times as long, and a mixture of others 1.04.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")

import jax
import pytest

# Only before first use; one process then tests single-device and sharded calls.
jax.config.update("jax_num_cpu_devices", 8)

_TESTS_BETWEEN_CLEARINGS = 40
_n_tests = itertools.count(1)


def pytest_runtest_teardown() -> None:
    """Let go of compiled programs now and then.

    A test's programs hold about a hundred memory mappings, and Linux gives a process 65,530 (`vm.max_map_count`): the
    whole suite in one process would abort in LLVM, or while it writes to the compilation cache.
    """
    if next(_n_tests) % _TESTS_BETWEEN_CLEARINGS == 0:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if PyTorch were not installed: importing it now raises ImportError."""
    monkeypatch.setitem(sys.modules, "torch", None)
