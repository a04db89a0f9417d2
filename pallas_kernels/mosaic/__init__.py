"""Selective scan as Mosaic GPU kernels for Hopper and Blackwell: shared memory placed by hand, filled by the copy
engine.

It needs jax 0.11.2 or newer, whose interpreter and lowering of these kernels can be relied on. Never run on a GPU so
far: interpreted without races, compiled, and their machine code counted.

At (b, l, d, n) = (8, 2048, 2048, 16), with softplus, skip, gate and state gradients, compiled by jax 0.12.0.1 and
ptxas 13 without spills (`python -m pallas_kernels.gpu_report --gradient`); instructions a time step and channel, with
everything that the loop over tiles does, and in brackets in the loop over steps alone; milliseconds by what would bound
the kernel if it ran without a stall, the largest of which is the prediction, and "bytes" the floor of any kernel:

    kernel    target  dtype     registers  shared KB  instructions   special   issue  special unit  bytes
    forward   H200    float32          95        111   130 (117.8)        19   0.134         0.157  0.140
    forward   H200    bfloat16         93         67   132 (120.3)        19   0.137         0.157  0.084
    forward   B200    float32          93        111   127 (117.8)        19   0.133         0.158  0.084
    forward   B200    bfloat16         92         67   129 (120.3)        19   0.135         0.158  0.050
    backward  H200    float32         254        200           423        40   0.438         0.331  0.231
    backward  H200    bfloat16        255        218           434        41   0.449         0.339  0.133
    backward  B200    float32         254        200           407        40   0.424         0.334  0.138
    backward  B200    bfloat16        249        218           418        41   0.436         0.342  0.080

One mixture spills: a constant C with documents, a ragged length and mixed dtypes, 400 bytes in the backward kernel. The
compiler keeps the 64 decays of four steps from the way forward beside the 32 rows of C and its sums; that costs 11
instructions a step. Tried and not kept: C in shared memory (388 bytes), its sums there too (644 bytes).

The special-function unit bounds the forward kernel: 16 exponentials of the state, one for softplus, two operations for
the gate. Tried and not kept: one or two of the 16 as polynomials (Cody-Waite, degree 5) would take 9 instructions each
and move that bound to 0.149 or 0.151 ms. The issue of instructions bounds the backward kernel. A length that is split
costs 86 instructions a step more forward and 96 backward, and gains where multiprocessors would be idle.
"""

from pallas_kernels.mosaic.scan import backward as backward
from pallas_kernels.mosaic.scan import forward as forward
