import math
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case

from mamba_jax import selective_scan
from mamba_jax.scan import associative, chunked, sequential
from mamba_jax.scan.chunked import _rearrange, choose_blocks

SIZE = {"b": 2, "i": 1, "j": 3, "q": 2, "t": 4, "k": 1, "c": 5, "n": 1, "z": 0}

# Of several chunks and a rest: one block and several, groups, constant matrices, documents, complex numbers.
ELSEWHERE = [
    Case(length=150, dim=5, segment_ids=True),
    Case(length=150, dim=200, varying_C=False, delta_softplus=False),
    Case(length=150, dim=8, groups=2, grouped=True, dtype="bfloat16", initial_state=False),
    Case(length=150, dim=6, dtype="complex64", gate=False),
    Case(length=7, varying_B=False, skip=False, delta_bias=False),
]


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


@pytest.mark.parametrize(
    ("d", "g", "groups", "channels"),
    [(1536, 1, 1, 128), (100, 1, 1, 100), (130, 1, 1, 72), (64, 8, 8, 8), (512, 16, 4, 32), (4, 4, 4, 1)],
)
def test_blocks_on_a_cpu(d, g, groups, channels):
    blocks = choose_blocks(d, g)
    assert (blocks.groups, blocks.channels, blocks.in_turn) == (groups, channels, True)


@pytest.mark.parametrize("case", ELSEWHERE, ids=str)
@pytest.mark.parametrize("scan", ["sequential", "associative"])
def test_as_traced_for_other_devices(scan, case, monkeypatch):
    """Blocks at once and a step an element, as a TPU or an old GPU has them, run here."""
    for module in (associative, chunked):
        monkeypatch.setattr(module, "target_platform", lambda: "tpu")
    problem = cases.make_problem(case)
    function = cases.compiled_run.__wrapped__(scan, case.delta_softplus, optimise=False)  # none made for a CPU
    got = function(problem.arguments, problem.options.get("segment_ids"), problem.dy, problem.dlast)
    cases.check(problem, got, cases.expected(case))


@pytest.mark.parametrize("groups", [(), (2,)])
@pytest.mark.parametrize("t", [1, 2, 3, 4, 5, 7, 8, 13, 64])
def test_segments_are_steps_taken_together(t, groups):
    """A chunk in segments is the chunk step by step, whatever its length."""
    rng = np.random.default_rng(t)
    c, n = 3, 2
    wide, narrow = (*groups, c), (*groups, 1)
    h, A = rng.standard_normal((n, *wide)), -rng.random((n, *wide))
    Delta, drive = rng.random((2, t, 1, *wide))
    B, C = rng.standard_normal((t, n, *narrow)), rng.standard_normal((1, n, *wide))
    reset = rng.random(t) < 0.2
    arguments = [jnp.asarray(v, jnp.float32) for v in (h, Delta, drive, A, B, C)]
    y, last = associative.advance_segments(*arguments, jnp.asarray(reset))
    y_want, last_want = associative.advance(*arguments, jnp.asarray(reset))
    np.testing.assert_allclose(y, y_want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(last, last_want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("scan", ["sequential", "associative"])
def test_no_sequence_is_copied(scan, b):
    """Chunks are cut from the inputs and results written where they belong: what is made beside y is small."""
    l, d, n = 4096, 256, 4
    shapes = [(b, l, d), (b, l, d), (d, n), (b, l, n), (b, l, n)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(lambda *a: selective_scan(*a, scan=scan)).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < b * l * d  # a quarter of u
    program = compiled.as_text()
    made = re.findall(r"= f32\[([\d,]+)\]\S* (?:fusion|copy|transpose)\(", program[program.index("ENTRY") :])
    sequences = [shape for shape in made if math.prod(map(int, shape.split(","))) == b * l * d]
    assert len(sequences) <= 1, sequences  # the zeros that y is written over


@pytest.mark.parametrize("scan", ["sequential", "associative"])
def test_a_gradient_keeps_one_state_a_chunk(scan):
    """Temporaries of the gradient grow with the length by the kept states, n / chunk of u's size, and little more."""
    d, n = 256, 4

    def temporaries(l: int) -> int:
        shapes = [(2, l, d), (2, l, d), (d, n), (2, l, n), (2, l, n)]
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        gradient = jax.grad(lambda *a: selective_scan(*a, scan=scan).sum(), argnums=range(5))
        return jax.jit(gradient).lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    more = temporaries(4096) - temporaries(2048)
    kept = 2 * 2048 * d * n * 4 // {"sequential": sequential.CHUNK, "associative": associative.CHUNK}[scan]
    assert more < 2 * kept, more / kept
