"""Sizes that the kernels work in: blocks of channels, steps between kept states, warps. Each with its reason."""

from __future__ import annotations

import dataclasses

# The forward pass keeps the state before every 16th step: at n = 16, 4 bytes for each (step, channel), 128 MiB at
# (8, 2048, 2048, 16). The Mosaic backward kernel holds the inputs of that many steps in shared memory, with all that it
# derives from them; 32 steps would not fit. The interpreter's speed on a CPU does not depend on it between 16 and 128.
STEPS_BETWEEN_STATES = 16


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
    """How the portable kernels cut a scan up. A program owns `channels` channels of one group and batch row, over the
    whole length.
    """

    channels: int
    chunk: int  # steps between kept states
    forward_unroll: int  # steps that are read at once on the way forward; divides chunk
    backward_unroll: int  # on the way back; divides forward_unroll
    num_warps: int
    num_stages: int
    interpreted: bool

    def blocks(self, sizes: Sizes) -> int:
        """Channel blocks in a group."""
        return -(-sizes.r // self.channels)


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How the length is cut among programs: `count` pieces of `steps` steps, of which the last may be shorter."""

    count: int
    steps: int


@dataclasses.dataclass(frozen=True)
class MosaicTiling:
    """How the Mosaic kernels cut a scan up.

    A program owns 128 channels of one group and batch row, over one piece of the length.
    """

    tile: int  # steps that the copy engine brings at once; also the steps between kept states
    forward_stages: int  # tiles in shared memory at once
    backward_stages: int
    forward_pieces: Pieces
    backward_pieces: Pieces


def chunks(l: int) -> int:
    """How many states the forward pass keeps for each channel: one before each chunk."""
    return -(-l // STEPS_BETWEEN_STATES)


def boundaries_shape(sizes: Sizes) -> tuple[int, int, int, int]:
    """Shape of the kept states, the same for every kernel: (b, chunks, n, d)."""
    return sizes.b, chunks(sizes.l), sizes.n, sizes.d


def interpreter_tiling(sizes: Sizes) -> Tiling:
    """For Pallas' interpreter: a tile of (16, 128) floats stays in the first-level cache (64 and 256 channels were
    slower, x86 with AVX2).
    """
    return Tiling(
        channels=-(-sizes.r // -(-sizes.r // 128)),  # as equal as can be: at most one channel of padding a block
        chunk=STEPS_BETWEEN_STATES,
        forward_unroll=1,
        backward_unroll=1,
        num_warps=1,
        num_stages=1,
        interpreted=True,
    )


# What a program of so many channels issues for a step of a gradient at n = 16, from machine code for sm_80: forward,
# forward again, back.
_TRITON_STEP = {32: 155 + 133 + 413, 64: 260 + 215 + 627}
SCHEDULERS = 4  # of a multiprocessor; a program is one warp


def triton_tiling(sizes: Sizes, multiprocessors: int) -> Tiling:
    """For Triton, whose blocks are powers of two: one warp a program, each of its threads one or two channels.

    Two channels share the entries of B and C and the sums over channels, so a step of both costs less than two steps
    of one; but there are half as many programs. The count with which the fullest scheduler has the least to issue.
    """

    def issued(channels: int) -> int:
        programs = sizes.b * sizes.g * -(-sizes.r // channels)
        return -(-programs // (SCHEDULERS * multiprocessors)) * _TRITON_STEP[channels]

    channels = min(_TRITON_STEP, key=issued)
    return Tiling(
        channels=channels,
        chunk=STEPS_BETWEEN_STATES,
        forward_unroll=2,
        backward_unroll=2 if channels == 32 else 1,  # two steps of two channels do not fit the registers
        num_warps=1,
        num_stages=1,  # rows are read ahead by hand; Triton only pipelines what feeds matrix products
        interpreted=False,
    )


# -- Mosaic ------------------------------------------------------------------------------------------------------------

CHANNELS = 128  # of a program: one warpgroup, a thread each
STATES = 16  # of a program, at most: more of them, with A and the sums, do not fit the registers

_SHARED_BYTES = 230_400  # of a program, at most: 227 KB on Hopper and Blackwell, less 2 KB for barriers and alignment
_WARPS = 4  # of a program
_ENOUGH_WARPS = 8  # on a multiprocessor: two for each scheduler, so that one can wait while the other works
# What a step costs when the length is split, beside 1 without: a summary's kernel reads the inputs first. From the
# instructions of a step at n = 16 in machine code for an H200: forward 118, backward 419 with its loop over
# tiles, their summaries 86 and 96.
_SPLIT_FORWARD, _SPLIT_BACKWARD = 1.73, 1.23
_LONE = 1.33  # A single forward program leaves a multiprocessor waiting for some of its time; estimated, not measured.
_FEWEST_TILES = 4  # of a piece


def mosaic_tiling(sizes: Sizes, itemsizes: tuple[int, int, int], multiprocessors: int) -> MosaicTiling:
    """For the Mosaic kernels; `itemsizes` are those of u, delta and z, 0 for a z that is not there."""
    tile = STEPS_BETWEEN_STATES
    fits = mosaic_backward_bytes(sizes, itemsizes, 3) <= _SHARED_BYTES
    return MosaicTiling(
        tile=tile,
        forward_stages=3,
        backward_stages=3 if fits else 2,
        forward_pieces=_pieces(sizes, multiprocessors, _SPLIT_FORWARD, _LONE),
        backward_pieces=_pieces(sizes, multiprocessors, _SPLIT_BACKWARD, 1.0),  # shared memory holds one program
    )


def _pieces(sizes: Sizes, multiprocessors: int, split_cost: float, lone: float) -> Pieces:
    """How many pieces of the length are worked on at once: one, unless multiprocessors have fewer than 8 warps then.

    Then the number that takes the least time by a simple count: the programs of the fullest multiprocessor, times the
    steps of each, times what a step costs. Where nearly every multiprocessor has a program of its own, as at
    (8, 2048, 2048, 16) on 132 of them, any split costs more steps than it saves.
    """
    programs = sizes.b * sizes.g * -(-sizes.r // CHANNELS)
    tiles = chunks(sizes.l)
    best, least = Pieces(1, sizes.l), max(lone, -(-programs // multiprocessors)) * tiles
    for count in range(2, min(tiles // _FEWEST_TILES, _ENOUGH_WARPS * multiprocessors // (_WARPS * programs)) + 1):
        tiles_of_piece = -(-tiles // count)
        pieces = Pieces(-(-tiles // tiles_of_piece), tiles_of_piece * STEPS_BETWEEN_STATES)
        load = max(lone, -(-programs * pieces.count // multiprocessors))
        if (time := load * tiles_of_piece * split_cost) < least:
            best, least = pieces, time
    return best


def mosaic_forward_bytes(sizes: Sizes, itemsizes: tuple[int, int, int], stages: int) -> int:
    """Shared memory of a forward program, without barriers, where B and C vary."""
    tile, n = STEPS_BETWEEN_STATES, state_width(sizes.n)
    ring = tile * (CHANNELS * sum(itemsizes) + 2 * n * 4)
    return stages * ring + 2 * tile * CHANNELS * itemsizes[0] + (2 * n + 2) * CHANNELS * 4


def mosaic_backward_bytes(sizes: Sizes, itemsizes: tuple[int, int, int], stages: int) -> int:
    """Shared memory of a backward program, without barriers, where B and C vary."""
    tile, n = STEPS_BETWEEN_STATES, state_width(sizes.n)
    u, delta, z = itemsizes
    state, row = n * CHANNELS * 4, CHANNELS * 4
    ring = tile * (CHANNELS * (2 * u + delta + z) + 2 * n * 4) + state
    derived = tile * row * (2 + (u < 4) + (delta < 4) + (0 < z < 4))
    subtile = 64 // n
    sums = 2 * (64 * (CHANNELS + 16) + tile * n) * 4
    return stages * ring + max(derived, (n + 2) * row) + (tile // subtile - 1) * state + sums


def state_width(n: int) -> int:
    """n as the Mosaic kernels hold it: rows of states are whole 16 bytes, and a whole number of steps fills 64 rows."""
    return next((width for width in (4, 8) if n <= width), STATES)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
