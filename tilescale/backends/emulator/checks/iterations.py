# SPDX-License-Identifier: MIT
"""Races between iterations of one parallel loop, on tiles in shared memory and on device memory.

The iterations are executed by threads in no order, but the emulator evaluates each statement of the body for all of
them at once. A race is reported where an iteration loads an element that another one stores, or both store it, unless
they store the same value. TileLang inserts a barrier between two statements of a body for a tile in shared memory: it
orders them if each thread executes at most one iteration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from tilelang_core import ir
from tilelang_core.accesses import BufferAccess, accesses_in
from tilescale.backends.emulator.checks.in_program import InProgram
from tilescale.backends.emulator.checks.shadow import Memory, Shadow, touched_cells
from tilescale.backends.emulator.execute.frame import Frame, active
from tilescale.backends.emulator.execute.observe import READ, WRITE
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.run import Run
from tilescale.errors import RaceError
from tilescale.program.parallel_loops import loops_of

_SEVERAL = -1
"""Marks a cell that more than one iteration loads."""


class Iterations(InProgram):
    """Raises a RaceError at the second of two racing accesses by iterations of a parallel loop."""

    def starts(self, run: Run) -> None:
        super().starts(run)
        last = np.dtype([("execution", "i4"), ("iteration", "i4"), ("place", "i4")])
        cell = np.dtype([("loaded", last), ("stored", last)])
        self._memory: Memory[Shadow] = Memory(lambda owner, given: Shadow(owner, cell))
        self._execution = 0
        self._dependent: dict[ir.Stmt, tuple[set[int], set[int]]] = {}

    def looks_at(self, home: Home) -> bool:
        loops = [] if home.of_tile or not home.shared else loops_of(home.step)
        return bool(loops) and home.root in self._roots(home)[0]

    def _roots(self, home: Home) -> tuple[set[int], set[int]]:
        """The memory whose elements several iterations of a loop may use, and that of it where one statement does."""
        if home.step not in self._dependent:
            variables = [loop.loop_var for loop in loops_of(home.step)]
            whole = self._shared(accesses_in(home.step), variables)
            statements = (accesses_in(s) for s in ir.statements(home.step) if not any(ir.children(s)))
            self._dependent[home.step] = whole, {root for s in statements for root in self._shared(s, variables)}
        return self._dependent[home.step]

    def _shared(self, found: Iterable[BufferAccess], variables: list[ir.Var]) -> set[int]:
        """The memory that is stored to, other than at one index that differs between all iterations."""
        by_root: dict[int, list[BufferAccess]] = {}
        for access in found:
            compiler = self._run.compiler
            by_root.setdefault(compiler.root(compiler.slot(access.buffer.data)), []).append(access)
        return {root for root, some in by_root.items() if any(a.writes for a in some) and not _own(some, variables)}

    def iterates(self, frame: Frame) -> None:
        self._execution += 1

    def accesses(self, frame: Frame, home: Home, kind: str, array: np.ndarray, index: Any) -> None:
        if array.size == 0 or kind not in (READ, WRITE) or self._orders(frame, home):
            return
        shadow, items = self._memory.of(array), np.flatnonzero(active(frame))
        cells = touched_cells(frame, home, shadow.numbers(array), index, items)
        if cells.size == items.size:
            self._record(frame, home, kind, shadow, cells, items)

    def _orders(self, frame: Frame, home: Home) -> bool:
        """Whether barriers between the statements of the body order all iterations."""
        threads = frame.threads if frame.own is None else int(np.count_nonzero(frame.own))
        return not home.guarded and home.root not in self._roots(home)[1] and math.prod(frame.space) <= threads

    def _record(
        self, frame: Frame, home: Home, kind: str, shadow: Shadow, cells: np.ndarray, items: np.ndarray
    ) -> None:
        """Note an access. Raises RaceError: another iteration has stored an element of it, or it stores one that
        another has loaded."""
        for earlier, verb in (("stored", WRITE), ("loaded", READ))[: 1 + (kind == WRITE)]:
            last = shadow.cells[earlier][cells]
            hit = cells[(last["execution"] == self._execution) & (last["iteration"] != items)]
            if hit.size:
                first = self._places[shadow.cells[earlier]["place"][hit[0]]]
                raise self._error(frame, (first, verb), (home, kind), shadow, hit)
        last = shadow.cells["stored" if kind == WRITE else "loaded"]
        again = (last["execution"][cells] == self._execution) & (last["iteration"][cells] != items)
        last["iteration"][cells] = np.where(again, _SEVERAL, items)
        last["execution"][cells], last["place"][cells] = self._execution, self._place(home)
        several = cells[last["iteration"][cells] != items]
        if kind == WRITE:
            last["execution"][several] = 0  # they store the same value, or `stored` reports them
        else:
            last["iteration"][several] = _SEVERAL

    def stored(self, frame: Frame, home: Home, array: Any, index: tuple, values: np.ndarray) -> None:
        now = array[index]
        lost = (now != values) & ((now == now) | (values == values))  # noqa: PLR0124 - one NaN is like another
        if lost.any():
            memory, where = home.located(array, tuple(axis[lost] for axis in index))
            shadow = self._memory.of(memory)
            raise self._error(frame, (home, WRITE), (home, WRITE), shadow, np.asarray(shadow.numbers(memory)[where]))

    def _error(
        self, frame: Frame, first: tuple[Home, str], second: tuple[Home, str], shadow: Shadow, cells: np.ndarray
    ) -> RaceError:
        hint = "iterations of T.Parallel run in no order: store to another tile than the loop loads"
        if first[1] == second[1] == WRITE:
            hint = "iterations of T.Parallel run in no order: store each element in one of them, or add by T.atomic_add"
        said = self._race(frame, "iteration", (first, second), shadow, cells, "in one parallel loop", hint)
        said.where = tuple(dict.fromkeys(said.where))
        return said


def _own(accesses: list[BufferAccess], variables: list[ir.Var]) -> bool:
    """Whether all accesses are of one element, another one for each iteration."""
    first = accesses[0].begins
    if first is None or any(a.begins is None or not _alike(a.begins, first) for a in accesses):
        return False
    return all(any(n.same_as(v) for n in first) for v in variables)


def _alike(one: tuple[ir.PrimExpr, ...], other: tuple[ir.PrimExpr, ...]) -> bool:
    return len(one) == len(other) and all(map(ir.same, one, other))
