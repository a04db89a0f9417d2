"""What `--mesh data=2,seq=4` means. JAX is not needed yet: a mistake here is answered at once."""

from __future__ import annotations

import math

from train.errors import UsageError

# From the one that speaks least to the one that speaks most: neighbouring devices have the fastest links.
AXES = ("data", "fsdp", "seq", "tensor")
_EXAMPLE = "data=2,fsdp=2,seq=2"


def parse_mesh(text: str) -> dict[str, int]:
    """The size of each axis, in the order of `AXES`; 1 for those that are not named, so "" is one device.

    Raises:
        UsageError: it is not a list of axes and sizes.
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"--mesh {text}: axes out of {', '.join(AXES)} with sizes are wanted, such as {_EXAMPLE}")
        sizes[name] = int(size)
    return {name: sizes.get(name, 1) for name in AXES}


def check_mesh(text: str, *, batch_size: int, accumulate: int, seq_len: int, d_conv: int, d_inner: int) -> list[str]:
    """Why batches and model cannot be split over this mesh: a line for each reason.

    Raises:
        UsageError: as `parse_mesh`.
    """
    sizes = parse_mesh(text)
    rows, length, channels = sizes["data"] * sizes["fsdp"], sizes["seq"], sizes["tensor"]
    problems = []
    if batch_size % (accumulate * rows):
        times = f" times --accumulate {accumulate}" if accumulate > 1 else ""
        over = "" if rows == 1 else f", data times fsdp of --mesh {text},"
        problems.append(f"--batch-size {batch_size}: a multiple of {rows}{over}{times} is wanted")
    if seq_len % length:
        problems.append(f"--seq-len {seq_len}: a multiple of {length}, seq of --mesh {text}, is wanted")
    elif length > 1 and seq_len // length < d_conv - 1:
        problems.append(
            f"--seq-len {seq_len}: a part of --mesh {text} would be shorter than the convolution's {d_conv - 1} inputs"
        )
    if d_inner % channels:
        problems.append(f"--mesh {text}: the {d_inner} channels of a block are not a multiple of tensor={channels}")
    return problems


def count_devices(text: str) -> int:
    """How many devices the mesh takes."""
    return math.prod(parse_mesh(text).values())
