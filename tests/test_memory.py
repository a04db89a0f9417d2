import resource
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
if sys.argv[1] == "keep":
    from mamba_jax.memory import keep_freed_memory
    keep_freed_memory()
for _ in range(10):
    b'x' * 2**26
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator is told")
def test_freed_memory_is_used_again():
    def faults(what):
        command = [sys.executable, "-c", FAULTS, what]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    pages = 10 * 2**26 // resource.getpagesize()
    assert faults("leave") > 0.9 * pages  # each block was mapped and filled anew
    assert faults("keep") < pages / 4
