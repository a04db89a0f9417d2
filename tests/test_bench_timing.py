"""What the benchmark does with an implementation that is right, wrong, slow, greedy or not there."""

import time

import jax
import numpy as np
import pytest

from mamba_jax.bench.calls import Unavailable
from mamba_jax.bench.implementations import IMPLEMENTATIONS
from mamba_jax.bench.problem import Problem
from mamba_jax.bench.timing import Budget, Implementation, Row, exponent, measure, predicted, trial_lengths

BUDGET = Budget(seconds=5, compile_seconds=5, repeats=3)


def problem_at(length):
    return Problem(batch=2, length=length, channels=8, state=3, dtype="float32", seed=0)


class OracleCall:
    """An implementation that returns the oracle's y, times `factor`, `seconds_a_step` after each other step."""

    compile_s = None
    temp_mib = 1.0

    def __init__(self, problem, factor=1.0, seconds_a_step=0.0):
        self.problem, self.factor, self.seconds = problem, factor, seconds_a_step * problem.length
        self.runs = 0

    def run(self):
        self.runs += 1
        time.sleep(self.seconds)

    def checked_results(self):
        time.sleep(self.seconds)
        y = np.zeros((self.problem.batch, self.problem.length, self.problem.channels))
        y[..., self.problem.checked] = self.factor * self.problem.wanted["y"]
        return {"y": y}


def rows_of(implementation, lengths=(4,), budget=BUDGET):
    return measure({"it": implementation}, "forward", lengths, problem_at, budget, lambda text: None)


def test_a_right_one_is_timed():
    (row,) = rows_of(Implementation("it", lambda problem, which: OracleCall(problem, seconds_a_step=0.001)))
    assert isinstance(row, Row)
    assert not row.wrong
    assert row.note == ""
    assert row.repeats == BUDGET.repeats
    assert row.ms is not None and row.low_ms is not None and row.high_ms is not None
    assert 4 <= row.low_ms <= row.ms <= row.high_ms


def test_a_wrong_one_is_marked_and_never_timed():
    calls = []

    def prepare(problem, which):
        calls.append(OracleCall(problem, factor=1.001))
        return calls[-1]

    (row,) = rows_of(Implementation("it", prepare))
    assert row.wrong
    assert row.ms is None
    assert row.note.startswith("wrong: y is off by 1.0e-03")
    assert calls[0].runs == 0


def test_what_is_not_there_says_why():
    def prepare(problem, which):
        raise Unavailable("it is not installed")

    first, second = rows_of(Implementation("it", prepare), lengths=(4, 8))
    assert first.note == second.note == "it is not installed"
    assert first.ms is None


def test_an_exception_is_a_row():
    def prepare(problem, which):
        raise ZeroDivisionError("by zero\nmore")

    (row,) = rows_of(Implementation("it", prepare))
    assert row.note == "failed: ZeroDivisionError: by zero"


def test_a_slow_one_is_run_only_as_far_as_its_budget():
    implementation = Implementation("it", lambda problem, which: OracleCall(problem, seconds_a_step=0.01))
    short, long = rows_of(implementation, lengths=(2, 1000), budget=Budget(seconds=1, compile_seconds=1, repeats=2))
    assert short.ms is not None
    assert long.ms is None
    assert long.note.startswith("not run: a call would take about ")


def test_a_rival_is_tried_at_short_lengths_before_a_long_one():
    lengths = []

    def prepare(problem, which):
        lengths.append(problem.length)
        return OracleCall(problem, seconds_a_step=0.01)

    (row,) = rows_of(Implementation("it", prepare, rival=True), lengths=(1000,), budget=Budget(0.5, 1, 2))
    assert lengths == [16]  # 64 would already take 0.64 s
    assert row.ms is None


def test_a_greedy_one_is_not_run():
    call = OracleCall(problem_at(4))
    call.temp_mib = 1e9
    (row,) = rows_of(Implementation("it", lambda problem, which: call))
    assert row.ms is None
    assert "GiB of memory" in row.note


def test_repeats_end_with_the_budget():
    implementation = Implementation("it", lambda problem, which: OracleCall(problem, seconds_a_step=0.01))
    (row,) = rows_of(implementation, budget=Budget(seconds=0.1, compile_seconds=1, repeats=50))
    assert 1 <= row.repeats <= 3


def test_predicted():
    assert predicted([], 10) == 0
    assert predicted([(8, 2.0)], 16) == 4.0
    assert predicted([(4, 1.0), (8, 4.0)], 16) == pytest.approx(16.0)
    assert predicted([(4, 4.0), (8, 1.0)], 16) == 2.0  # never less than linear


def test_exponent():
    assert exponent([(64, 1.0), (512, 3.0), (1024, 6.0), (2048, 12.0)]) == pytest.approx(1.0)
    assert exponent([(512, 3.0)]) is None


def test_trial_lengths():
    assert list(trial_lengths(1024)) == [16, 64, 256]
    assert list(trial_lengths(16)) == []


@pytest.mark.parametrize("which", ["forward", "gradient"])
@pytest.mark.parametrize("name", ["plain-scan", "sequential", "associative", "pallas", "sequential-split"])
def test_jax_implementations_are_right(name, which):
    problem = Problem(batch=2, length=9, channels=12, state=3, dtype="float32", seed=0)
    call = IMPLEMENTATIONS[name].prepare(problem, which)
    assert problem.mistake(call.checked_results()) is None
    call.run()
    assert call.compile_s > 0
    assert call.temp_mib >= 0


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["torch-loop", "torch-script", "torch-transposed", "mambapy", "transformers"])
def test_torch_implementations_are_right(name, dtype):
    needed = {"mambapy": "mambapy", "transformers": "transformers"}.get(name, "torch")
    pytest.importorskip(needed)
    problem = Problem(batch=2, length=9, channels=12, state=3, dtype=dtype, seed=0)
    call = IMPLEMENTATIONS[name].prepare(problem, "gradient")
    assert problem.mistake(call.checked_results()) is None
    call.run()


def test_a_batch_that_cannot_be_split_says_so():
    problem = Problem(batch=1, length=4, channels=8, state=3, dtype="float32", seed=0)
    with pytest.raises(Unavailable, match=rf"a batch of 1 cannot be split over {len(jax.devices())} device"):
        IMPLEMENTATIONS["sequential-split"].prepare(problem, "forward")


def test_what_is_not_installed_is_unavailable(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="torch is not installed"):
        IMPLEMENTATIONS["mamba_ssm"].prepare(problem_at(4), "forward")
