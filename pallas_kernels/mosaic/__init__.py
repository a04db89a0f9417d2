"""Selective scan as Mosaic GPU kernels for Hopper and Blackwell: shared memory placed by hand, filled by the copy
engine.

It needs jax 0.11.2 or newer, whose interpreter and lowering of these kernels can be relied on.
"""

from pallas_kernels.mosaic.scan import backward as backward
from pallas_kernels.mosaic.scan import forward as forward
