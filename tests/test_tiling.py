"""Block sizes: what the kernels need of them holds for every size of a scan."""

import itertools

import pytest

from pallas_kernels import tiling
from pallas_kernels.tiling import Sizes

SIZES = [
    Sizes(b, l, d, n, g)
    for (b, l), (d, g), n in itertools.product(
        [(1, 1), (2, 33), (65537, 2)],
        [(1, 1), (4, 2), (6, 3), (130, 1), (1000, 1), (2048, 1), (80000, 1), (80000, 80000)],
        [1, 3, 8, 12, 16, 64, 256],
    )
]
BY_PLATFORM = {"interpreter": tiling.interpreter_tiling, "triton": tiling.triton_tiling}


@pytest.mark.parametrize("platform", BY_PLATFORM)
def test_blocks_cover_channels_and_states(platform):
    for sizes in SIZES:
        cut = BY_PLATFORM[platform](sizes)
        assert (cut.blocks(sizes) - 1) * cut.channels < sizes.r <= cut.blocks(sizes) * cut.channels
        assert cut.states >= sizes.n


@pytest.mark.parametrize("platform", BY_PLATFORM)
def test_chunks_are_whole_subtiles(platform):
    """A subtile that reached into the next chunk would be walked twice."""
    for sizes in SIZES:
        cut = BY_PLATFORM[platform](sizes)
        assert cut.chunk == tiling.STEPS_BETWEEN_STATES
        assert cut.chunk % cut.subtile == 0
        assert cut.chunk % cut.unroll == 0


def test_triton_blocks_are_powers_of_two_and_fit_the_registers():
    for sizes in SIZES:
        cut = tiling.triton_tiling(sizes)
        for size in (cut.channels, cut.states, cut.num_warps):
            assert size & (size - 1) == 0
        assert cut.channels * cut.states <= 512 * cut.num_warps
        assert cut.num_warps <= 8


def test_triton_wastes_little_on_large_sizes():
    for d in (1000, 1536, 2048, 80000):
        sizes = Sizes(2, 64, d, 16, 1)
        cut = tiling.triton_tiling(sizes)
        assert cut.blocks(sizes) * cut.channels <= 1.03 * d


def test_interpreter_pads_at_most_a_channel_a_block():
    for sizes in SIZES:
        cut = tiling.interpreter_tiling(sizes)
        assert cut.states == sizes.n
        assert cut.channels <= 128
        assert cut.blocks(sizes) * cut.channels - sizes.r < cut.blocks(sizes)


@pytest.mark.parametrize(("l", "count"), [(1, 1), (15, 1), (16, 1), (17, 2), (1024, 64)])
def test_kept_states(l, count):
    assert tiling.chunks(l) == count
    assert tiling.boundaries_shape(Sizes(2, l, 6, 3, 1)) == (2, count, 3, 6)
