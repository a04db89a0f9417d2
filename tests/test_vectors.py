"""mamba_jax.vectors: the width is among the options that XLA compiled with."""

import os
import re
import subprocess
import sys

import pytest

from mamba_jax.vectors import _has_avx512

COMPILE = """
import sys
import jax
if sys.argv[1] == "widest":
    from mamba_jax.vectors import use_widest_vectors
    use_widest_vectors()
jax.jit(jax.numpy.exp).lower(jax.numpy.ones(1024)).compile()
"""


def widths(tmp_path, what, *flags):
    flags = " ".join([f"--xla_dump_to={tmp_path}", *flags])
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_ENABLE_COMPILATION_CACHE": "0", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", COMPILE, what], env=environment, check=True)
    options = "".join(path.read_text() for path in tmp_path.glob("*.debug_options"))
    return set(re.findall(r"prefer_vector_width: (\d+)", options))


@pytest.mark.skipif(not _has_avx512(), reason="this CPU has no vectors of 512 bits")
def test_xla_takes_vectors_of_512_bits(tmp_path):
    assert widths(tmp_path, "widest") == {"512"}


@pytest.mark.parametrize("what", ["widest", "as it is"])
def test_a_width_in_xla_flags_stays(tmp_path, what):
    assert widths(tmp_path, what, "--xla_cpu_prefer_vector_width=128") == {"128"}
