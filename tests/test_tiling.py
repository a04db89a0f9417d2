"""Block sizes: what the kernels need of them holds for every size of a scan."""

import functools
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
A100 = 108  # multiprocessors
BY_PLATFORM = {
    "interpreter": tiling.interpreter_tiling,
    "triton": functools.partial(tiling.triton_tiling, multiprocessors=A100),
}


@pytest.mark.parametrize("platform", BY_PLATFORM)
def test_blocks_cover_channels(platform):
    for sizes in SIZES:
        cut = BY_PLATFORM[platform](sizes)
        assert (cut.blocks(sizes) - 1) * cut.channels < sizes.r <= cut.blocks(sizes) * cut.channels


@pytest.mark.parametrize("platform", BY_PLATFORM)
def test_steps_at_once_divide_a_chunk(platform):
    """On the way back nothing may be read that was not noted on the way forward."""
    for sizes in SIZES:
        cut = BY_PLATFORM[platform](sizes)
        assert cut.chunk == tiling.STEPS_BETWEEN_STATES
        assert cut.chunk % cut.forward_unroll == 0
        assert cut.forward_unroll % cut.backward_unroll == 0


def test_triton_programs_are_one_warp():
    for sizes in SIZES:
        cut = tiling.triton_tiling(sizes, A100)
        assert cut.channels in (32, 64) and cut.num_warps == 1


@pytest.mark.parametrize(("b", "channels"), [(1, 32), (4, 32), (8, 64), (32, 64)])
def test_triton_takes_two_channels_a_thread_where_programs_are_many(b, channels):
    """At b = 8 there would be more programs of 32 channels than schedulers, and some would get two."""
    assert tiling.triton_tiling(Sizes(b, 2048, 2048, 16, 1), A100).channels == channels


def test_triton_wastes_little_on_large_sizes():
    for d in (1000, 1536, 2048, 80000):
        sizes = Sizes(2, 64, d, 16, 1)
        cut = tiling.triton_tiling(sizes, A100)
        assert cut.blocks(sizes) * cut.channels <= 1.03 * d


def test_interpreter_pads_at_most_a_channel_a_block():
    for sizes in SIZES:
        cut = tiling.interpreter_tiling(sizes)
        assert cut.channels <= 128
        assert cut.blocks(sizes) * cut.channels - sizes.r < cut.blocks(sizes)


@pytest.mark.parametrize(("l", "count"), [(1, 1), (15, 1), (16, 1), (17, 2), (1024, 64)])
def test_kept_states(l, count):
    assert tiling.chunks(l) == count
    assert tiling.boundaries_shape(Sizes(2, l, 6, 3, 1)) == (2, count, 3, 6)
