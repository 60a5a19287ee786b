# SPDX-License-Identifier: MIT
"""`tilescale.measured`: the schedule of a program's collectives, chosen by measuring the best few of the cost model."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from tilelang_core import ir
from tilescale.errors import UsageError
from tilescale.hda.units import format_time
from tilescale.passes.overlap.estimate import by_estimate
from tilescale.passes.overlap.schedule import GRID, QUEUE, Move, Schedule
from tilescale.runtime.kernel import Kernel
from tilescale.tuning.database import Database, DatabaseKey, Tuned
from tilescale.tuning.inputs import InputFill
from tilescale.tuning.places import TimeSource, here
from tilescale.tuning.progress import steps
from tilescale.tuning.race import Runner
from tilescale.tuning.search import SEARCHES, Config, ConfigSearch
from tilescale.tuning.versions import versions

MOST = 8
"""Schedules that are measured."""

CHOSEN = ("overlapped", "chunk", "carrier", "adds", "ordered")
"""Fields of a move that are chosen."""


def measured(bind: Callable[[str | Schedule], Kernel]) -> Kernel:
    """The kernel with the fastest schedule: `tilescale.compile(program, schedule=tilescale.measured)`.

    The cost model keeps the best few schedules, the sequential one among them, and all ranks measure these together,
    interleaved, on generated inputs, while the program is compiled; without GPUs the emulator's time decides. The
    winner stays in the database of `tilescale.autotune`: the next process measures nothing. Calls of the kernel never
    measure. While `tilescale.autotune` goes through configurations, schedules are those of the cost model. Collective.

    Args:
        bind: the kernel of the program with a schedule; `tilescale.compile` and `tilescale.jit` give it.

    Raises:
        UsageError: the program is compiled for a team, or no schedule works, with the reason of each.
        LaunchError: the job has another number of ranks than the program's devices.
    """
    decided = bind("overlap")
    if SEARCHES.get() or decided.moves is None or not any(move.estimates for move in decided.moves.moves):
        return decided
    if decided.options.get("team") is not None:
        raise UsageError(
            "schedules are measured on all ranks of the job, not on a team",
            hint='take schedule="overlap", or what a job of as many ranks has measured: its kernel.moves',
        )
    options = candidates(decided.moves, MOST)
    configs: list[Config] = [_config(schedule) for schedule, _ in options]
    place = here(decided.machine)
    key, database = _key(bind("sequential"), configs, place), Database.of_user()
    found = place.team.broadcast(database.read(key))
    if found is None:
        found = _search(decided, configs, [seconds for _, seconds in options], bind, place)
        if place.team.rank == 0:
            database.write(key, found)
    kernel = bind(_schedule(found.config, decided.moves))
    assert kernel.moves is not None
    kernel.moves.measured = _said(found, configs)
    return kernel


def _search(
    decided: Kernel, configs: list[Config], seconds: list[float], bind: Callable[..., Kernel], place: TimeSource
) -> Tuned:
    moves, inputs = decided.moves or Schedule(), InputFill(kept={})  # the same for all

    def build(config: Config) -> Runner:
        return place.runner(bind(_schedule(config, moves)), inputs)

    search = ConfigSearch(
        name=decided.program.name,
        configs=configs,
        trace=lambda config: bind(_schedule(config, moves)).ir,
        build=build,
        cost=lambda config: 1e6 * seconds[configs.index(config)],
    )
    with steps(place.team.rank) as shown:
        return search.run(place, shown)


def _key(plain: Kernel, configs: Sequence[Config], place: TimeSource) -> DatabaseKey:
    space = json.dumps(configs, sort_keys=True)
    options = {name: value for name, value in plain.options.items() if value is not None}
    return DatabaseKey(
        program=plain.program.name,
        source=ir.fingerprint(plain.ir)[:16],
        arguments=json.dumps(options, sort_keys=True, default=str),
        space=hashlib.sha256(space.encode()).hexdigest()[:16],
        machine=f"{place.machine.name} {place.machine.digest}",
        place=f"{place.units} x {place.name}",
        versions=tuple(sorted(versions().items())),
    )


# -- schedules as configurations ---------------------------------------------------------------------------------------


def _config(schedule: Schedule) -> dict[str, Any]:
    """Choices for each collective, by its number and name."""
    every = enumerate(schedule.moves, 1)
    return {f"{i}. {move.title}": {name: asdict(move)[name] for name in CHOSEN} for i, move in every}


def _schedule(config: Config, like: Schedule) -> Schedule:
    """The schedule that a configuration says, of the program of another one."""
    return Schedule(
        [
            Move(move.collective, move.tensors, **chosen)
            for move, chosen in zip(like.moves, config.values(), strict=True)
        ]
    )


def _said(found: Tuned, configs: Sequence[Config]) -> str:
    """Text that compares the fastest schedule with the sequential program."""
    in_order = next(c for c in configs if not any(chosen["overlapped"] for chosen in c.values()))
    times = {json.dumps(trial.config, sort_keys=True): trial.us for trial in found.trials if trial.us is not None}
    other = times.get(json.dumps(in_order, sort_keys=True))
    compared = f", {format_time(other * 1e-6)} in order" if other is not None else ""
    how = "simulated" if found.simulated else "measured"
    return f"{how}: {format_time(found.us * 1e-6)}, the fastest of {len(times)} schedules{compared}"


CHUNKS = 3
"""Numbers of rows that are tried with each carrier."""


def candidates(schedule: Schedule, most: int) -> list[tuple[Schedule, float]]:
    """Schedules of the same program, each with the seconds that it is estimated to take, the least first.

    Args:
        schedule: the compiler's decision, with its estimates.
        most: how many at most; the one that leaves all in order is among them.
    """
    every = [
        (Schedule([move for move, _ in chosen]), sum(seconds for _, seconds in chosen))
        for chosen in itertools.product(*(list(_options(move)) for move in schedule.moves))
    ]
    in_order = [each for each in every if not any(move.overlapped for move in each[0].moves)]
    others = [each for each in every if each not in in_order]
    best = sorted(others, key=lambda each: each[1])[: most - 1]
    return sorted([*best, *in_order], key=lambda each: each[1])


def _options(move: Move) -> Iterator[tuple[Move, float]]:
    """Options for a collective, and the estimated seconds of each with its grids."""
    yield replace(move, overlapped=False, carrier=None, adds=None, chunk=None), move.in_order_s or 0.0
    for carrier in dict.fromkeys(carrier for carrier, _ in move.estimates):
        times = {chunk: seconds for (by, chunk), seconds in move.estimates.items() if by == carrier}
        chunks = by_estimate(times)[:CHUNKS]
        best = replace(move, overlapped=True, carrier=carrier, chunk=chunks[0], adds=None, ordered=True)
        others = [replace(best, chunk=chunk) for chunk in chunks[1:]]
        if carrier == QUEUE:
            others.append(replace(best, adds=GRID))
        for each in (best, *others, replace(best, ordered=False)):
            yield each, times[each.chunk or 0]
