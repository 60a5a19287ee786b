# SPDX-License-Identifier: MIT
"""Meetings: all units of a level come, and the last one does what is to be done for all.

The units of a meeting are those whose coordinates agree in all levels but the collective's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.scheduler import Wait
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.expr import Closure
from tilescale.backends.emulator.interpret.registry import operation
from tilescale.errors import RankMismatchError
from tilescale.program import ops
from tilescale.program.operations import Barrier


class Moves(NamedTuple):
    """What the units of a meeting send each other: the rounds of an operation by an algorithm, for a whole tensor."""

    operation: str
    algorithm: str
    nbytes: int


MEETING = Moves("barrier", "direct", 0)
"""They only meet."""


def meet(
    frame: Frame,
    level: str,
    name: str,
    where: Any,
    payload: Any,
    finish: Callable[[list], None],
    moves: Moves = MEETING,
) -> None:
    """Wait for all units of the level; the last one calls `finish` with all payloads in the order of ranks.

    Args:
        moves: what its units send each other, for the clock.

    Raises:
        RankMismatchError: the others are at another collective.
    """
    unit = frame.unit
    mine = unit.around(level)
    group = tuple(step for step in unit.path() if step[0] != level)
    turn = unit.counters.get(level, 0)
    unit.counters[level] = turn + 1
    phase = frame.program.grid.number if frame.program is not None else -1
    key = (level, group, phase, turn)
    meeting = frame.run.meetings.get(key)
    if meeting is None:
        meeting = frame.run.meetings[key] = Meeting(mine, name, where, unit)
    if (meeting.name, meeting.where) != (name, where):
        raise RankMismatchError(
            f"{unit} calls T.{name} where {meeting.first} calls T.{meeting.name}: "
            f"units of level {level!r} must reach the same collectives in the same order",
            where=[w for w in (where, meeting.where) if w],
        )
    meeting.payloads[mine.rank] = payload
    if frame.run.clock is not None:
        frame.run.clock.meets(frame, meeting, mine.rank, name, level, moves)
    frame.run.publishes(meeting)
    if len(meeting.payloads) == meeting.size:
        frame.run.acquires(meeting)
        finish([meeting.payloads[rank] for rank in range(meeting.size)])
        frame.run.publishes(meeting)
        meeting.done = True
        del frame.run.meetings[key]
        frame.run.scheduler.progress += 1
    frame.run.scheduler.block(
        Wait(
            lambda: meeting.done,
            f"T.{name} of level {level!r}",
            lambda: f"{len(meeting.payloads)} of {meeting.size} units are there",
            where,
            meeting.absent,
        )
    )
    frame.run.acquires(meeting)


class Meeting:
    """One collective call of one group of units.

    Attributes:
        number: what tells it from all others of the run.
    """

    def __init__(self, member: Unit, name: str, where: Any, first: Unit):
        self.member, self.size = member, member.siblings
        self.name, self.where, self.first = name, where, first
        self.payloads: dict[int, Any] = {}
        self.done = False
        self.number = 0

    def absent(self) -> str:
        """Who has not arrived."""
        missing = [rank for rank in range(self.size) if rank not in self.payloads]
        return f"{self.member.siblings_named(missing)} did not reach it"


@operation(ops.BARRIER.name)
def _barrier(compiler: Compiler, call: ir.Call) -> Closure:
    level, where = Barrier.of(call).level, compiler.where
    return lambda frame: meet(frame, level, "barrier", where, None, lambda _: None)
