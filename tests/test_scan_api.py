"""What `selective_scan` refuses, in messages that name the argument, and what it says when it runs."""

import subprocess
import sys

import cases
import numpy as np
import pytest

from mamba_jax import selective_scan

B, L, D, N = 2, 5, 6, 3


def arguments_of(**changes):
    """The arguments of a right call, some of them changed."""
    problem = cases.make_problem(cases.Case(length=L, batch=B, dim=D, state=N))
    return problem.arguments | {"segment_ids": np.zeros((B, L), "int32")} | changes


def test_unchanged_arguments_are_right():
    assert selective_scan(**arguments_of()).shape == (B, L, D)


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        ("u", (L, D), "b, l, d"),
        ("delta", (B, L, D + 1), f"{B}, {L}, {D}"),
        ("A", (N, D), "d, n"),
        ("A", (D,), "d, n"),
        ("B", (B, L + 1, N), "b, l, n"),
        ("B", (B, L, N, 1), "b, l, g, n"),
        ("B", (N, D), "d, n"),
        ("C", (B, L, 4, N), "divides"),
        ("C", (B, N, L), "b, l, n"),
        ("C", (N,), "b, l, n"),
        ("D", (1,), f"{D},"),
        ("z", (B, 1, D), f"{B}, {L}, {D}"),
        ("delta_bias", (D, 1), f"{D},"),
        ("initial_state", (B, N, D), f"{B}, {D}, {N}"),
        ("segment_ids", (L,), f"{B}, {L}"),
    ],
)
def test_wrong_shapes(name, shape, wanted):
    """The message gives the argument in backticks, what it got and what it wanted."""
    dtype = "int32" if name == "segment_ids" else "float32"
    with pytest.raises(ValueError, match=f"`{name}`") as error:
        selective_scan(**arguments_of(**{name: np.zeros(shape, dtype)}))
    assert wanted in str(error.value)
    assert str(shape) in str(error.value) or wanted == "divides"


@pytest.mark.parametrize("name", ["u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state"])
@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_wrong_dtypes(name, dtype):
    with pytest.raises(ValueError, match=rf"`{name}`.*{dtype}"):
        selective_scan(**arguments_of(**{name: np.zeros_like(arguments_of()[name], dtype)}))


@pytest.mark.parametrize("name", ["u", "delta", "B", "C", "D", "z", "delta_bias", "initial_state"])
def test_complex_needs_complex_A(name):
    with pytest.raises(ValueError, match=rf"`{name}`.*complex64"):
        selective_scan(**arguments_of(**{name: arguments_of()[name].astype("complex64")}))


def test_segment_ids_are_integers():
    with pytest.raises(ValueError, match=r"`segment_ids`.*float32"):
        selective_scan(**arguments_of(segment_ids=np.zeros((B, L), "float32")))


def test_unknown_form():
    with pytest.raises(ValueError, match=r"`scan`.*'quick'.*sequential.*associative.*pallas"):
        selective_scan(**arguments_of(), scan="quick")


def test_pallas_refuses_complex_and_names_the_forms_that_do_not():
    complex_A = arguments_of()["A"].astype("complex64")
    with pytest.raises(NotImplementedError, match=r"complex.*sequential.*associative"):
        selective_scan(**arguments_of(A=complex_A), scan="pallas")


def run_python(code):
    """Standard error of a fresh process on a CPU, where nothing has been said yet."""
    prelude = "import logging; logging.basicConfig(level=logging.INFO, format='SAID %(name)s %(message)s')\n"
    prelude += "import jax; jax.config.update('jax_platforms', 'cpu'); import jax.numpy as jnp\n"
    prelude += "from mamba_jax import selective_scan; x = jnp.ones((1, 4, 8)); A = -jnp.ones((8, 2)); B = x[..., :2]\n"
    done = subprocess.run([sys.executable, "-c", prelude + code], capture_output=True, text=True, check=True)
    return [line for line in done.stderr.splitlines() if line.startswith(("SAID mamba_jax", "SAID pallas_kernels"))]


def test_interpreter_is_announced_once():
    said = run_python(
        "for l in (4, 3, 4): jax.jit(lambda x, B: selective_scan(x, x, A, B, B, scan='pallas'))(x[:, :l], B[:, :l])"
    )
    assert len(said) == 1
    assert "interpreter" in said[0]


def test_other_forms_say_nothing_on_a_cpu():
    assert run_python("for f in ('auto', 'sequential', 'associative'): selective_scan(x, x, A, B, B, scan=f)") == []
