"""Cases, inputs and tolerances that the tests of every scan form share.

The grid is the test grid of `mamba_ssm`'s CUDA kernel, the part that is commented out there included: 13 lengths,
4 dtypes, every flag on and off, batch 2, dim 4, state 8. All settings of all flags would be 50,000 programs to compile,
so the default run takes every length with every dtype and lets the flags come from a covering array: all pairs occur.
Cases that differ only in flags with a neutral value (zeros for D, say) share a program; another test says that leaving
such an argument out is the same.
"""

import collections
import dataclasses
import functools
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from mamba_jax import selective_scan
from mamba_jax.reference.oracle import selective_scan_oracle, selective_scan_oracle_gradients

FORMS = ("sequential", "associative", "pallas")
XLA_FORMS = ("sequential", "associative")

LENGTHS = (8, 16, 32, 64, 128, 256, 372, 512, 784, 1024, 1134, 2048, 4096)
REAL_DTYPES = ("float32", "float16", "bfloat16")
STRUCTURE = ("varying_B", "varying_C", "grouped", "gate", "delta_softplus", "segment_ids")
NEUTRAL = ("skip", "delta_bias", "initial_state", "return_last_state")
FLAGS = STRUCTURE + NEUTRAL

# (rtol, atol) by the dtype of the result. float16 and bfloat16 are mamba_ssm's own, float32 is a tenth of them.
# Arithmetic is float32 whatever the inputs, so that a narrow dtype shows only where a result is rounded to it.
# float64 leaves room for 4096 roundings.
TOLERANCES = {
    "float64": (1e-10, 1e-10),
    "float32": (6e-5, 2e-4),
    "complex64": (6e-5, 2e-4),
    "complex128": (1e-10, 1e-10),
    "float16": (3e-3, 5e-3),
    "bfloat16": (3e-2, 5e-2),
}
# Factors on (rtol, atol) of gradients, none above mamba_ssm's own.
GRADIENT_FACTORS = {"u": (2, 2), "delta": (5, 10), "A": (1, 2.5)}
OTHER_GRADIENT_FACTORS = (1, 0.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of the scan: sizes, dtype of the sequences, beside float32 weights, and which options are on."""

    length: int
    dtype: str = "float32"
    batch: int = 2
    dim: int = 4
    state: int = 8
    groups: int = 2
    varying_B: bool = True
    varying_C: bool = True
    grouped: bool = False
    skip: bool = True
    gate: bool = True
    delta_bias: bool = True
    delta_softplus: bool = True
    initial_state: bool = True
    segment_ids: bool = False
    return_last_state: bool = True

    def __str__(self) -> str:
        flags = "".join("+" if getattr(self, name) else "-" for name in FLAGS)
        return f"l{self.length}_{self.dtype}_b{self.batch}_d{self.dim}_n{self.state}_g{self.groups}_{flags}"


@dataclasses.dataclass(frozen=True)
class Problem:
    """Arguments of one call and the cotangents of its results, in NumPy; `options` holds what has no gradient."""

    arguments: dict
    options: dict
    dy: np.ndarray
    dlast: np.ndarray

    def replace(self, **arguments) -> "Problem":
        return dataclasses.replace(self, arguments=self.arguments | arguments)


def make_problem(case: Case) -> Problem:
    """The case's inputs, drawn as mamba_ssm's tests draw them; the same ones every time."""
    rng = np.random.default_rng(zlib.crc32(str(case).encode()))
    b, l, d, n = case.batch, case.length, case.dim, case.state
    is_complex = case.dtype == "complex64"
    weight = "float64" if case.dtype == "float64" else "float32"
    sequence = jnp.dtype("float32" if is_complex else case.dtype)
    matrix = np.dtype("complex64") if is_complex else sequence

    def normal(*shape, dtype):
        value = rng.standard_normal(shape)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            value = value + 1j * rng.standard_normal(shape)
        return value.astype(dtype)

    def uniform(*shape, dtype=weight):
        value = rng.random(shape)
        return (value + 1j * rng.random(shape) if jnp.issubdtype(dtype, jnp.complexfloating) else value).astype(dtype)

    varying = (b, l, case.groups, n) if case.grouped else (b, l, n)
    constant = "complex64" if is_complex else weight
    arguments = {
        "u": normal(b, l, d, dtype=sequence),
        "delta": uniform(b, l, d, dtype=sequence) / sequence.type(2),
        "A": -uniform(d, n, dtype=constant) / 2,
        "B": normal(*varying, dtype=matrix) if case.varying_B else normal(d, n, dtype=constant),
        "C": normal(*varying, dtype=matrix) if case.varying_C else normal(d, n, dtype=constant),
    }
    if case.skip:
        arguments["D"] = normal(d, dtype=weight)
    if case.gate:
        arguments["z"] = normal(b, l, d, dtype=sequence)
    if case.delta_bias:
        arguments["delta_bias"] = uniform(d) / 2
    if case.initial_state:
        arguments["initial_state"] = normal(b, d, n, dtype=constant)
    options = {"delta_softplus": case.delta_softplus}
    if case.segment_ids:
        documents = np.cumsum(rng.random((b, l)) < 4 / max(l, 1), axis=1)
        options["segment_ids"] = (documents * 3) % 5 - 2  # neighbours differ; ids come again, and may be 0 or negative
    return Problem(arguments, options, normal(b, l, d, dtype=sequence), normal(b, d, n, dtype=constant))


def with_neutral_values(problem: Problem, case: Case) -> Problem:
    """The same problem with every flag of NEUTRAL on: what was off is given as zeros."""
    d, weight = problem.arguments["u"].shape[2], problem.dlast.real.dtype
    zeros = {"D": np.zeros(d, weight), "delta_bias": np.zeros(d, weight), "initial_state": np.zeros_like(problem.dlast)}
    dlast = problem.dlast if case.return_last_state else np.zeros_like(problem.dlast)
    return dataclasses.replace(problem, arguments=zeros | problem.arguments, dlast=dlast)


@functools.cache
def expected(case: Case):
    """The oracle's ((y, last state), gradients) for a case, computed once for all forms."""
    return oracle_of(make_problem(case))


def cast(problem: Problem, dtypes: dict) -> Problem:
    """The problem with some arguments, by name, in other dtypes; the cotangent of y follows u."""
    arguments = problem.arguments | {name: problem.arguments[name].astype(dtype) for name, dtype in dtypes.items()}
    return dataclasses.replace(problem, arguments=arguments, dy=problem.dy.astype(arguments["u"].dtype))


def oracle_of(problem: Problem):
    """The oracle's ((y, last state), gradients) for a problem."""
    results = selective_scan_oracle(**problem.arguments, **problem.options)
    gradients = selective_scan_oracle_gradients(
        **problem.arguments, **problem.options, dy=problem.dy, dlast=problem.dlast
    )
    return results, {name: gradients[name] for name in problem.arguments}


def run(problem: Problem, scan: str, optimise: bool = True):
    """((y, last state), gradients) of one form, all in one compiled program."""
    function = compiled_run(scan, problem.options["delta_softplus"], optimise)
    return function(problem.arguments, problem.options.get("segment_ids"), problem.dy, problem.dlast)


@functools.cache
def compiled_run(scan: str, delta_softplus: bool, optimise: bool):
    """One jitted function for each set of static options, so that problems of equal shapes share a program."""

    def results_and_gradients(arguments, segment_ids, dy, dlast):
        def call(arguments):
            return selective_scan(
                **arguments, delta_softplus=delta_softplus, segment_ids=segment_ids, return_last_state=True, scan=scan
            )

        results, pull_back = jax.vjp(call, arguments)
        return results, pull_back((dy, dlast))[0]

    # Without LLVM's optimisations a program compiles in half the time; other tests run the forms with them.
    return jax.jit(results_and_gradients, compiler_options=None if optimise else {"xla_backend_optimization_level": 0})


def check(problem: Problem, got, want) -> None:
    """Outputs, last state and every gradient against the oracle's, and each gradient's dtype against its argument's."""
    (y, last_state), gradients = got
    (y_want, last_state_want), gradients_want = want
    assert y.dtype == problem.arguments["u"].dtype
    assert_close("y", y, y_want, TOLERANCES[_name(y)])
    assert_close("last_state", last_state, last_state_want, TOLERANCES[_name(last_state)])
    assert gradients.keys() == gradients_want.keys()
    for name, want_value in gradients_want.items():
        assert gradients[name].dtype == problem.arguments[name].dtype, name
        assert_close(name, gradients[name], want_value, gradient_tolerance(name, problem))


def gradient_tolerance(name: str, problem: Problem) -> tuple[float, float]:
    """(rtol, atol) of one argument's gradient; a sum over time collects rounding errors like a random walk."""
    argument = problem.arguments[name]
    rtol, atol = TOLERANCES[_name(argument)]
    rtol_factor, atol_factor = GRADIENT_FACTORS.get(name, OTHER_GRADIENT_FACTORS)
    if argument.ndim <= 2:
        batch, length, _ = problem.arguments["u"].shape
        atol_factor *= max(1, batch * length / 128) ** 0.5
    return rtol * rtol_factor, atol * atol_factor


def assert_close(name: str, got, want, tolerance: tuple[float, float]) -> None:
    """|got - want| <= atol + rtol |want| everywhere, with NaN equal to nothing."""
    got = np.asarray(got)
    got = got.astype(np.complex128 if np.iscomplexobj(got) else np.float64)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, want {want.shape}"
    rtol, atol = tolerance
    excess = np.abs(got - want) / (atol + rtol * np.abs(want))
    worst = np.max(excess, initial=0.0)
    assert worst <= 1, f"{name}: error is {worst:.3g} times the tolerance (rtol {rtol:.1e}, atol {atol:.1e})"


def grid() -> list[Case]:
    """Every length with every real dtype three times, in one structure, and once with complex A; all pairs occur."""
    candidates = np.array([row for row in itertools.product((0, 1), repeat=len(FLAGS)) if _is_meaningful(row)])
    pairs = list(itertools.combinations(range(len(FLAGS)), 2))
    codes = np.stack([2 * candidates[:, i] + candidates[:, j] for i, j in pairs], axis=1)  # (candidates, pairs)
    flag_columns, pair_columns = np.arange(len(FLAGS)), np.arange(len(pairs))
    flags_seen = collections.defaultdict(lambda: np.zeros((len(FLAGS), 2)))  # by length, and by length and dtype
    pairs_seen = collections.defaultdict(lambda: np.zeros((len(pairs), 4)))  # by dtype
    cases = []
    for length, dtype in itertools.product(LENGTHS, (*REAL_DTYPES, "complex64")):
        allowed = np.ones(len(candidates), bool)
        for _ in range(3 if dtype in REAL_DTYPES else 1):
            gain = (0.5 ** pairs_seen[dtype][pair_columns, codes]).sum(1)
            gain += (0.1 ** flags_seen[length, dtype][flag_columns, candidates]).sum(1)
            gain += 2 * (0.1 ** flags_seen[length, dtype in REAL_DTYPES][flag_columns, candidates]).sum(1)
            best = int(np.argmax(np.where(allowed, gain, -1)))
            pairs_seen[dtype][pair_columns, codes[best]] += 1
            for key in ((length, dtype), (length, dtype in REAL_DTYPES)):
                flags_seen[key][flag_columns, candidates[best]] += 1
            structure = candidates[best, : len(STRUCTURE)]
            allowed &= (candidates[:, : len(STRUCTURE)] == structure).all(1)
            cases.append(Case(length=length, dtype=dtype, **{k: bool(v) for k, v in zip(FLAGS, candidates[best])}))
    return cases


def flag_settings() -> list[dict[str, bool]]:
    """All settings of the flags that differ in what they mean."""
    return [
        {name: bool(on) for name, on in zip(FLAGS, row)}
        for row in itertools.product((0, 1), repeat=len(FLAGS))
        if _is_meaningful(row)
    ]


def _is_meaningful(row) -> bool:
    """Groups mean nothing where neither B nor C varies."""
    flags = dict(zip(FLAGS, row))
    return bool(flags["varying_B"] or flags["varying_C"] or not flags["grouped"])


def _name(array) -> str:
    return jnp.dtype(array.dtype).name
