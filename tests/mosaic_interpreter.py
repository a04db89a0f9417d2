"""Runs of the Mosaic kernels in their interpreter, which looks for races, against the float64 oracle."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from mamba_jax.reference.oracle import selective_scan_oracle, selective_scan_oracle_gradients
from pallas_kernels import mosaic, state_groups
from pallas_kernels.arguments import Arguments
from pallas_kernels.tiling import MosaicTiling, Pieces

# Largest difference, relative to the largest entry, by the dtype of the result. A result in float32 of narrow inputs
# carries the error of the short polynomial that softplus of a narrow delta takes.
TOLERANCES = {"float32": 1e-5, "bfloat16": 8e-3, "float16": 1e-3}
NARROW_INPUTS = 5e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes, dtypes and options of a scan; `pieces` is how many the length is split into."""

    l: int
    d: int
    n: int
    b: int = 1
    g: int = 1
    dtypes: tuple[str, str, str, str] = ("float32",) * 4  # of u, delta, z, B and C
    constant_B: bool = False
    constant_C: bool = False
    gate: bool = True
    softplus: bool = True
    reset: bool = False
    padded: int = 0  # last steps with delta = -1e4
    pieces: int = 1
    backward_stages: int = 2

    @property
    def tiling(self) -> MosaicTiling:
        """Tiles as on a GPU, cut by hand."""
        tiles = -(-self.l // 16)
        steps = -(-tiles // self.pieces) * 16
        pieces = Pieces(1, self.l) if self.pieces == 1 else Pieces(-(-self.l // steps), steps)
        return MosaicTiling(16, 3, self.backward_stages, pieces, pieces)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The arguments of a case, for the kernels and for the oracle, and the cotangents."""

    arguments: Arguments
    oracle: dict
    dy: jax.Array
    dlast: jax.Array


def make(case: Case) -> Problem:
    """Random arguments, the same ones every time."""
    rng = np.random.default_rng(case.l * 1000 + case.d + case.n)

    def normal(*shape, dtype="float32"):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype)

    b, l, d, n = case.b, case.l, case.d, case.n
    u_dtype, delta_dtype, z_dtype, projection = case.dtypes
    delta = normal(b, l, d) - 2 if case.softplus else 0.3 * jnp.abs(normal(b, l, d))
    if case.padded:
        delta = delta.at[:, l - case.padded :].set(-1e4)
    B = normal(1, 1, d, n, dtype=projection) if case.constant_B else normal(b, l, case.g, n, dtype=projection)
    C = normal(1, 1, d, n, dtype=projection) if case.constant_C else normal(b, l, case.g, n, dtype=projection)
    documents = np.cumsum(rng.random((b, l)) < 0.15, axis=1)
    reset = np.concatenate([np.zeros((b, 1), bool), documents[:, 1:] != documents[:, :-1]], axis=1)
    arguments = Arguments(
        u=normal(b, l, d, dtype=u_dtype),
        delta=delta.astype(delta_dtype),
        A=-jnp.exp(normal(d, n)),
        B=B,
        C=C,
        D=normal(d),
        z=normal(b, l, d, dtype=z_dtype) if case.gate else None,
        delta_bias=0.1 * normal(d),
        initial_state=normal(b, d, n),
        reset=jnp.asarray(reset) if case.reset else None,
    )
    oracle = {name: value for name, value in arguments._asdict().items() if name != "reset" and value is not None}
    oracle = {name: np.asarray(value.astype(jnp.float32)) for name, value in oracle.items()}
    for name, is_constant in (("B", case.constant_B), ("C", case.constant_C)):
        oracle[name] = oracle[name][0, 0] if is_constant else oracle[name]
    oracle |= {"delta_softplus": case.softplus, "segment_ids": documents if case.reset else None}
    return Problem(arguments, oracle, normal(b, l, d, dtype=u_dtype), normal(b, d, n))


def run_forward(case: Case, problem: Problem):
    """y, the last state and the kept states."""

    def run(arguments):
        return state_groups.forward(mosaic, arguments, case.tiling, delta_softplus=case.softplus, keep_states=True)

    with interpreted():
        return jax.block_until_ready(jax.jit(run)(problem.arguments))


def run_backward(case: Case, problem: Problem, kept: jax.Array) -> Arguments:
    """Every gradient."""

    def run(arguments, kept, dy, dlast):
        return state_groups.backward(mosaic, arguments, kept, dy, dlast, case.tiling, delta_softplus=case.softplus)

    with interpreted():
        return jax.block_until_ready(jax.jit(run)(problem.arguments, kept, problem.dy, problem.dlast))


def oracle_forward(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """y and the last state, in float64."""
    return selective_scan_oracle(**problem.oracle)


def oracle_backward(problem: Problem) -> dict[str, np.ndarray]:
    """Every gradient by name, in float64."""
    dy, dlast = np.asarray(problem.dy.astype(jnp.float32)), np.asarray(problem.dlast)
    return selective_scan_oracle_gradients(**problem.oracle, dy=dy, dlast=dlast)


def oracle_kept(case: Case, problem: Problem) -> jax.Array:
    """The state before each tile, (b, tiles, n, d), as the forward kernel would keep it."""
    sequences = ("u", "delta", "z", "B", "C", "segment_ids")

    def cut(name, value, end):
        varies = (name in sequences and value is not None and np.ndim(value) > 2) or name == "segment_ids"
        return value[:, :end] if varies and value is not None else value

    def state_after(end):
        return selective_scan_oracle(**{name: cut(name, value, end) for name, value in problem.oracle.items()})[1]

    states = [np.asarray(problem.arguments.initial_state), *map(state_after, range(16, case.l, 16))]
    return jnp.asarray(np.swapaxes(np.stack(states, axis=1), 2, 3), jnp.float32)


@contextlib.contextmanager
def interpreted():
    """Kernels traced within run in the interpreter, and a race ends the test.

    Copies share the clocks of a few threads in turn; with 64 of them a missing wait for a copy out is seen too.
    """
    interpreter.reset_gpu_interpret_mode_state()
    parameters = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)
    try:
        with plgpu.force_gpu_interpret_mode(parameters):
            yield
        assert not interpreter.get_races().races_found
    finally:
        interpreter.reset_gpu_interpret_mode_state()


def assert_close(name: str, got: jax.Array, want: np.ndarray, case: Case) -> None:
    """The largest difference is small beside the largest entry."""
    dtype = jnp.dtype(got.dtype).name
    tolerance = TOLERANCES[dtype]
    if dtype == "float32" and case.dtypes != ("float32",) * 4:
        tolerance = NARROW_INPUTS
    got = np.asarray(got.astype(jnp.float32), np.float64).reshape(want.shape)
    error = np.max(np.abs(got - want)) / np.max(np.abs(want))
    assert error <= tolerance, f"{name}: {error:.2e}"
