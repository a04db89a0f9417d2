"""Compile the scan for a GPU that is not there, read the machine code, and predict its time.

    python -m pallas_kernels.gpu_report --target h200 --dtype bfloat16 --gradient

Needs a jax that compiles for CUDA (the extra `gpu-compile`): its CUDA plugin, nvdisasm, and ptxas from a wheel or a
toolkit; no GPU, no driver. The targets are written from data sheets, not read from devices: good for compiling and
for counting, not for autotuning.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from pallas_kernels.machine_code import Kernel, Loop, assemble, tool
from pallas_kernels.selective_scan import selective_scan
from pallas_kernels.tiling import (
    CHANNELS,
    SCHEDULERS,
    STEPS_BETWEEN_STATES,
    Sizes,
    Tiling,
    mosaic_tiling,
    triton_tiling,
)

_DEVICE = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_per_core}
  threads_per_core_limit: 2048
  core_count: {multiprocessors}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_per_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""
_GIB = 2**30
_SPECIAL_CYCLES = 8  # of a warp in the special-function unit: 4 lanes a cycle and scheduler
# Turns of the inner loops of the Mosaic kernels' tile loop, at n = 16 and l a multiple of 16: the forward kernel and
# the summaries take 4 steps a turn, the backward kernel notes the states before three subtiles and then walks four
# back.
_TURNS = {
    "selective_scan_forward (Mosaic)": (4,),
    "selective_scan_summary (Mosaic)": (4,),
    "selective_scan_gradient_summary (Mosaic)": (4,),
    "selective_scan_backward (Mosaic)": (3, 4),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU as its data sheet has it; bytes, and bytes a second."""

    name: str
    architecture: str
    major: int
    minor: int
    multiprocessors: int
    shared_per_core: int
    shared_per_block: int
    bandwidth: int
    l2: int
    memory: int
    clock_ghz: float


TARGETS = {
    "h200": Target("NVIDIA H200", "sm_90a", 9, 0, 132, 233472, 232448, 4800 * 10**9, 62914560, 141 * _GIB, 1.98),
    "b200": Target("NVIDIA B200", "sm_100a", 10, 0, 148, 233472, 232448, 8000 * 10**9, 132120576, 180 * _GIB, 1.965),
    "a100": Target("NVIDIA A100", "sm_80", 8, 0, 108, 167936, 166912, 2039 * 10**9, 41943040, 80 * _GIB, 1.41),
    "ada": Target("NVIDIA L40", "sm_89", 8, 9, 142, 102400, 101376, 864 * 10**9, 100663296, 48 * _GIB, 2.52),
}


@dataclasses.dataclass
class Report:
    """What was compiled, kernel by kernel, and the memory that the whole program needs beside arguments and results."""

    target: str
    kernels: list[Kernel]
    temp_mib: float
    argument_mib: float


def prepare(folder: str) -> None:
    """Make the compilers write what they produce into a folder; to be called before jax is first used."""
    os.environ.update(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", MOSAIC_GPU_DUMP_TO=folder)
    # The second makes XLA write PTX; ".*" would write all that comes before it too, a minute's work for a large kernel.
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_emitter_re=ptx"
    os.environ["PATH"] = os.pathsep.join([str(Path(tool("nvdisasm")).parent), os.environ["PATH"]])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # what comes out of the cache writes no PTX


def absent_devices(target: str, count: int) -> list[Any]:
    """Devices of a target to compile for; they can hold and run nothing.

    Raises:
        RuntimeError: this jax cannot compile for CUDA.
    """
    config = _DEVICE.format(**dataclasses.asdict(TARGETS[target]))
    topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology=f"1x1x{count}")
    return list(topology.devices)


def report(function, arguments, target: str, folder: str) -> Report:
    """Compile `function` of the `jax.ShapeDtypeStruct`s `arguments` for a target; `prepare(folder)` was called in
    time.
    """
    gpu = TARGETS[target]
    mesh = jax.sharding.Mesh(absent_devices(target, 1), ("device",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # where the kernels look for the device
        compiled = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).compile()
    memory: Any = compiled.memory_analysis()
    files = [ptx for ptx in sorted(Path(folder).rglob("*.ptx")) if ".entry" in ptx.read_text()]
    kernels = [assemble(ptx, gpu.architecture, _dynamic_shared_bytes(ptx)) for ptx in files]
    return Report(target, kernels, memory.temp_size_in_bytes / 2**20, memory.argument_size_in_bytes / 2**20)


def _dynamic_shared_bytes(ptx: Path) -> int:
    """What a Mosaic kernel asks for when it is launched: that is written beside its PTX."""
    number = re.search(r"_(\d+)$", ptx.stem)
    notes = list(ptx.parent.glob(f"*{ptx.stem}*resources*")) if number else []
    found = re.search(r"smem_scratch_bytes=(\d+)", notes[0].read_text()) if notes else None
    return int(found[1]) if found else 0


def from_json(text: str) -> Report:
    """The report that the command printed with --json."""

    def loop(fields: dict[str, Any]) -> Loop:
        inner: Any = [loop(found) for found in fields.pop("inner")]
        return Loop(**fields, inner=inner)

    fields = json.loads(text)
    kernels = [Kernel(**kernel | {"loops": [loop(found) for found in kernel["loops"]]}) for kernel in fields["kernels"]]
    return Report(**fields | {"kernels": kernels})


# -- counting ----------------------------------------------------------------------------------------------------------


def per_step(kernel: Kernel, states: int = 16) -> tuple[float, float]:
    """(instructions, special-function instructions) a time step and channel.

    For the Mosaic kernels all of the loop over tiles, its own part included; for others the innermost loops, a step of
    a channel for each `states` exponentials.
    """
    turns = _TURNS.get(kernel.name)
    if turns and states == 16 and len(kernel.loops) == 1 and len(kernel.loops[0].inner) == len(turns):
        tile, steps = kernel.loops[0], STEPS_BETWEEN_STATES
        weighted = [(tile, 1 / steps), *((loop, n / steps) for loop, n in zip(tile.inner, turns, strict=True))]
    else:
        weighted = [(loop, 1 / max(1, loop.exponentials // states)) for loop in _innermost(kernel.loops)]
    return sum(loop.instructions * w for loop, w in weighted), sum(loop.special * w for loop, w in weighted)


def _innermost(loops: list[Loop]) -> list[Loop]:
    return [found for loop in loops for found in (_innermost(loop.inner) or [loop])]


def predicted_ms(kernel: Kernel, case: Case, target: Target) -> dict[str, float]:
    """Milliseconds by the issue of instructions, by the special-function unit and by bytes; the largest is the
    prediction.

    For the warps of the fullest scheduler, one instruction a cycle: a bound from below.
    """
    instructions, special = per_step(kernel, case.n)
    warps, steps = case.warps(kernel.name, target)
    cycles = warps * steps
    return {
        "issue": instructions * cycles / (target.clock_ghz * 1e6),
        "special": special * _SPECIAL_CYCLES * cycles / (target.clock_ghz * 1e6),
        "bytes": case.bytes(kernel.name, target) / target.bandwidth * 1e3,
    }


# -- the command -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """A scan with softplus, skip, gate, initial and last state."""

    b: int
    l: int
    d: int
    n: int
    dtype: str

    def bytes(self, kernel: str, target: Target) -> float:
        """That must pass between global memory and a multiprocessor's: sequences, kept states, partial sums of dB and
        dC.
        """
        sequence = self.b * self.l * self.d * (2 if self.dtype != "float32" else 4)
        kept = self.b * -(-self.l // STEPS_BETWEEN_STATES) * self.n * self.d * 4
        channels = CHANNELS if kernel.endswith("(Mosaic)") else self._triton(target).channels
        partial = 2 * self.b * -(-self.d // channels) * self.l * self.n * 4
        return {
            "selective_scan_forward": 4 * sequence + kept,
            "selective_scan_backward": 7 * sequence + kept + partial,
        }.get(kernel.split()[0], 3 * sequence)

    def warps(self, kernel: str, target: Target) -> tuple[int, int]:
        """How many warps of a kernel, of one channel a thread, the fullest scheduler has, and how many steps each
        takes.
        """
        if not kernel.endswith("(Mosaic)"):
            channels = self._triton(target).channels
            programs = self.b * -(-self.d // channels)
            return -(-programs // (SCHEDULERS * target.multiprocessors)) * channels // 32, self.l
        size = 4 if self.dtype == "float32" else 2
        cut = mosaic_tiling(self._sizes, (size, size, size), target.multiprocessors)
        forward = kernel.split()[0] in ("selective_scan_forward", "selective_scan_summary")
        pieces = cut.forward_pieces if forward else cut.backward_pieces
        programs = self.b * -(-self.d // CHANNELS) * pieces.count
        return -(-programs // target.multiprocessors), pieces.steps

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.b, self.l, self.d, self.n, 1)

    def _triton(self, target: Target) -> Tiling:
        return triton_tiling(self._sizes, target.multiprocessors)

    def function(self, gradient: bool) -> tuple[Any, list]:
        """The scan, or the gradient of a loss on y and the last state in every argument; and what to call it with."""

        def scan(u, delta, A, B, C, D, z, delta_bias, initial_state):
            return selective_scan(u, delta, A, B, C, D, z, delta_bias, initial_state, None, delta_softplus=True)

        def loss(*arguments):
            y, last_state = scan(*arguments)
            return jnp.sum(y.astype(jnp.float32) ** 2) + jnp.sum(last_state**2)

        def shape(*sizes, dtype="float32"):
            return jax.ShapeDtypeStruct(sizes, dtype)

        b, l, d, n = self.b, self.l, self.d, self.n
        sequence, projection = shape(b, l, d, dtype=self.dtype), shape(b, l, 1, n, dtype=self.dtype)
        channel, state = shape(d), shape(b, d, n)
        arguments = [sequence, sequence, shape(d, n), projection, projection, channel, sequence, channel, state]
        return (jax.grad(loss, tuple(range(9))) if gradient else scan), arguments


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, default="h200")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--sizes", type=int, nargs=4, default=[8, 2048, 2048, 16], metavar=("B", "L", "D", "N"))
    parser.add_argument("--gradient", action="store_true", help="compile the gradient, its forward kernel included")
    parser.add_argument("--function", metavar="MODULE:NAME", help="compile what this returns: (function, arguments)")
    parser.add_argument("--json", action="store_true", help="print everything that was found as JSON")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="gpu-report-")
    prepare(folder)
    b, l, d, n = options.sizes
    case = Case(b, l, d, n, options.dtype)
    if options.function:
        module, name = options.function.split(":")
        function, arguments = getattr(importlib.import_module(module), name)()
    else:
        function, arguments = case.function(options.gradient)
    found = report(function, arguments, options.target, folder)
    print(json.dumps(dataclasses.asdict(found)) if options.json else _table(found, case, TARGETS[options.target]))


def _table(found: Report, case: Case, target: Target) -> str:
    """One line for each kernel that computes exponentials."""
    header = (
        f"{'kernel':42} registers  spills  shared KB  instructions/step  special/step   issue ms  special ms  bytes ms"
    )
    lines = [f"{target.name}, (b, l, d, n) = ({case.b}, {case.l}, {case.d}, {case.n}), {case.dtype}", header]
    for kernel in found.kernels:
        if not kernel.loops:
            continue
        instructions, special = per_step(kernel, case.n)
        times = predicted_ms(kernel, case, target)
        numbers = "".join(f"{times[key]:11.3f}" for key in ("issue", "special", "bytes"))
        lines.append(
            f"{kernel.name:42}{kernel.registers:10}{kernel.spill_bytes:8}{kernel.shared_bytes / 1024:11.1f}"
            f"{instructions:19.1f}{special:14.1f}{numbers}"
        )
    return "\n".join([*lines, f"temporaries {found.temp_mib:.0f} MiB, arguments {found.argument_mib:.0f} MiB"])


if __name__ == "__main__":
    main()
