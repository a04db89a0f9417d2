"""`python -m mamba_jax.bench`: its exit codes, its one line for a mistake, its table, JSON file and plots."""

import json

import jax
import pytest

from mamba_jax.bench import run
from mamba_jax.bench.implementations import IMPLEMENTATIONS
from mamba_jax.bench.limits import Limits, floor, needs
from mamba_jax.bench.plots import write_plots
from mamba_jax.bench.problem import Problem
from mamba_jax.bench.report import Screen, number
from mamba_jax.bench.results import finished
from mamba_jax.bench.settings import DEFAULT, Name, Settings, UsageError, check, parse
from mamba_jax.bench.timing import Row

LIMITS = Limits(bandwidth_gb_per_s=10, exponentials_g_per_s=1, fma_g_per_s=10, shared_units=True)


def row(implementation, length, ms, which="forward", **more):
    sizes = {"batch": 2, "channels": 8, "state": 4, "dtype": "float32"}
    times = {"ms": ms, "low_ms": ms, "high_ms": ms, "repeats": 3} if ms is not None else {}
    return Row(implementation=implementation, which=which, length=length, **sizes, **times, **more)


ROWS = [
    row("torch-loop", 512, 100.0, temp_mib=8.0),
    row("torch-loop", 1024, 200.0, temp_mib=16.0),
    row("torch-loop", 2048, None, note="not run: a call would take about 8 s, and --budget-s is 6"),
    row("sequential", 512, 1.0, temp_mib=1.0, compile_s=0.5),
    row("sequential", 1024, 2.0, temp_mib=1.0, compile_s=0.5),
    row("sequential", 2048, 4.0, temp_mib=1.0, compile_s=0.5),
    row("pallas", 512, None, wrong=True, note="wrong: y is off by 1.0e-01"),
    row("sequential", 512, 3.0, "gradient", temp_mib=2.0, compile_s=0.7),
]


def test_names_are_those_of_the_implementations():
    assert tuple(IMPLEMENTATIONS) == Name.__args__
    assert set(DEFAULT) < set(IMPLEMENTATIONS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "0"], "--lengths 0: "),
        (["--lengths", "8", "8"], "--lengths 8 8: different lengths"),
        (["--batch", "0"], "--batch 0: 1 or more"),
        (["--budget-s", "-1"], "--budget-s -1.0: "),
        (["--parity", "--models"], "--parity and --models exclude each other"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    with pytest.raises(UsageError) as error:
        parse(arguments)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_an_unknown_flag_and_name_end_with_2():
    for arguments in (["--lenghts", "8"], ["--implementations", "nonsense"]):
        with pytest.raises(SystemExit) as error:
            parse(arguments)
        assert error.value.code == 2


def test_a_file_that_cannot_be_written_is_found_at_once(tmp_path):
    settings = Settings(json=str(tmp_path / "missing" / "bench.json"))
    with pytest.raises(UsageError, match=r"bench\.json: No such file or directory"):
        run.run(settings, Screen())


def test_ratios_are_measured_or_said_to_be_estimated():
    rows = finished(ROWS, LIMITS)
    by = {(r["implementation"], r["pass"], r["length"]): r for r in rows}
    assert by["sequential", "forward", 1024]["ratio"] == 100
    assert not by["sequential", "forward", 1024]["ratio_is_estimated"]
    assert by["sequential", "forward", 2048]["ratio"] == pytest.approx(100)
    assert by["sequential", "forward", 2048]["ratio_is_estimated"]
    assert by["sequential", "gradient", 512]["ratio"] is None
    assert by["pallas", "forward", 512]["wrong"]
    assert by["pallas", "forward", 512]["ratio"] is None


def test_the_share_of_the_limit():
    problem = Problem(batch=2, length=512, channels=8, state=4, dtype="float32", seed=0)
    elements = 2 * 512 * 8 * 4
    floor_ms, bound = floor(LIMITS, needs(problem, "forward"))
    assert floor_ms == pytest.approx(elements * (1 / 1 + 4 / 10) / 1e6)
    assert bound == "exponentials"
    assert finished(ROWS, LIMITS)[3]["of_limit"] == pytest.approx(floor_ms)
    slow_memory = Limits(bandwidth_gb_per_s=1e-3, exponentials_g_per_s=1, fma_g_per_s=10, shared_units=True)
    assert floor(slow_memory, needs(problem, "forward"))[1] == "bandwidth"


def test_the_table_ranks_what_is_right_and_marks_what_is_wrong(capsys):
    titles = {name: implementation.title for name, implementation in IMPLEMENTATIONS.items()}
    Screen().comparison(finished(ROWS, LIMITS), titles)
    text = capsys.readouterr().out
    times, details = text.split("at the greatest length that each ran")[:2]
    assert "wrong" in times
    assert "l^1.00" in times
    assert "pallas" not in details.split("gradient")[0].split("Rows without")[0]
    assert "~100" in details
    assert "torch-loop, forward, length 2048: not run: a call would take about 8 s" in text


def test_plots(tmp_path):
    paths = write_plots(finished(ROWS, LIMITS), tmp_path)
    assert [path.name for path in paths] == ["time.png", "memory.png", "ratio.png"]
    assert all(path.stat().st_size > 10_000 for path in paths)


def test_a_run_from_end_to_end(tmp_path, capsys):
    path = tmp_path / "bench.json"
    settings = Settings(
        lengths=(8, 16), channels=8, state=3, repeats=2, budget_s=0.01, implementations=("plain-scan", "mamba_ssm"),
        passes=("forward",), json=str(path), plots=str(tmp_path / "plots"),
    )  # fmt: skip
    check(settings)
    assert run.run(settings, Screen()) == 0
    content = json.loads(path.read_text())
    assert {"machine", "versions", "seeds", "limits", "rows"} <= content.keys()
    assert {(r["implementation"], r["pass"], r["length"]) for r in content["rows"]} == {
        (name, "forward", length) for name in ("plain-scan", "mamba_ssm") for length in (8, 16)
    }
    sizes = ["batch", "length", "channels", "state", "dtype"]
    wanted = ["implementation", "pass", *sizes, "ms", "ratio", "temp_mib", "compile_s", "of_limit", "note"]
    assert all(set(wanted) <= r.keys() for r in content["rows"])
    assert (tmp_path / "plots" / "time.png").exists()
    assert "JAX lax.scan, nothing more" in capsys.readouterr().out


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what is said on a CPU")
def test_it_says_which_kernels_run():
    assert run._kernels(Settings(lengths=(8, 16), channels=8)).startswith("portable kernels, interpreted: ")


def test_number():
    assert [number(v) for v in (0.123, 9.994, 12.34, 99.96, 12345.6)] == ["0.12", "9.99", "12.3", "100", "12,346"]
