"""Selective scan as a pair of `pl.pallas_call` kernels.

Pallas' interpreter runs them on a CPU, Triton compiles them for a GPU.
"""

from pallas_kernels.portable.scan import backward as backward
from pallas_kernels.portable.scan import forward as forward
