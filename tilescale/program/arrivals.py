# SPDX-License-Identifier: MIT
"""The signals that a device's flags get during a call, and whether all of them are waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from tilelang_core import ir
from tilelang_core.accesses import leaves_loop
from tilescale.hda import Machine
from tilescale.program.dependence import Dependence, ProgramStep
from tilescale.program.effects import Access, Acquire, PeerUnit, Release
from tilescale.program.grids import GridValues, UnknownValue, grid_of
from tilescale.program.ops import SCALE
from tilescale.program.waiting import TRIED


def is_scale(stmt: ir.Stmt) -> bool:
    """Whether a statement is a region that units of a level execute."""
    return isinstance(stmt, ir.AttrStmt) and str(stmt.attr_key) == SCALE


def by_whole_programs(scale: ir.AttrStmt, machine: Machine) -> bool:
    """Whether a region is executed by programs, or devices, as a whole: not by parts or clusters of them."""
    return machine.level(str(scale.value.value)).kind in ("unit", "program")


class SignalArrivals:
    """The signals that flags get during a call, and how many of them are waited for, counted over all units."""

    def __init__(self, graph: Dependence, sizes: Mapping[str, int]):
        self.graph, self.sizes = graph, sizes
        ((self.level, self.devices),) = sizes.items()
        self._shared: set[int] = set()
        for step in graph.steps:
            if is_scale(step.stmt) and not by_whole_programs(step.stmt, graph.machine):
                self._shared |= set(range(step.number, step.number + len(list(ir.statements(step.stmt)))))

    def awaited(self) -> frozenset[ir.Var]:
        """Flags of which each device has waited for all signals before its call ends."""
        zeroed = {data for launch in self.graph.program.launches for data in launch.flags}
        return frozenset() if self.graph.is_opaque else frozenset(flag for flag in zeroed if self._is_awaited(flag))

    def _is_awaited(self, flag: ir.Var) -> bool:
        steps = [s for s in self.graph.steps if any(a.root.same_as(flag) for a in s.effects.accesses)]
        signals: Counter[tuple[int, ...]] = Counter()
        wanted: dict[tuple[int, ...], int] = {}
        try:
            for step, device in product(steps, range(self.devices)):
                known: list[Release | Acquire] = [*step.effects.releases, *step.effects.acquires]
                events = [event for event in known if event.flag.root.same_as(flag)]
                touched = [a for a in step.effects.accesses if a.root.same_as(flag)]
                if any(all(a is not event.flag for event in events) for a in touched):
                    return False  # it is changed, or looked at, by other means
                for event in events:
                    self._count(step, event, device, signals, wanted)
        except UnknownValue:
            return False
        return bool(signals) and all(wanted.get(place, 0) >= count for place, count in signals.items())

    def _count(
        self,
        step: ProgramStep,
        event: Release | Acquire,
        device: int,
        signals: Counter[tuple[int, ...]],
        wanted: dict[tuple[int, ...], int],
    ) -> None:
        """Add what a step does on one device: for each flag, of (device, index), signals or the number waited for."""
        if step.phase is None or step.launch is None or step.number in self._shared:
            raise UnknownValue
        grid = grid_of(step.phase, step.launch, self.graph.machine, self.sizes, {self.level: device})
        if grid is None:
            raise UnknownValue
        for at, runs in _iterations(step, grid):
            if isinstance(event, Release) and event.value is None:
                for _ in filter(None, runs):
                    signals.update(self._raised(event.flag, device))
                continue
            for place, number in self._values(event, device, grid, at, runs):
                if isinstance(event, Release):
                    if event.op != "add" or number <= 0:
                        raise UnknownValue
                    signals[place] += number
                elif event.compare in _AT_LEAST:
                    wanted[place] = max(wanted.get(place, 0), number + _AT_LEAST[event.compare])

    def _values(
        self, event: Release | Acquire, device: int, grid: GridValues, at: Mapping[ir.Var, int], runs: Sequence[bool]
    ) -> Iterator[tuple[tuple[int, ...], int]]:
        """The flag, of (device, index), and the value of each program that comes to a signal or a wait."""
        index = [_column(grid, begin, at) for begin in _begins(event.flag)]
        values = _column(grid, event.value, at)
        whose = self._whose(event.flag.at, device, grid, at)
        for place, value, active in zip(zip(whose, *index, strict=True), values, runs, strict=True):
            if active:
                yield place, value

    def _whose(self, peer: PeerUnit | None, device: int, grid: GridValues, at: Mapping[ir.Var, int]) -> list[int]:
        if peer is None:
            return [device] * grid.count
        if peer.rank is None or peer.level != self.level:
            raise UnknownValue
        return _column(grid, peer.rank, at)

    def _raised(self, flags: Access, device: int) -> list[tuple[int, ...]]:
        """The flags that a started collective raises for the sends of one device: its row of flags, on all devices."""
        shape = [ir.constant(n) for n in flags.extents or ()]
        if len(shape) != 2 or shape[1] is None or shape[0] != self.devices:
            raise UnknownValue
        if any(ir.constant(begin) != 0 for begin in _begins(flags)):
            raise UnknownValue
        return [(there, device, chunk) for there in range(self.devices) for chunk in range(shape[1])]


_AT_LEAST = {">=": 0, "==": 0, ">": 1}
"""Comparisons that hold only after a number of signals: the offset to the compared value."""


def _begins(flag: Access) -> tuple[Any, ...]:
    if flag.begins is None:
        raise UnknownValue
    return flag.begins


def _column(grid: GridValues, expr: ir.PrimExpr, at: Mapping[ir.Var, int]) -> list[int]:
    return np.broadcast_to(grid.value(expr, at), (grid.count,)).tolist()


def _iterations(step: ProgramStep, grid: GridValues) -> list[tuple[dict[ir.Var, int], list[bool]]]:
    """Values of the loop variables around a step, and in which programs it runs with them. Raises Unknown: loops or
    conditions that are not known before the launch, or too many iterations to try."""
    found: list[tuple[dict[ir.Var, int], Any]] = [({}, np.ones(grid.count, bool))]
    for around in step.around:
        following = []
        for at, runs in found:
            if isinstance(around, ir.While) or isinstance(around, ir.For) and ir.contains(around, leaves_loop):
                raise UnknownValue
            if isinstance(around, ir.For):
                begin, extent = (np.broadcast_to(grid.value(e, at), (grid.count,)) for e in (around.min, around.extent))
                low, high = int(begin.min(initial=0)), int((begin + extent).max(initial=0))
                if prod((len(found), high - low, grid.count)) > TRIED:
                    raise UnknownValue
                inside = [(i, runs & (begin <= i) & (i < begin + extent)) for i in range(low, high)]
                following += [({**at, around.loop_var: i}, now) for i, now in inside]
            else:
                stmt, taken = around
                holds = np.broadcast_to(grid.value(stmt.condition, at), (grid.count,)).astype(bool)
                following.append((at, runs & (holds if taken else ~holds)))
        found = following
    return [(at, runs.tolist()) for at, runs in found if runs.any()]
