"""Sizes that the kernels work in: blocks of channels, steps between kept states, warps. Each with its reason."""

from __future__ import annotations

import dataclasses

# The forward pass keeps the state before every 32nd step. At n = 16 that is 2 bytes for each (step, channel) in float32: half of u. Every 8 steps would be
# 256 MiB at (8, 2048, 2048, 16); the interpreter's speed on a CPU does not depend on it between 16 and 128.
STEPS_BETWEEN_STATES = 32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a scan is to compute, as far as shapes go: b batch, l length, d channels in g groups, n states."""

    b: int
    l: int
    d: int
    n: int
    g: int

    @property
    def r(self) -> int:
        """Channels in a group."""
        return self.d // self.g


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the portable kernels cut a scan up. A program owns `channels` channels of one group and batch row, over the whole length."""

    channels: int
    states: int  # n, or the power of two above it, where the compiler asks for one
    chunk: int  # steps between kept states
    subtile: int  # steps whose states the backward pass holds in registers at once; divides chunk
    num_warps: int
    num_stages: int
    interpreted: bool

    def blocks(self, sizes: Sizes) -> int:
        """Channel blocks in a group."""
        return -(-sizes.r // self.channels)


def chunks(l: int) -> int:
    """How many states the forward pass keeps for each channel: one before each chunk."""
    return -(-l // STEPS_BETWEEN_STATES)


def boundaries_shape(sizes: Sizes) -> tuple[int, int, int, int]:
    """Shape of the kept states, the same for every kernel: (b, chunks, n, d)."""
    return sizes.b, chunks(sizes.l), sizes.n, sizes.d


def interpreter_tiling(sizes: Sizes) -> Tiling:
    """For Pallas' interpreter: a tile of (16, 128) floats stays in the first-level cache (64 and 256 channels were slower, x86 with AVX2)."""
    return Tiling(
        channels=min(sizes.r, 128),
        states=sizes.n,
        chunk=STEPS_BETWEEN_STATES,
        subtile=1,
        num_warps=1,
        num_stages=1,
        interpreted=True,
    )


def triton_tiling(sizes: Sizes) -> Tiling:
    """For Triton, whose blocks are powers of two."""
    channels = min(_power_of_two(sizes.r), 128)
    return Tiling(
        channels=channels,
        states=_power_of_two(sizes.n),
        chunk=STEPS_BETWEEN_STATES,
        subtile=4,
        num_warps=max(1, channels // 32),
        num_stages=1,
        interpreted=False,
    )


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
