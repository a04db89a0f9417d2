import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax import selective_scan
from mamba_jax.scan.chunked import _rearrange, choose_blocks, times

SIZE = {"b": 2, "i": 1, "j": 3, "q": 2, "t": 4, "k": 1, "c": 5, "n": 1, "z": 0}


@pytest.mark.parametrize(
    ("before", "after", "axes"),
    [
        ("b qt ik jc", "bij q t kc", (0, 3, 5, 1, 2, 4, 6)),
        ("bij q t kc", "b qt ik jc", (0, 3, 4, 1, 5, 2, 6)),
        ("ik jc n", "ij n kc", (0, 2, 4, 1, 3)),
        ("z b", "b z", (1, 0)),
    ],
)
def test_rearrange_is_reshape_and_transpose(before, after, axes):
    shape = [math.prod(SIZE[name] for name in axis) for axis in before.split()]
    v = np.arange(math.prod(shape)).reshape(shape)
    split = v.reshape([SIZE[name] for name in before.replace(" ", "")])
    expected = split.transpose(axes).reshape([math.prod(SIZE[name] for name in axis) for axis in after.split()])
    np.testing.assert_array_equal(_rearrange(jnp.asarray(v), before, after, size=SIZE), expected)


def test_rearrange_repeats_along_new_axes():
    v = np.arange(2 * 8).reshape(2, 8)
    got = _rearrange(jnp.asarray(v), "b qt", "bij q t", size=SIZE)
    np.testing.assert_array_equal(got, np.repeat(v.reshape(2, 2, 4), 3, axis=0))


def test_times_serves_neighbours_from_one_group():
    m = jnp.arange(6).reshape(1, 6)  # one step of two states and three groups
    np.testing.assert_array_equal(times(m, jnp.ones((1, 1, 6), int), 2), [[[0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5]]])
    v = jnp.arange(12).reshape(1, 2, 6)
    np.testing.assert_array_equal(times(m, v, 2), [[[0, 0, 2, 3, 8, 10], [18, 21, 32, 36, 50, 55]]])
    np.testing.assert_array_equal(times(v, v, 2), v**2)


@pytest.mark.parametrize(
    ("d", "g", "groups", "channels"),
    [(1536, 1, 1, 128), (100, 1, 1, 100), (130, 1, 1, 72), (64, 8, 8, 8), (512, 16, 4, 32), (4, 4, 4, 1)],
)
def test_blocks_on_a_cpu(d, g, groups, channels):
    blocks = choose_blocks(d, g)
    assert (blocks.groups, blocks.channels, blocks.in_turn) == (groups, channels, True)


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("scan", ["sequential", "associative"])
def test_sequences_are_copied_into_blocks_once(scan, b):
    """u and delta go in, zeros for y are made, y comes out; odd layouts made XLA copy u and delta twice, or y too."""
    l, d, n = 128, 256, 4
    shapes = [(b, l, d), (b, l, d), (d, n), (b, l, n), (b, l, n)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program = jax.jit(lambda *a: selective_scan(*a, scan=scan)).lower(*arguments).compile().as_text()
    made = re.findall(r"= f32\[([\d,]+)\]\S* (?:fusion|copy|transpose)\(", program[program.index("ENTRY") :])
    sequences = [shape for shape in made if math.prod(map(int, shape.split(","))) == b * l * d]
    assert len(sequences) <= 4, sequences
