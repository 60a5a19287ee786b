# SPDX-License-Identifier: MIT
"""The units inside a program: ranges of its threads, one in another, and the branches that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.markers import ExecutingThreads, acquired, executed, sync
from tilescale.hda import Level


@dataclass(frozen=True)
class UnitThreads:
    """The threads that execute a clone: one unit of a level of thread groups, or the whole program, which is around the
    others. `number`: its rank among `siblings` units."""

    level: str
    number: int
    begin: int
    threads: int
    siblings: int = 1
    around: UnitThreads | None = None

    @property
    def name(self) -> str:
        """A name that no other unit of the program has."""
        outer = self.around.name if self.around is not None else ""
        return f"{outer}_{self.level}{self.number}" if self.around is not None else ""

    @property
    def executing(self) -> ExecutingThreads:
        """The unit as a mark of its statements."""
        return ExecutingThreads(self.begin, self.threads, self.name)

    def at(self, level: str) -> UnitThreads | None:
        """The unit of a level that this one is or lies in."""
        if self.level == level:
            return self
        return self.around.at(level) if self.around is not None else None

    def rank(self, level: str) -> int:
        """The rank of the unit of a level that this one is or lies in."""
        return self.inside(level).number

    def inside(self, level: str) -> UnitThreads:
        """The unit of a level that this one is or lies in, where there is one."""
        found = self.at(level)
        assert found is not None, f"{self.name} lies in no {level}"
        return found

    def sibling(self, number: int) -> UnitThreads:
        """The unit of the same level and surroundings with another rank."""
        begin = self.begin + (number - self.number) * self.threads
        return UnitThreads(self.level, number, begin, self.threads, self.siblings, self.around)

    def units(self, level: Level) -> list[UnitThreads]:
        """The units of a finer level inside this one."""
        threads = threads_of(level)
        count, begins = self.threads // threads, range(self.begin, self.begin + self.threads, threads)
        return [UnitThreads(level.name, number, at, threads, count, self) for number, at in enumerate(begins)]

    def barrier(self) -> ir.Stmt:
        """This unit and its siblings synchronize; what each wrote is then visible to the others, bulk copies
        included."""
        return acquired(sync((self.around or self).executing))


def threads_of(level: Level) -> int:
    """Threads of one unit of a level inside the program."""
    assert level.threads is not None, f"{level.name} is no part of a program"
    return level.threads


def branches(thread: ir.Var, units: Sequence[UnitThreads], clones: Sequence[ir.Stmt]) -> ir.Stmt:
    """Clone i on unit i: an exclusive chain of branches, which TileLang runs side by side."""
    marked = [_executed(unit, clone) for unit, clone in zip(units, clones, strict=True)]
    result = marked[-1]
    for unit, clone in reversed(list(zip(units[:-1], marked[:-1], strict=True))):
        end = unit.begin + unit.threads
        if tir.is_nothing(clone):
            result = result if tir.is_nothing(result) else ir.IfThenElse(thread >= end, result, None)
        else:
            result = ir.IfThenElse(thread < end, clone, None if tir.is_nothing(result) else result)
    return result


def _executed(unit: UnitThreads, clone: ir.Stmt) -> ir.Stmt:
    return clone if unit.around is None or tir.is_nothing(clone) else executed(unit.executing, clone)
