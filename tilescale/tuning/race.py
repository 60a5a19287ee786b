# SPDX-License-Identifier: MIT
"""Races: contenders that do the same work, interleaved in one process, so that their ratios are meaningful.

A GPU under load lowers its clocks: the same GEMM takes 10 % longer after a second of work than before. So no contender
is timed in a row. Each round gives every contender one group of calls, after a call that is not timed; the next round
starts with another one. A time is that of the slowest rank; a result is the median over the rounds, with the smallest
and the largest, and a ratio is the median of the ratios to the baseline's time of the same round.

A contender that cannot be built, is wrong, or fails is a row with the reason, and the others continue.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")
Step = Callable[[str, str], None]
"""A callback with a contender's name and its next step."""

KEYS = ("work", "shape", "dtype", "gpus", "mode", "contender", "us", "spread", "baseline", "ratio")
"""Keys of every row of a results file; some have rates, `way`, the strategy that calls took, and `failed`, the reason
why there is no time."""

RATES = {"tflops": "TFLOP/s", "gb_s": "GB/s", "gib": "GiB", "idle": "% idle"}
"""Optional keys of rows, and their units: of the work, of memory, and of the GPU's time by a trace."""

WORK = KEYS[:5]
"""Keys that rows of one heat share."""

MODES = ("eager", "graph", "host")
"""Device time of calls in a row; the same in a CUDA graph; time that a call takes on the host."""


class RacingRanks(Protocol):
    """The ranks that race together, as `tilescale.init()` returns them."""

    def all_gather(self, obj: Any) -> list[Any]:
        """The objects of all ranks."""


class Timer(Protocol):
    """Timing of a call."""

    def prepare(self, call: Callable[[], Any]) -> Callable[[int], float]:
        """A function that makes a number of calls, after one that does not count, and returns microseconds a call on
        this rank."""

    def barrier(self) -> None:
        """Wait until the devices of all ranks are idle."""


@dataclass(frozen=True)
class Runner:
    """A contender that is ready.

    Attributes:
        call: does the work once.
        check: runs it on fresh inputs made from a seed; raises ValueError if the result is wrong.
        group: times a number of calls by itself, for contenders that cannot be called from this process.
        rates: what else its row reports, by key of `RATES`; measured after the checks, the largest of all ranks.
        way: returns the strategy that its calls take, where they choose one; for its row.
    """

    call: Callable[[], Any]
    check: Callable[[int], None] | None = None
    group: Callable[[int], float] | None = None
    rates: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    way: Callable[[], str] | None = None


@dataclass(frozen=True)
class Contender:
    """One way to do the work.

    Attributes:
        make: builds it, on all ranks alike; may raise.
        compile: the slow part of `make`, to fill a cache beforehand.
    """

    name: str
    make: Callable[[], Runner]
    compile: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Heat:
    """A work, and its contenders.

    Attributes:
        work, shape, dtype, gpus, mode: as in the rows.
        baseline: the contender that ratios refer to; None if there is none.
        flops, bytes: of each GPU, from which rates follow.
        calls: in a group.
    """

    work: str
    shape: tuple[int, ...]
    dtype: str
    gpus: int
    mode: str
    baseline: str | None
    contenders: Sequence[Contender]
    flops: float = 0
    bytes: float = 0
    calls: int = 8

    @property
    def title(self) -> str:
        """The work in words."""
        return f"{self.work} {'x'.join(map(str, self.shape))} {self.dtype}, {self.gpus} GPU, {self.mode}"

    def is_of(self, row: Mapping[str, Any]) -> bool:
        return same_work(row, {key: getattr(self, key) for key in WORK} | {"shape": list(self.shape)})


@dataclass
class HeatState:
    """Contenders of a heat and their state: the timer of each, its times by round, its measured rates, its strategy,
    and failures with reasons."""

    groups: dict[str, Callable[[int], float]] = field(default_factory=dict)
    times: dict[str, dict[int, float]] = field(default_factory=dict)
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    ways: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def race(
    heat: Heat,
    timer: Timer,
    team: RacingRanks,
    rounds: int = 10,
    seeds: Iterable[int] = range(3),
    step: Step = lambda contender, what: None,
    out: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Check all contenders, then time them interleaved; collective. Returns the rows, in the contenders' order.

    Args:
        rounds: groups of calls for each contender.
        seeds: of the inputs on which each contender is checked.
        step: called with the next step and its contender: build, checks and preparation of each contender, and its
            rounds.
        out: contenders that are known to fail, and how: they are not tried.
    """
    entered = HeatState(failed=dict(out or {}))
    timer.barrier()
    for contender in heat.contenders:
        if contender.name not in entered.failed:
            _admit(contender, entered, timer, team, list(seeds), step)
    for number in range(rounds):
        _round(entered, number, timer, team, heat.calls, step)
    return [_row(heat, contender.name, entered) for contender in heat.contenders]


def _admit(
    contender: Contender, entered: HeatState, timer: Timer, team: RacingRanks, seeds: list[int], step: Step
) -> None:
    """Build a contender, check it, and prepare its timing; every step on all ranks or none."""
    try:
        step(contender.name, "build")
        runner = _on_all(team, contender.make)
        if (check := runner.check) is not None:
            for seed in seeds:
                step(contender.name, f"check with inputs {seed}")
                _on_all(team, partial(check, seed))  # one by one: the next one begins with collectives
        for rate, measure in runner.rates.items():
            step(contender.name, f"measure {rate}")
            largest = max(team.all_gather(_on_all(team, measure)))
            entered.rates.setdefault(contender.name, {})[rate] = largest
        if runner.way is not None:
            step(contender.name, "note the strategy")
            entered.ways[contender.name] = _on_all(team, runner.way)
        step(contender.name, "prepare")
        entered.groups[contender.name] = _on_all(team, lambda: runner.group or timer.prepare(runner.call))
        entered.times[contender.name] = {}
    except ContenderFailed as out:
        entered.failed[contender.name] = str(out)
        step(contender.name, f"is out: {out}")
    timer.barrier()  # leftovers on the devices are the contender's responsibility


class ContenderFailed(Exception):
    """A contender failed on a rank; all ranks have heard of it."""


def _attempt(function: Callable[[], Any]) -> tuple[Any, str | None]:
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001 - any exception eliminates this contender alone
        return None, f"{type(error).__name__}: {error}".strip()[:600]


def _on_all(team: RacingRanks, function: Callable[[], Result]) -> Result:
    """The function's result here, once it has returned on all ranks. Raises Out."""
    result, error = _attempt(function)
    if failure := first_failure(team.all_gather(error)):
        raise ContenderFailed(failure)
    return result


def first_failure(errors: Sequence[str | None]) -> str | None:
    """The message of the first rank that failed; None if none has."""
    found = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if not found:
        return None
    rank, error = found[0]
    return error if len(errors) == 1 else f"rank {rank}: {error}"


def _round(entered: HeatState, number: int, timer: Timer, team: RacingRanks, calls: int, step: Step) -> None:
    """A group of calls of each contender, the first one another in each round."""
    mine = {}
    for name in rotated(list(entered.groups), number):
        step(name, "race")
        timer.barrier()
        mine[name] = _attempt(partial(entered.groups[name], calls))
    everywhere = team.all_gather(mine)
    for name in mine:
        if failure := first_failure([there[name][1] for there in everywhere]):
            entered.failed[name] = failure
            del entered.groups[name]
        else:
            entered.times[name][number] = max(there[name][0] for there in everywhere)


def rotated(items: list[Result], by: int) -> list[Result]:
    """The items, starting with another one."""
    start = by % len(items) if items else 0
    return items[start:] + items[:start]


# -- rows --------------------------------------------------------------------------------------------------------------


def ratio(times: Mapping[int, float], baseline: Mapping[int, float]) -> float | None:
    """The median, over the rounds that both have, of one's time through the other's."""
    both = [times[n] / baseline[n] for n in times if n in baseline]
    return statistics.median(both) if both else None


def _row(heat: Heat, name: str, entered: HeatState) -> dict[str, Any]:
    row: dict[str, Any] = {key: getattr(heat, key) for key in KEYS if hasattr(heat, key)}
    row |= {"shape": list(heat.shape), "contender": name}
    times = entered.times.get(name, {})
    if name in entered.failed or not times:
        row |= {"us": None, "spread": None, "ratio": None, "failed": entered.failed.get(name, "not timed")}
        return {key: row[key] for key in (*KEYS, "failed")}
    us, against = statistics.median(times.values()), entered.times.get(heat.baseline or "", {})
    compared = ratio(times, against)
    row |= {"us": round(us, 2), "spread": [round(f(times.values()), 2) for f in (min, max)]}
    row["ratio"] = None if compared is None else round(compared, 4)
    rates = {"tflops": round(heat.flops / us / 1e6, 1), "gb_s": round(heat.bytes / us / 1e3, 1)}
    measured = {key: round(rate, 2) for key, rate in entered.rates.get(name, {}).items()}
    way = {"way": entered.ways[name]} if name in entered.ways else {}
    return {key: row[key] for key in KEYS} | {key: rate for key, rate in rates.items() if rate} | measured | way


def line(row: Mapping[str, Any]) -> str:
    """A row as readable text."""
    if row["us"] is None:
        return f"{row['contender']:<24} failed: {row['failed'].splitlines()[0][:160]}"
    low, high = row["spread"]
    against = f"{row['ratio']:.3f} x {row['baseline']}" if row["ratio"] is not None else ""
    rates = " ".join(f"{row[k]:g} {unit}" for k, unit in RATES.items() if k in row)
    return f"{row['contender']:<24} {row['us']:>9.1f} us ({low:.1f} to {high:.1f})  {against:<28} {rates}".rstrip()


# -- files -------------------------------------------------------------------------------------------------------------


def same_work(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two rows are of one heat."""
    return all(a[key] == b[key] for key in WORK)


def record(
    path: Path, rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], versions: Mapping[str, str],
    same: Callable[[Mapping[str, Any], Mapping[str, Any]], bool] = same_work,
) -> None:  # fmt: skip
    """Write rows with their date to a results file, in the place of older ones that are the `same`: of the same heats.

    Other rows stay, with their own dates, if they come from the same machine and versions.
    """
    kept = []
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if (before["machine"], before["versions"]) == (dict(machine), dict(versions)):
            kept = [row for row in before["rows"] if not any(same(row, new) for new in rows)]
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    dated = [*kept, *({**row, "date": date} for row in rows)]
    whole = {"machine": dict(machine), "versions": dict(versions), "date": date, "rows": dated}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(whole), encoding="utf-8")


def text_of(results: Mapping[str, Any]) -> str:
    """The file's text: JSON with a line for each row."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in results["rows"])
    head = json.dumps({key: value for key, value in results.items() if key != "rows"}, indent=1)
    return f'{head[:-2]},\n "rows": [\n{lines}\n ]\n}}\n'
