# SPDX-License-Identifier: MIT
"""Rendezvous: all units of a level arrive, and the last one executes the operation for all.

The units of a rendezvous are those whose coordinates agree in all levels but the collective's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.tasks import Wait
from tilescale.backends.emulator.execute.units import Unit
from tilescale.errors import Location, RankMismatchError


class Moves(NamedTuple):
    """The transfers between the units: the rounds of an operation by an algorithm, for a whole tensor."""

    operation: str
    algorithm: str
    nbytes: int


BARRIER = Moves("barrier", "direct", 0)
"""A barrier moves no data."""


def rendezvous(
    frame: Frame,
    level: str,
    name: str,
    where: Location | None,
    payload: Any,
    finish: Callable[[list], tuple[int, ...] | None],
    moves: Moves = BARRIER,
) -> None:
    """Wait for all units of the level; the last one calls `finish` with all payloads in the order of ranks. Raises
    RankMismatchError: the others are at another collective.

    Args:
        finish: may return the sizes of the sent parts, where these are not equal.
        moves: the transfers between the units, for the recorder.
    """
    unit = frame.unit
    mine = unit.around(level)
    group = tuple(step for step in unit.path() if step[0] != level)
    arrival = unit.counters.get(level, 0)
    unit.counters[level] = arrival + 1
    phase = frame.program.grid.number if frame.program is not None else -1
    key = (level, group, phase, arrival)
    call = frame.run.rendezvous.get(key)
    if call is None:
        call = frame.run.rendezvous[key] = Rendezvous(mine, name, where, unit)
    if (call.name, call.where) != (name, where):
        raise RankMismatchError(
            f"{unit} calls T.{name} where {call.first} calls T.{call.name}: "
            f"units of level {level!r} must reach the same collectives in the same order",
            where=[w for w in (where, call.where) if w],
        )
    call.payloads[mine.rank] = payload
    if frame.run.recorder is not None:
        frame.run.recorder.rendezvous(call, mine.rank, name, level, moves, frame.program is not None)
    frame.run.publishes(call)
    if len(call.payloads) == call.size:
        frame.run.acquires(call)
        call.parts = finish([call.payloads[rank] for rank in range(call.size)]) or ()
        frame.run.publishes(call)
        call.done = True
        del frame.run.rendezvous[key]
        frame.run.scheduler.progress += 1
    frame.run.scheduler.block(
        Wait(
            lambda: call.done,
            f"T.{name} of level {level!r}",
            lambda: f"{len(call.payloads)} of {call.size} units are there",
            where,
            call.absent,
        )
    )
    frame.run.acquires(call)


class Rendezvous:
    """One collective call of one group of units. `parts`: bytes from each unit to each, row-major, where they are not
    equal; known when all have arrived."""

    def __init__(self, member: Unit, name: str, where: Location | None, first: Unit):
        self.member, self.size = member, member.siblings
        self.name, self.where, self.first = name, where, first
        self.payloads: dict[int, Any] = {}
        self.done = False
        self.parts: tuple[int, ...] = ()

    def absent(self) -> str:
        """The units that have not arrived."""
        missing = [rank for rank in range(self.size) if rank not in self.payloads]
        return f"{self.member.siblings_named(missing)} did not reach it"
