"""Time, memory and compile time of every implementation at every length: checked first, then timed in rounds."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mamba_jax.bench.calls import MIB, Call, Unavailable
from mamba_jax.bench.memory import available_bytes

SIZES = ("batch", "length", "channels", "state", "dtype")

SHORTEST_TRIAL = 16
"""A rival is first tried at this length and then at 4 times as much, to learn how its time grows before a long call."""

PAUSE_S = 0.005
"""Before each timed call, for the threads that the last one left spinning to sleep (libgomp's do after about 1 ms)."""


class Problem(Protocol):
    """The inputs of one row, and the check of what comes out."""

    @property
    def length(self) -> int: ...  # and the other SIZES

    def mistake(self, results: Any) -> str | None: ...


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One row of a comparison."""

    title: str
    prepare: Callable[[Any, Any], Call]  # (problem, pass), raises Unavailable where it cannot run
    rival: bool = False  # its time may grow faster than the length, so it is tried at short lengths first
    unrolled: bool = False  # its compile time grows with the length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation, one pass, one length. `ms` is the median; None was not measured, and `note` says why."""

    implementation: str
    which: str  # the pass
    batch: int
    length: int
    channels: int
    state: int
    dtype: str
    ms: float | None = None
    low_ms: float | None = None  # the fastest and the slowest of the rounds
    high_ms: float | None = None
    repeats: int = 0
    temp_mib: float | None = None
    compile_s: float | None = None
    wrong: bool = False
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Budget:
    """How long to wait. Repeats of one row end at `repeats`, or after `seconds`; a longer call is not begun."""

    seconds: float
    compile_seconds: float
    repeats: int


@dataclasses.dataclass
class _History:
    """What is known of one implementation and pass: (length, value) pairs, from which the next length is predicted."""

    seconds: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    compile_seconds: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    mib: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    obstacle: str = ""  # why it will not run at greater lengths either


def predicted(points: Sequence[tuple[int, float]], length: int) -> float:
    """The value at `length` by the power law through the last two points, linear to cubic; 0 without points."""
    if not points:
        return 0.0
    at, value = points[-1]
    power = 1.0
    if len(points) > 1:
        before, smaller = points[-2]
        power = math.log(max(value, 1e-9) / max(smaller, 1e-9)) / math.log(at / before)
    return value * (length / at) ** min(max(power, 1.0), 3.0)


def measure(
    implementations: Mapping[str, Implementation],
    which: str,
    lengths: Sequence[int],
    problem_at: Callable[[int], Problem],
    budget: Budget,
    say: Callable[[str], None],
) -> list[Row]:
    """A row for each implementation and length, shortest first; `say` is told what goes on."""
    history = {name: _History() for name in implementations}
    for name, implementation in implementations.items():
        if implementation.rival:
            for length in trial_lengths(min(lengths)):
                say(f"{which}, {name}: a first look at length {length}")
                prepared = _prepare(name, implementation, which, problem_at(length), budget, history[name])
                if isinstance(prepared, Row):
                    break
    rows = []
    for length in sorted(lengths):
        problem, ready = problem_at(length), []
        for name, implementation in implementations.items():
            say(f"{which}, length {length}: checking {name}")
            prepared = _prepare(name, implementation, which, problem, budget, history[name])
            if isinstance(prepared, Row):
                rows.append(prepared)
            else:
                ready.append(prepared)
        say(f"{which}, length {length}: timing {len(ready)} implementations in turn")
        rows += _timed(ready, budget)
        del ready
        gc.collect()
    return rows


def trial_lengths(shortest: int) -> Iterable[int]:
    """16, 64, 256, ... below the shortest length that is asked for."""
    length = SHORTEST_TRIAL
    while length < shortest:
        yield length
        length *= 4


def _prepare(
    name: str, implementation: Implementation, which: str, problem: Problem, budget: Budget, history: _History
) -> Row | tuple[Row, Call, float]:
    """(row, call, seconds of a call), ready to be timed; or the finished row of one that is wrong or cannot run."""
    row = Row(implementation=name, which=which, **{size: getattr(problem, size) for size in SIZES})
    length = problem.length
    if not history.obstacle:
        history.obstacle = _too_much(history, length, budget, implementation.unrolled)
    if history.obstacle:
        return dataclasses.replace(row, note=history.obstacle)
    try:
        call = implementation.prepare(problem, which)
        if call.compile_s is not None:
            history.compile_seconds.append((length, call.compile_s))
        if call.temp_mib is not None and call.temp_mib > _memory_mib():
            raise Unavailable(f"not run: it would take {call.temp_mib / 1024:.1f} GiB of memory")
        begun = time.perf_counter()
        results = call.checked_results()
        seconds = time.perf_counter() - begun
    except Unavailable as reason:
        history.obstacle = str(reason)
        return dataclasses.replace(row, note=history.obstacle)
    except Exception as error:  # other people's code may fail in any way; the comparison goes on, and says so
        history.obstacle = f"failed: {type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
        return dataclasses.replace(row, note=history.obstacle)
    history.seconds.append((length, seconds))
    if call.temp_mib is not None:
        history.mib.append((length, call.temp_mib))
    row = dataclasses.replace(row, temp_mib=call.temp_mib, compile_s=call.compile_s)
    mistake = problem.mistake(results)
    if mistake is not None:
        return dataclasses.replace(row, wrong=True, note=f"wrong: {mistake}")
    return row, call, seconds


def _too_much(history: _History, length: int, budget: Budget, unrolled: bool) -> str:
    """Why a call at this length would take too long or too much memory; empty if it would not."""
    seconds = predicted(history.seconds, length)
    if seconds > budget.seconds:
        return f"not run: a call would take about {seconds:.2g} s, and --budget-s is {budget.seconds:g}"
    seconds = predicted(history.compile_seconds, length) if unrolled else 0
    if seconds > budget.compile_seconds:
        return (
            f"not run: compiling would take about {seconds:.2g} s, and --compile-budget-s is {budget.compile_seconds:g}"
        )
    mib = predicted(history.mib, length)
    if mib > _memory_mib():
        return f"not run: it would take about {mib / 1024:.1f} GiB of memory"
    return ""


def _memory_mib() -> float:
    """What a call may take: most of what the machine has left."""
    return 0.8 * available_bytes() / MIB


def _timed(ready: list[tuple[Row, Call, float]], budget: Budget) -> list[Row]:
    """The rows with their times: in rounds each takes its turn, until it has its repeats or has used up its budget."""
    # One that took more than its budget was timed while it was checked, its first call: it is not called again.
    times_s = [[checked_s] if checked_s > budget.seconds else [] for _, _, checked_s in ready]
    for _ in range(budget.repeats):
        for i, (_, call, checked_s) in enumerate(ready):
            spent = sum(times_s[i])
            if times_s[i] and spent + min(spent / len(times_s[i]), checked_s) > budget.seconds:
                continue
            time.sleep(PAUSE_S)
            begun = time.perf_counter()
            call.run()
            times_s[i].append(time.perf_counter() - begun)
    return [
        dataclasses.replace(
            row,
            ms=float(np.median(times_s[i])) * 1e3,
            low_ms=min(times_s[i]) * 1e3,
            high_ms=max(times_s[i]) * 1e3,
            repeats=len(times_s[i]),
        )
        for i, (row, _, _) in enumerate(ready)
    ]


def exponent(points: Sequence[tuple[int, float]], shortest: int = 512) -> float | None:
    """p of value ~ length^p by least squares, from `shortest` on, where fixed costs are small; None below two."""
    points = [(l, v) for l, v in points if l >= shortest and v > 0]
    if len(points) < 2:
        return None
    lengths, values = np.log(np.array(points, dtype=np.float64)).T
    return float(np.polyfit(lengths, values, 1)[0])
