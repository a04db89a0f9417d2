"""How the Mosaic kernels cut a scan up: the length split, and what fits into shared memory."""

import pytest

from pallas_kernels.tiling import (
    STEPS_BETWEEN_STATES,
    Pieces,
    Sizes,
    mosaic_backward_bytes,
    mosaic_forward_bytes,
    mosaic_tiling,
)

SHARED_BYTES = 227 * 1024
H200 = 132
FLOAT32, BFLOAT16 = (4, 4, 4), (2, 2, 2)


def test_no_split_where_every_multiprocessor_has_work():
    tiling = mosaic_tiling(Sizes(b=8, l=2048, d=2048, n=16, g=1), FLOAT32, H200)
    assert tiling.forward_pieces == tiling.backward_pieces == Pieces(1, 2048)
    assert (tiling.forward_stages, tiling.backward_stages) == (3, 2)
    assert mosaic_tiling(Sizes(b=8, l=2048, d=2048, n=16, g=1), BFLOAT16, H200).backward_stages == 3


@pytest.mark.parametrize("sizes", [(1, 2048, 1536), (1, 65536, 2048), (2, 2048, 2048), (4, 1000, 2048), (1, 512, 30)])
def test_a_small_batch_is_split(sizes):
    b, l, d = sizes
    tiling = mosaic_tiling(Sizes(b, l, d, 16, 1), BFLOAT16, H200)
    programs = b * -(-d // 128)
    for pieces in (tiling.forward_pieces, tiling.backward_pieces):
        assert pieces.count > 1
        assert pieces.steps % STEPS_BETWEEN_STATES == 0
        assert (pieces.count - 1) * pieces.steps < l <= pieces.count * pieces.steps
        assert 4 * programs * pieces.count <= 8 * H200


@pytest.mark.parametrize("l", [1, 16, 64, 112])
def test_a_short_length_stays_whole(l):
    assert mosaic_tiling(Sizes(1, l, 128, 16, 1), FLOAT32, H200).forward_pieces == Pieces(1, l)


@pytest.mark.parametrize("itemsizes", [(u, delta, z) for u in (2, 4) for delta in (2, 4) for z in (0, 2, 4)])
@pytest.mark.parametrize("n", [1, 7, 16, 256])
def test_every_mixture_fits_into_shared_memory(itemsizes, n):
    sizes = Sizes(b=1, l=100, d=128, n=n, g=1)
    tiling = mosaic_tiling(sizes, itemsizes, H200)
    assert mosaic_forward_bytes(sizes, itemsizes, tiling.forward_stages) < SHARED_BYTES
    assert mosaic_backward_bytes(sizes, itemsizes, tiling.backward_stages) < SHARED_BYTES
