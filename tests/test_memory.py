"""mamba_jax.memory: what is freed is used again, seen by the pages that the system has to fill."""

import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = """
import resource, sys
if sys.argv[1] == "keep":
    from mamba_jax.memory import keep_freed_memory
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults()
for _ in range(10):
    b'x' * 2**26
print(faults() - before)
"""


def pages_are_small():
    """Not where the system gives every process huge pages, as it is told to here and there."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return not setting.exists() or "[always]" not in setting.read_text()


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not pages_are_small(), reason="only glibc can be told, and pages are counted"
)
def test_freed_memory_is_used_again():
    def faults(what):
        command = [sys.executable, "-c", FAULTS, what]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    pages = 10 * 2**26 // resource.getpagesize()
    assert faults("leave") > 0.9 * pages  # each block was mapped and filled anew
    assert faults("keep") < pages / 4
