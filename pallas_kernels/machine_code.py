"""What a GPU compiler made of a kernel: registers, spills, and the loops of its machine code with what they issue."""

from __future__ import annotations

import collections
import dataclasses
import glob
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[0-9T]+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
_LABEL = re.compile(r"\s*(\.L_x_\d+):")


@dataclasses.dataclass
class Loop:
    """A loop of machine code: what one turn of it issues, loops inside it left out."""

    instructions: int
    exponentials: int
    special: int  # instructions for the special-function unit, exponentials among them
    mix: dict[str, int]
    inner: list[Loop]


@dataclasses.dataclass
class Kernel:
    """One compiled kernel."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    loops: list[Loop]  # the outermost ones that hold exponentials, themselves or in an inner loop


def tool(name: str) -> str:
    """Path of a CUDA tool: from a wheel, the search path, or a toolkit.

    Raises FileNotFoundError if there is none.
    """
    wheels = glob.glob(os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "*", "bin", name))
    found = [*wheels, *filter(None, [shutil.which(name)]), *glob.glob(f"/usr/local/cuda*/bin/{name}")]
    if not found:
        raise FileNotFoundError(f"{name} is neither in a wheel nor on the search path nor in /usr/local/cuda")
    return found[0]


def assemble(ptx: Path, architecture: str, shared_bytes: int = 0) -> Kernel:
    """Compile a PTX file to machine code and read that.

    Raises RuntimeError with the assembler's words if it refuses.
    """
    cubin = ptx.with_suffix(".cubin")
    command = [tool("ptxas"), "-v", f"-arch={architecture}", str(ptx), "-o", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True)
    text = said.stdout + said.stderr
    if said.returncode:
        raise RuntimeError(f"ptxas refuses {ptx.name}: {text[-500:]}")
    sass = subprocess.run([tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout

    def total(pattern: str) -> int:
        return sum(int(number) for number in re.findall(pattern, text))

    return Kernel(
        name=re.findall(r"\.entry (\w+)", ptx.read_text())[0].replace("_mosaic_gpu_kernel", " (Mosaic)"),
        registers=total(r"Used (\d+) registers"),
        spill_bytes=total(r"(\d+) bytes spill stores") + total(r"(\d+) bytes spill loads"),
        shared_bytes=shared_bytes + total(r"(\d+) bytes smem"),
        loops=find_loops(sass),
    )


def find_loops(sass: str) -> list[Loop]:
    """The loops of a listing, nested as they are; those that compute no exponential, such as waits for a barrier,
    count as plain code.
    """
    code, labels = [], {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        if instruction := _INSTRUCTION.search(line):
            code.append(instruction.groups())
    spans = set()
    for end, (operation, operands) in enumerate(code):
        target = re.search(r"\.L_x_\d+", operands) if operation.startswith("BRA") else None
        start = labels.get(target[0], end + 1) if target else end + 1
        inside = {name for name, _ in code[start:end]}
        # The slow path of a wait lies behind the kernel's end, and its way home is no loop.
        if any(name.startswith("MUFU.EX2") for name in inside) and "EXIT" not in inside:
            spans.add((start, end))
    return _nest(code, sorted(spans, key=lambda span: (span[0], -span[1])))


def _nest(code: list[tuple[str, str]], spans: list[tuple[int, int]]) -> list[Loop]:
    loops = []
    while spans:
        (start, end), *rest = spans
        inside = [span for span in rest if span[1] <= end]
        spans = [span for span in rest if span[1] > end]
        inner = _nest(code, inside)
        own = collections.Counter(name for name, _ in code[start : end + 1])
        for loop in inner:
            own -= collections.Counter(_all(loop))
        count = {
            prefix: sum(n for name, n in own.items() if name.startswith(prefix)) for prefix in ("MUFU.EX2", "MUFU")
        }
        loops.append(Loop(own.total(), count["MUFU.EX2"], count["MUFU"], dict(own.most_common()), inner))
    return loops


def _all(loop: Loop) -> collections.Counter[str]:
    """The instructions of a loop and of those in it."""
    total = collections.Counter(loop.mix)
    for inner in loop.inner:
        total += _all(inner)
    return total
