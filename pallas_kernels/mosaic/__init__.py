"""Selective scan as Mosaic GPU kernels for Hopper and Blackwell: shared memory placed by hand, filled by the copy
engine.

It needs jax 0.11.2 or newer, whose interpreter and lowering of these kernels can be relied on. Never run on a GPU so
far: interpreted without races, compiled, and their machine code counted.

At (b, l, d, n) = (8, 2048, 2048, 16), with softplus, skip, gate and state gradients, compiled by jax 0.12.0.1 and
ptxas 13.5 without spills (`python -m pallas_kernels.gpu_report --gradient`); instructions a time step and channel, with
everything that the loop over tiles does, and in brackets in the loop over steps alone; milliseconds by what would bound
the kernel if it ran without a stall, the largest of which is the prediction, and "bytes" the floor of any kernel:

    kernel    target  dtype     registers  shared KB  instructions   special   issue  special unit  bytes
    forward   H200    float32          95        111   130 (117.8)        19   0.134         0.157  0.140
    forward   H200    bfloat16         94         67   132 (120.3)        19   0.137         0.157  0.084
    forward   B200    float32          93        111   127 (117.8)        19   0.132         0.158  0.084
    forward   B200    bfloat16         92         67   129 (120.3)        19   0.135         0.158  0.050
    backward  H200    float32         237        200           419        33   0.433         0.273  0.231
    backward  H200    bfloat16        239        218           427        33   0.442         0.273  0.133
    backward  B200    float32         246        200           402        33   0.419         0.275  0.138
    backward  B200    bfloat16        246        218           411        33   0.428         0.275  0.080

The backward kernel keeps the states and the decays of four steps, 128 registers, and the compiler would keep the B of
those steps beside them: an optimisation barrier between the ways forward and back makes it read B again. Without it a
constant C with documents, a ragged length and mixed dtypes spills 400 bytes and takes 408 instructions; with it none,
and 401. Only a constant B beside a varying C in that mixture still spills: 48 bytes on an H200, scalars of the loop
over tiles, none in a loop over steps; 116 on a B200. Tried against those and not kept: decays recomputed for one to
four of the steps (11 to 29 instructions a step more, 40 to 156 bytes), a state read back from shared memory (76 and 116
bytes), D in shared memory (0 and 136 bytes).

The special-function unit bounds the forward kernel: 16 exponentials of the state, one for softplus, two operations for
the gate. The issue of instructions bounds the backward kernel. A length that is split costs 86 instructions a step more
forward and 96 backward, and gains where multiprocessors would be idle.

Tried and not kept: one or two of the 16 exponentials as polynomials (Cody-Waite, degree 5) would take 9 instructions
each and move the forward bound to 0.149 or 0.151 ms.

Reckoned and not built:
- Two channels a thread, forward: they would share the 8 loads of B and C, 4 instructions a step less, but a program
  is a warpgroup and would own 256 channels: 64 programs here for 132 multiprocessors, 0.314 ms of the special-function
  unit in place of 0.157.
- More stages: the two tiles that are on their way take the special-function unit 2432 cycles each, 2.5 us together,
  longer than memory takes to answer. A fourth stage would make it 137 KB a program in float32, 81 in bfloat16, and one
  program fewer fit a multiprocessor.
- Sums over channels on tensor cores: products in tf32 are right to 5e-4 and the gradients must be to 1e-5; with each
  factor split in two, three products and the second halves' 32 stores a step would replace the 45 instructions that
  the sums take beside their stores.
"""

from pallas_kernels.mosaic.scan import backward as backward
from pallas_kernels.mosaic.scan import forward as forward
