"""`python -m mamba_jax.bench --parity`: how far each form is from the float64 oracle and from PyTorch.

What a person checks before one form replaces another.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from mamba_jax import selective_scan
from mamba_jax.bench.problem import TOLERANCES, relative_error
from mamba_jax.bench.report import Screen
from mamba_jax.bench.settings import DTYPES, Settings
from mamba_jax.reference.oracle import selective_scan_oracle, selective_scan_oracle_gradients
from mamba_jax.scan.api import Scan

FORMS: tuple[Scan, ...] = ("sequential", "associative", "pallas")
PYTORCH = "PyTorch loop"
BATCH, LENGTH, CHANNELS, STATE = 2, 300, 192, 16
"""No multiple of any chunk or block, and two blocks of channels; the oracle takes a second at this size."""

Results = dict[str, np.ndarray]
"""y, last_state, and the gradient of each argument under its name with a d in front."""


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Every argument of the scan, in NumPy, and the cotangents of its two results."""

    arguments: dict[str, np.ndarray]
    dy: np.ndarray
    dlast: np.ndarray


def make_inputs(dtype: str, seed: int) -> Inputs:
    """Sequences in `dtype`, weights and states in float32: skip, gate, bias, softplus and initial state are all on."""
    rng = np.random.default_rng(seed)
    b, l, d, n = BATCH, LENGTH, CHANNELS, STATE

    def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(jnp.dtype(dtype))

    arguments = {
        "u": normal(b, l, d, dtype=dtype), "delta": normal(b, l, d, dtype=dtype),
        "A": -np.exp(0.5 * normal(d, n)), "B": normal(b, l, n, dtype=dtype), "C": normal(b, l, n, dtype=dtype),
        "D": normal(d), "z": normal(b, l, d, dtype=dtype), "delta_bias": normal(d) - 2,
        "initial_state": normal(b, d, n),
    }  # fmt: skip
    return Inputs(arguments, normal(b, l, d, dtype=dtype), normal(b, d, n))


def oracle(inputs: Inputs) -> Results:
    """The float64 oracle's results."""
    y, last_state = selective_scan_oracle(**inputs.arguments, delta_softplus=True)
    gradients = selective_scan_oracle_gradients(
        **inputs.arguments, delta_softplus=True, dy=inputs.dy, dlast=inputs.dlast
    )
    return {"y": y, "last_state": last_state} | {f"d{name}": gradients[name] for name in inputs.arguments}


def of_form(scan: Scan, inputs: Inputs) -> Results:
    """The results of one of our forms."""

    @jax.jit
    def run(arguments: dict[str, jax.Array], dy: jax.Array, dlast: jax.Array) -> Any:
        call = functools.partial(selective_scan, delta_softplus=True, return_last_state=True, scan=scan)
        results, pull_back = jax.vjp(lambda a: call(**a), arguments)
        return results, pull_back((dy, dlast))[0]

    (y, last_state), gradients = run(inputs.arguments, inputs.dy, inputs.dlast)
    results = {"y": y, "last_state": last_state} | {f"d{name}": gradients[name] for name in gradients}
    return {name: np.asarray(value).astype(np.float64) for name, value in results.items()}


def of_pytorch(inputs: Inputs) -> Results:
    """The results of the PyTorch loop as mamba-minimal runs it."""
    import torch

    from mamba_jax.reference.torch_forms import selective_scan_loop

    def tensor(value: np.ndarray) -> Any:
        return torch.from_numpy(value.astype(np.float32)).to(getattr(torch, value.dtype.name))

    arguments = {name: tensor(value).requires_grad_() for name, value in inputs.arguments.items()}
    y, last_state = selective_scan_loop(**arguments, delta_softplus=True)
    gradients = torch.autograd.grad(
        (y, last_state), list(arguments.values()), (tensor(inputs.dy), tensor(inputs.dlast))
    )
    results = {"y": y, "last_state": last_state} | {f"d{name}": g for name, g in zip(arguments, gradients)}
    return {name: value.detach().double().numpy() for name, value in results.items()}


def compare_forms(dtype: str, seed: int) -> list[dict[str, Any]]:
    """A row for each form, and for the PyTorch loop where it is installed: its largest errors, and whether they pass.

    An error is the largest difference over the largest value of the same array.
    """
    inputs = make_inputs(dtype, seed)
    want = oracle(inputs)
    got: dict[str, Results] = {form: of_form(form, inputs) for form in FORMS}
    pytorch = of_pytorch(inputs) if importlib.util.find_spec("torch") is not None else None
    if pytorch is not None:
        got[PYTORCH] = pytorch
    rows = []
    for form, results in got.items():
        errors = {name: relative_error(results[name], want[name]) for name in want}
        row: dict[str, Any] = {"form": form, "dtype": dtype, "against_oracle": errors, "against_pytorch": None}
        if pytorch is not None and form != PYTORCH:
            row["against_pytorch"] = {name: relative_error(results[name], pytorch[name]) for name in want}
        row["tolerance"] = TOLERANCES[dtype]
        row["within_tolerance"] = form == PYTORCH or all(error <= TOLERANCES[dtype] for error in errors.values())
        rows.append(row)
    return rows


def run_parity(settings: Settings, screen: Screen) -> tuple[dict[str, Any], int]:
    """Print the table; what goes into the JSON file, and the exit code: 1 if a form of ours is beyond its tolerance."""
    rows: list[dict[str, Any]] = []
    with screen.status() as say:
        for dtype in DTYPES:
            say(f"parity in {dtype}")
            rows += compare_forms(dtype, settings.seed)
    sizes = (
        f"(b, l, d, n) = ({BATCH}, {LENGTH}, {CHANNELS}, {STATE}), with skip, gate, bias, softplus and initial state"
    )
    table = Table(title=f"Largest error over largest value at {sizes}", title_justify="left", title_style="bold")
    for column in ("form", "dtype"):
        table.add_column(column, no_wrap=True)
    for column in ("y", "last state", "worst gradient", "y against PyTorch", "worst gradient", "tolerance", "within"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        against = row["against_pytorch"]
        table.add_row(
            row["form"],
            row["dtype"],
            f"{row['against_oracle']['y']:.1e}",
            f"{row['against_oracle']['last_state']:.1e}",
            _worst_gradient(row["against_oracle"]),
            "" if against is None else f"{against['y']:.1e}",
            "" if against is None else _worst_gradient(against),
            f"{row['tolerance']:.0e}",
            "" if row["form"] == PYTORCH else "yes" if row["within_tolerance"] else "NO",
        )
    screen.console.print(table)
    screen.line("The first three errors are against the float64 oracle.", "dim")
    if importlib.util.find_spec("torch") is None:
        screen.line("PyTorch is not installed: nothing is compared with it.", "dim")
    return {"parity": rows}, 0 if all(row["within_tolerance"] for row in rows) else 1


def _worst_gradient(errors: dict[str, float]) -> str:
    name = max((name for name in errors if name not in ("y", "last_state")), key=lambda name: errors[name])
    return f"{errors[name]:.1e} {name}"
