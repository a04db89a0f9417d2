"""Set-up that all tests share: one compilation cache for the whole run, and four virtual CPU devices."""

import atexit
import os
import shutil
import tempfile

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # An environment variable and not a config value, so that the commands which tests start share the cache too.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="mamba-jax-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
# Programs that compile faster than this are compiled again sooner than written to disk and read back.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax

jax.config.update(
    "jax_num_cpu_devices", 4
)  # only before first use; one process then tests single-device and sharded calls
