"""`sequence_parallel_scan`: a length split over 2, 4 and 8 virtual CPU devices, against the oracle of the whole."""

import dataclasses
import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mamba_jax import selective_scan, sequence_parallel_scan
from mamba_jax.scan.sequence import state_before

every_form = pytest.mark.parametrize("scan", cases.FORMS)


def make_mesh(parts, rows=1):
    return jax.make_mesh(
        (rows, parts), ("rows", "seq"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[: rows * parts]
    )


def specs_of(problem):
    """Rows over "rows", and the length over "seq" in whatever has one."""
    length = problem.arguments["u"].shape[1]
    specs = {}
    for name, value in problem.arguments.items():
        has_length = value.ndim >= 3 and value.shape[1] == length and name != "initial_state"
        specs[name] = P("rows", "seq") if has_length else P("rows") if name == "initial_state" else P()
    return specs


def run(problem, scan, mesh):
    """((y, last state), gradients), as `cases.run` has them, over the mesh."""
    segment_ids = problem.options.get("segment_ids")
    ids_spec = None if segment_ids is None else P("rows", "seq")

    def on_a_part(arguments, segment_ids):
        return sequence_parallel_scan(
            **arguments,
            axis_name="seq",
            delta_softplus=problem.options["delta_softplus"],
            segment_ids=segment_ids,
            return_last_state=True,
            scan=scan,
        )

    parts = jax.shard_map(
        on_a_part,
        mesh=mesh,
        in_specs=(specs_of(problem), ids_spec),
        out_specs=(P("rows", "seq"), P("rows")),
        check_vma=scan in cases.XLA_FORMS,
    )

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def results_and_gradients(arguments, segment_ids, dy, dlast):
        results, pull_back = jax.vjp(lambda arguments: parts(arguments, segment_ids), arguments)
        return results, pull_back((dy, dlast))[0]

    return results_and_gradients(problem.arguments, segment_ids, problem.dy, problem.dlast)


@every_form
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_parts_are_the_whole(scan, parts):
    case = cases.Case(length=48, segment_ids=parts == 4, grouped=parts == 8, varying_B=parts != 2)
    cases.check(cases.make_problem(case), run(cases.make_problem(case), scan, make_mesh(parts)), cases.expected(case))


@every_form
def test_rows_and_length_split_in_bfloat16_with_the_least_arguments(scan):
    case = cases.Case(
        length=32, batch=2, dtype="bfloat16", skip=False, gate=False, delta_bias=False, initial_state=False,
        delta_softplus=False,
    )  # fmt: skip
    problem = cases.make_problem(case)
    cases.check(problem, run(problem, scan, make_mesh(2, rows=2)), cases.expected(case))


def test_complex_states():
    case = cases.Case(length=24, dtype="complex64", segment_ids=True)
    problem = cases.make_problem(case)
    cases.check(problem, run(problem, "sequential", make_mesh(4)), cases.expected(case))


def test_documents_that_end_at_a_border_or_run_over_several():
    """A document may begin exactly where a part does, and one may cover whole parts."""
    problem = cases.make_problem(cases.Case(length=16))
    segment_ids = np.array([[7] * 4 + [5] * 12, [1] * 3 + [2] * 9 + [1] * 4])
    problem = dataclasses.replace(problem, options=problem.options | {"segment_ids": segment_ids})
    cases.check(problem, run(problem, "associative", make_mesh(4)), cases.oracle_of(problem))


def test_strong_decay_underflows_and_stays_finite():
    """A part's decay is exactly zero here: whatever divided by it would be infinite."""
    problem = cases.make_problem(cases.Case(length=32))
    problem = problem.replace(A=problem.arguments["A"] * np.float32(400))
    got = run(problem, "sequential", make_mesh(4))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))
    cases.check(problem, got, cases.oracle_of(problem))


def test_states_of_the_devices_before():
    """h_before[k] = decay[k-1] h_before[k-1] + state[k-1], for eight parts."""
    rng = np.random.default_rng(0)
    decay, state = rng.random((2, 8, 1, 3, 2)).astype(np.float32)
    combined = jax.shard_map(
        lambda decay, state: state_before(decay[0], state[0], "seq")[None],
        mesh=make_mesh(8), in_specs=P("seq"), out_specs=P("seq"),
    )  # fmt: skip
    expected = np.zeros_like(state)
    for k in range(1, 8):
        expected[k] = decay[k - 1] * expected[k - 1] + state[k - 1]
    np.testing.assert_allclose(jax.jit(combined)(decay, state), expected, rtol=1e-5, atol=1e-6)


def test_only_states_pass_between_devices():
    """No gathering, and temporaries that fall with the number of parts."""
    problem = cases.make_problem(cases.Case(length=16384, batch=1, dim=128))
    names = ("u", "delta", "A", "B", "C")
    arguments = {name: jnp.asarray(problem.arguments[name]) for name in names}
    specs = specs_of(problem)

    def compiled(parts):
        if parts == 1:

            def call(arguments):
                return selective_scan(**arguments, scan="sequential")
        else:
            call = jax.shard_map(
                lambda arguments: sequence_parallel_scan(**arguments, axis_name="seq", scan="sequential"),
                mesh=make_mesh(parts), in_specs=({name: specs[name] for name in names},), out_specs=P("rows", "seq"),
            )  # fmt: skip
        gradient = jax.grad(lambda arguments: jnp.sum(call(arguments) ** 2))
        mesh = make_mesh(parts)
        placed = {name: jax.device_put(v, jax.NamedSharding(mesh, specs[name])) for name, v in arguments.items()}
        return jax.jit(gradient).lower(placed).compile()

    one, eight = compiled(1), compiled(8)
    assert "all-gather" not in eight.as_text()
    assert "all-to-all" not in eight.as_text()
    assert eight.memory_analysis().temp_size_in_bytes < one.memory_analysis().temp_size_in_bytes / 2


def test_empty_parts_and_mistakes():
    mesh = make_mesh(2)
    problem = cases.make_problem(cases.Case(length=8))
    u, delta, A, B, C = (jnp.asarray(problem.arguments[name]) for name in ("u", "delta", "A", "B", "C"))

    def scan(*arguments):
        whole = P(None, "seq")
        return jax.shard_map(
            functools.partial(sequence_parallel_scan, axis_name="seq", return_last_state=True, scan="sequential"),
            mesh=mesh, in_specs=(whole, whole, P(), whole, whole), out_specs=(whole, P()),
        )(*arguments)  # fmt: skip

    y, last_state = scan(u[:, :0], delta[:, :0], A, B[:, :0], C[:, :0])
    assert y.shape == (2, 0, 4)
    np.testing.assert_array_equal(last_state, 0)
    with pytest.raises(ValueError, match="`B` has shape"):
        scan(u, delta, A, B[..., :3], C)
