# SPDX-License-Identifier: MIT
"""The search: all configurations are traced, the cost model ranks them, and the best few are measured, interleaved.

A configuration that cannot be traced, estimated, compiled or run is a trial with the reason, and the search continues.
Ranks share out the estimates, measure together, and agree on the result, since all of them see the same times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from textwrap import indent
from typing import Any

from tilelang_core import ir
from tilescale.alarm import raise_after
from tilescale.errors import TileScaleError, UsageError
from tilescale.tracebacks import line_of
from tilescale.tuning.database import Trial, Tuned
from tilescale.tuning.places import TimeSource, simulated_us
from tilescale.tuning.progress import ProgressSteps
from tilescale.tuning.race import Contender, Heat, Runner, race

Config = Mapping[str, Any]

ASSUMED_US = 1000.0
"""Assumed time of a call without an estimate."""

SEARCHES: ContextVar[bool] = ContextVar("SEARCHES", default=False)
"""Whether a search is under way: functions that are built meanwhile are not searched themselves."""

MOST_CALLS = 1000
"""Calls in a group: the limit of a host's launch queue."""

MOST_REASONS = 16
"""Limit of different reasons in an error."""


@dataclass(frozen=True)
class ConfigSearch:
    """Scope and effort of a search.

    Attributes:
        name: of the program.
        configs: all configurations.
        trace: makes the program of a configuration.
        build: makes what calls its kernel.
        cost: estimates the microseconds of a configuration, all ranks the same; None: the simulation does, and where
            times are simulated, those are the times.
        shapes: arguments of a unit, where programs leave extents open.
        top: how many are measured at most; None for all.
        within: configurations whose estimate is more than this many times the least are left out; None keeps all.
        rounds: groups of calls of each.
        warmup, rep: milliseconds of calls of each that are not timed, and that are.
        timeout: seconds that a configuration may take to be traced, and to be built.
        called: the arguments, in words.
    """

    name: str
    configs: Sequence[Config]
    trace: Callable[[Config], ir.PrimFunc]
    build: Callable[[Config], Runner]
    cost: Callable[[Config], float] | None = None
    shapes: Sequence[Any] | None = None
    top: int | None = 8
    within: float | None = None
    rounds: int = 10
    warmup: float = 25.0
    rep: float = 100.0
    timeout: float = 100.0
    called: str = ""

    def run(self, place: TimeSource, steps: ProgressSteps) -> Tuned:
        """The fastest configuration; collective. Raises UsageError: no configuration works; says why of each."""
        before = SEARCHES.set(True)
        try:
            trials = self._estimated(place, steps)
            trials = trials if place.simulated and self.cost is None else self._measured(trials, place, steps)
        finally:
            SEARCHES.reset(before)
        timed = sorted((t for t in trials if t.us is not None), key=lambda t: t.us or 0.0)
        if not timed:
            called = f" for {self.called}" if self.called else ""
            raise UsageError(
                f"no configuration of {self.name} works{called}:\n{_reasons(trials)}", hint="mend one of them"
            )
        waiting = [t for t in trials if t.us is None]
        others = sorted(waiting, key=lambda t: (t.failed is not None, t.estimated_us or 0.0))
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        best = timed[0]
        return Tuned(best.config, best.us or 0.0, place.simulated, date, (*timed, *others))

    def _estimated(self, place: TimeSource, steps: ProgressSteps) -> list[Trial]:
        """A trial for each configuration; every rank simulates its share."""
        if self.cost is not None:
            return [Trial(config, self.cost(config)) for config in self.configs]
        team, mine = place.team, {}
        own = range(team.rank, len(self.configs), team.size)
        for i in steps.over(own, "estimated"):
            mine[i] = self._estimate(self.configs[i], place)
        found = {i: trial for share in team.all_gather(mine) for i, trial in share.items()}
        return [found[i] for i in range(len(self.configs))]

    def _estimate(self, config: Config, place: TimeSource) -> Trial:
        try:
            with raise_after(self.timeout, self._too_long()):
                func = self.trace(config)
        except Exception as error:  # noqa: BLE001 - any exception eliminates this configuration alone
            return failure(config, error)
        try:
            us = simulated_us(func, place.machine, self.shapes)
        except TileScaleError as error:
            return failure(config, error) if place.simulated else Trial(config)
        except Exception as error:  # noqa: BLE001
            return failure(config, error)
        return Trial(config, us, us if place.simulated else None)

    def _measured(self, trials: Sequence[Trial], place: TimeSource, steps: ProgressSteps) -> list[Trial]:
        """Trials with the times of the best few, measured interleaved."""
        chosen = self._best(trials)
        entries = [Contender(str(i), partial(self._built, trials[i])) for i in chosen]
        known = [trials[i].estimated_us for i in chosen if trials[i].estimated_us]
        calls = _calls(self.rep / self.rounds, min((us for us in known if us is not None), default=ASSUMED_US))
        heat = Heat(self.name, (), "", place.units, "eager", None, entries, calls=calls)
        steps.begin(len(chosen) * (1 + self.rounds), "measured")
        rows = race(
            heat, place.timer("eager"), place.team, self.rounds, seeds=range(1), step=lambda _, what: steps.step(what)
        )
        found = list(trials)
        for row in rows:
            i = int(row["contender"])
            spread = tuple(row["spread"]) if row["spread"] else None
            found[i] = replace(trials[i], us=row["us"], spread=spread, failed=row.get("failed"))
        return found

    def _too_long(self) -> TimeoutError:
        return TimeoutError(f"took longer than {self.timeout:g} s")

    def _built(self, trial: Trial) -> Runner:
        with raise_after(self.timeout, self._too_long()):
            made = self.build(trial.config)

        def warm(seed: int) -> None:
            if made.check is not None:
                made.check(seed)
            for _ in range(_calls(self.warmup, trial.estimated_us or ASSUMED_US)):
                made.call()

        return Runner(made.call, warm, made.group)

    def _best(self, trials: Sequence[Trial]) -> list[int]:
        """Trials to be measured: the least estimates first, then those without an estimate."""
        able = [i for i, trial in enumerate(trials) if trial.failed is None]
        able.sort(key=lambda i: (trials[i].estimated_us is None, trials[i].estimated_us or 0.0))
        least = min((t.estimated_us for t in trials if t.estimated_us is not None), default=None)
        if least is not None and self.within is not None:
            able = [i for i in able if (trials[i].estimated_us or least) <= self.within * least]
        return able[: self.top]


def _calls(milliseconds: float, us: float) -> int:
    """Number of calls of `us` microseconds that take that long."""
    return min(max(round(milliseconds * 1e3 / us), 1), MOST_CALLS)


def words(config: Config) -> str:
    """A configuration in a line."""
    return ", ".join(f"{name}={value}" for name, value in config.items())


def failure(config: Config, error: BaseException) -> Trial:
    """A configuration that an error ruled out; errors of ours say their line themselves."""
    where = None if isinstance(error, TileScaleError) else line_of(error)
    failed = f"{type(error).__name__}: {error}".strip()[:600]
    return Trial(config, failed=failed, where=None if where is None else str(where))


def _reasons(trials: Sequence[Trial]) -> str:
    """Why configurations do not work, each reason once, with the first that it holds for."""
    alike: dict[tuple[str | None, str | None], list[Trial]] = {}
    for trial in trials:
        alike.setdefault((trial.failed, trial.where), []).append(trial)
    lines = []
    for (failed, where), those in [*alike.items()][:MOST_REASONS]:
        lines.append(f"    {words(those[0].config)}: {failed}")
        lines += [indent(f"at {where}", " " * 8)] if where else []
        others = [words(trial.config) for trial in those[1:4]] + [f"{len(those) - 4} more"] * (len(those) > 4)
        lines += [f"        so do {'; '.join(others)}"] if others else []
    return "\n".join(lines)
