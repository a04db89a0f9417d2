"""Every scan form on four virtual CPU devices: the values of one device, no all-gather in the program (jax 19748)."""

import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mamba_jax import selective_scan

every_form = pytest.mark.parametrize("scan", cases.FORMS)

BY_BATCH = {"A": P(), "D": P(), "delta_bias": P()}  # and all else along b
LAYOUTS = {
    "batch": ((4,), ("data",), BY_BATCH, P("data")),
    "channels": (
        (4,),
        ("model",),
        {
            "B": P(),
            "C": P(),
            "A": P("model"),
            "D": P("model"),
            "delta_bias": P("model"),
            "initial_state": P(None, "model"),
        },
        P(None, None, "model"),
    ),
    "batch and channels": (
        (2, 2),
        ("data", "model"),
        {
            "B": P("data"),
            "C": P("data"),
            "A": P("model"),
            "D": P("model"),
            "delta_bias": P("model"),
            "initial_state": P("data", "model"),
        },
        P("data", None, "model"),
    ),
}


@pytest.fixture(params=LAYOUTS)
def layout(request):
    """(mesh sizes, mesh names, specs by argument, spec of the sequences) of one way to shard."""
    return LAYOUTS[request.param]


def make_mesh(sizes, names, axis_type):
    return jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(names), devices=jax.devices("cpu")[:4])


def specs_of(problem, specs, sequence_spec):
    return {name: specs.get(name, sequence_spec) for name in problem.arguments}


def cotangent_specs(specs):
    """Specs of y and of the last state: those of u and of the initial state."""
    return specs["u"], specs["initial_state"]


def place(tree, mesh, specs):
    return jax.tree.map(lambda value, spec: jax.device_put(value, NamedSharding(mesh, spec)), tree, specs)


def results_and_gradients(call):
    def function(arguments, cotangents):
        results, pull_back = jax.vjp(call, arguments)
        return results, pull_back(cotangents)[0]

    return jax.jit(function)


def check_sharded(problem, mesh, specs, call):
    """Values and gradients equal the oracle's, y stays where u is, and nothing is gathered."""
    arguments = place(problem.arguments, mesh, specs)
    cotangents = place((problem.dy, problem.dlast), mesh, cotangent_specs(specs))
    compiled = results_and_gradients(call).lower(arguments, cotangents).compile()
    assert "all-gather" not in compiled.as_text()
    got = compiled(arguments, cotangents)
    assert got[0][0].sharding.is_equivalent_to(arguments["u"].sharding, 3)
    cases.check(problem, got, cases.oracle_of(problem))


@every_form
@pytest.mark.parametrize("ambient", [True, False])
def test_explicit_mesh(scan, layout, ambient):
    """`selective_scan` reads the sharding from its arguments' types, whether or not the mesh is also set."""
    sizes, names, specs, sequence_spec = layout
    problem = cases.make_problem(cases.Case(length=20, batch=4, dim=8))
    mesh = make_mesh(sizes, names, AxisType.Explicit)

    def call(arguments):
        return selective_scan(**arguments, **problem.options, return_last_state=True, scan=scan)

    specs = specs_of(problem, specs, sequence_spec)
    if ambient:
        with jax.set_mesh(mesh):
            check_sharded(problem, mesh, specs, call)
    else:
        check_sharded(problem, mesh, specs, call)


@every_form
def test_explicit_mesh_with_groups_documents_and_bfloat16(scan):
    problem = cases.make_problem(
        cases.Case(length=20, batch=4, dim=6, dtype="bfloat16", grouped=True, segment_ids=True)
    )
    sizes, names, specs, sequence_spec = LAYOUTS["batch"]
    mesh = make_mesh(sizes, names, AxisType.Explicit)
    segment_ids = jax.device_put(problem.options["segment_ids"], NamedSharding(mesh, P("data")))

    def call(arguments):
        return selective_scan(
            **arguments, delta_softplus=True, segment_ids=segment_ids, return_last_state=True, scan=scan
        )

    with jax.set_mesh(mesh):
        check_sharded(problem, mesh, specs_of(problem, specs, sequence_spec), call)


@every_form
def test_explicit_mesh_with_only_the_needed_arguments(scan):
    """Defaults are made in the right places; a constant B is sharded with the channels."""
    case = cases.Case(length=20, batch=4, dim=8, varying_B=False, skip=False, gate=False, delta_bias=False)
    problem = cases.make_problem(case)
    mesh = make_mesh((2, 2), ("data", "model"), AxisType.Explicit)
    u = jax.device_put(problem.arguments["u"], NamedSharding(mesh, P("data", None, "model")))
    delta = jax.device_put(problem.arguments["delta"], NamedSharding(mesh, P("data", None, "model")))
    A, B = (jax.device_put(problem.arguments[name], NamedSharding(mesh, P("model"))) for name in "AB")
    C = jax.device_put(problem.arguments["C"], NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda *a: selective_scan(*a, delta_softplus=True, scan=scan))(u, delta, A, B, C)
    del problem.arguments["initial_state"]
    (y_want, _), _ = cases.oracle_of(problem)
    cases.assert_close("y", y, y_want, cases.TOLERANCES["float32"])


@every_form
@pytest.mark.parametrize("varying_B", [True, False])
def test_narrow_gradients_are_summed_wide_over_devices(scan, varying_B):
    """B and C that devices share, along the channels or, if constant, along the batch."""
    problem = cases.make_problem(cases.Case(length=20, batch=4, dim=8, dtype="bfloat16", varying_B=varying_B))
    mesh = make_mesh((2, 2), ("data", "model"), AxisType.Explicit)
    specs = LAYOUTS["batch and channels"][2] | ({} if varying_B else {"B": P("model")})
    arguments = place(problem.arguments, mesh, specs_of(problem, specs, P("data", None, "model")))

    def loss(arguments):
        return jnp.sum(selective_scan(**arguments, **problem.options, scan=scan).astype(jnp.float32))

    with jax.set_mesh(mesh):
        program = str(jax.make_jaxpr(jax.grad(loss))(arguments))
    sums = re.findall(r":(\w+)\[[^\n=]*= psum", program)
    assert sums
    assert set(sums) == {"f32"}


@pytest.mark.parametrize("scan", ["sequential", "associative"])
def test_devices_meet_once(scan):
    """The parts of shared gradients are added up after the scan, not at each of its steps."""
    problem = cases.make_problem(cases.Case(length=20, batch=4, dim=8))
    mesh = make_mesh((2, 2), ("data", "model"), AxisType.Explicit)
    arguments = place(
        problem.arguments, mesh, specs_of(problem, LAYOUTS["batch and channels"][2], P("data", None, "model"))
    )

    def loss(arguments):
        return jnp.sum(selective_scan(**arguments, **problem.options, scan=scan))

    def primitives(jaxpr, in_a_loop=False):
        """(name, whether it is in a loop) of every operation."""
        for equation in jaxpr.eqns:
            yield equation.primitive.name, in_a_loop
            for inner in jaxprs_in_params(equation.params):
                yield from primitives(inner, in_a_loop or equation.primitive.name in ("scan", "while"))

    with jax.set_mesh(mesh):
        found = list(primitives(jax.make_jaxpr(jax.grad(loss))(arguments).jaxpr))
    meetings = [in_a_loop for name, in_a_loop in found if name.startswith("psum")]
    assert meetings
    assert not any(meetings)


@every_form
@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto])
def test_shard_map(scan, layout, axis_type):
    """Inside `shard_map` the call sees one shard; `check_vma` holds for the XLA forms, and kernels cannot have it."""
    sizes, names, specs, sequence_spec = layout
    problem = cases.make_problem(cases.Case(length=20, batch=4, dim=8))
    mesh = make_mesh(sizes, names, axis_type)
    specs = specs_of(problem, specs, sequence_spec)

    def on_a_shard(arguments):
        return selective_scan(**arguments, **problem.options, return_last_state=True, scan=scan)

    call = jax.shard_map(
        on_a_shard, mesh=mesh, in_specs=(specs,), out_specs=cotangent_specs(specs), check_vma=scan != "pallas"
    )
    check_sharded(problem, mesh, specs, call)


@every_form
def test_four_devices_give_the_bits_of_one(scan):
    """A batch-sharded forward pass does the same operations in the same order.

    Two rows a device: XLA inlines a loop over a single row, and may then contract other multiplications and additions.
    """
    problem = cases.make_problem(cases.Case(length=70, batch=8, dim=8))
    mesh = make_mesh((4,), ("data",), AxisType.Explicit)
    specs = specs_of(problem, BY_BATCH, P("data"))

    def call(arguments):
        return selective_scan(**arguments, **problem.options, return_last_state=True, scan=scan)

    one = jax.jit(call)(jax.tree.map(jnp.asarray, problem.arguments))
    with jax.set_mesh(mesh):
        four = jax.jit(call)(place(problem.arguments, mesh, specs))
    for got, want in zip(four, one):
        np.testing.assert_array_equal(got, want)
