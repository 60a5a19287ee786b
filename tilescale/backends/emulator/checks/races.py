# SPDX-License-Identifier: MIT
"""Races: unordered accesses to one element by two tasks, at least one of them a write.

Tasks are programs, and the concurrent parts of a program: warpgroups, roles, branches. Threads that run in lockstep are
one task. Memory that only one task can reach is not checked.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tilescale.backends.emulator.checks.clocks import Clock, Place
from tilescale.backends.emulator.checks.explain import LATELY, Mark, Race, race_error
from tilescale.backends.emulator.checks.flags import Flag, Update
from tilescale.backends.emulator.checks.phases import Phases
from tilescale.backends.emulator.checks.redundant import RedundantWaits
from tilescale.backends.emulator.checks.shadow import Memory, Shadow
from tilescale.backends.emulator.checks.states import Access, Conflict, Table
from tilescale.backends.emulator.checks.text import memory_of
from tilescale.backends.emulator.execute.barriers import MBarrier
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.observe import DEVICE_ATOMIC, READ, WRITE, Observer
from tilescale.backends.emulator.execute.tasks import Task
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.backends.emulator.run import Run
from tilescale.errors import Location

_PROGRAM = 1
"""Depth of programs in the tree of tasks: below their device's task."""


class _Cells(Shadow):
    """The state number of every element, and the flags among them by address."""

    def __init__(self, owner: np.ndarray, given: bool):
        super().__init__(owner, np.int32)
        self.flags: dict[int, Flag] = {}


class Races(Observer[Frame, Home]):
    """Raises a RaceError at the second of two racing accesses."""

    def starts(self, run: Run) -> None:
        self._run = run
        self._memory: Memory[_Cells] = Memory(_Cells)
        self._waits = RedundantWaits()
        self._table = Table(self._waits.ordered)
        self._phases = Phases(self._waits.rests)
        self._clocks: dict[Task, Clock] = {}
        # Tensors that other devices reach, and that atomics of one device's scope have updated.
        self._of_one_device: set[int] = set()
        # Barrier -> its generation -> what the tasks published there.
        self._places: weakref.WeakKeyDictionary[Any, dict[Any, Place]] = weakref.WeakKeyDictionary()
        self._in_clusters = any(launch.cluster_size > 1 for launch in run.program.launches)

    @cached_property
    def _constant(self) -> set[int]:
        """Parameters that no unit writes, and whose tensors are not arguments of a written parameter either."""
        program, compiler, root = self._run.program, self._run.compiler, self._run.root
        written = self._run.written
        slots = {
            compiler.root(compiler.slot(p.buffer.data)): i in written
            for i, p in enumerate(program.parameters)
            if p.buffer is not None
        }
        changed = {extents for slot, writes in slots.items() if writes for extents in memory_of(root, slot)}
        return {slot for slot in slots if changed.isdisjoint(memory_of(root, slot))}

    def looks_at(self, home: Home) -> bool:
        return not home.private and home.root not in self._constant

    @property
    def _clock(self) -> Clock:
        return self._clocks[self._run.scheduler.current]

    # -- order ---------------------------------------------------------------------------------------------------------

    def begins(self, task: Task) -> None:
        parent = self._clocks[task.parent] if task.parent is not None else None
        self._clocks[task] = Clock(task.name, parent)

    def joins(self, ended: Sequence[Task]) -> None:
        self._clock.join([self._clocks.pop(task) for task in ended])

    def _place(self, place: Hashable) -> Place:
        owner, iteration = (place[0], place[1:]) if isinstance(place, tuple) else (place, ())
        return self._places.setdefault(owner, {}).setdefault(iteration, Place())

    def publishes(self, place: Hashable) -> None:
        self._place(place).publish(self._clock.publish())

    def acquires(self, place: Hashable) -> None:
        self._place(place).acquire(self._clock)

    def passes(self, frame: Frame, barrier: MBarrier, phase: int, where: Location | None) -> None:
        clock, last = self._clock, phase
        self._phases.passes(barrier, clock, frame.unit, where)
        while phase > 0 and not any(self._has_begun(clock, barrier, later) for later in range(phase, last + 1)):
            phase -= 2
        if phase >= 0:
            self.acquires((barrier, phase))

    def completes(self, barrier: MBarrier, phase: int, where: Location | None) -> None:
        self._phases.ends(barrier, phase, self._place((barrier, phase)), where)

    def _has_begun(self, clock: Clock, barrier: object, phase: int) -> bool:
        """Whether a task knows that a barrier is in a phase, or past it."""
        places = (self._place((barrier, n)) for n in (phase, phase - 1))
        mine, before = ([self._knows(clock, *arrival) for arrival in place.arrived.items()] for place in places)
        return any(mine) or (bool(before) and all(before))

    def _knows(self, clock: Clock, other: Clock, time: int) -> bool:
        known = clock.knows(other, time)
        if known:
            self._waits.rests(clock, other, time)
        return known

    def signals(self, frame: Frame, home: Home, flag: np.ndarray, op: str, before: int) -> None:
        clock = self._clock
        clock.signals = (*clock.signals[-LATELY:], Mark(home, flag, clock.time))
        update = Update(before, flag.item(), clock.publish(), stores=op == "set")
        self._flag(flag, before).add(update)

    def waited(self, frame: Frame, home: Home, flag: np.ndarray, holds: Callable[[Any], bool]) -> None:
        clock, value = self._clock, flag.item()
        clock.waits, clock.notes = (*clock.waits[-LATELY:], Mark(home, flag, clock.time)), {}
        found = self._flag(flag, value)
        found.settle(value)
        self._waits.wait(home, found, clock, holds)

    def orders(self, frame: Frame, array: np.ndarray, index: Any, op: str, order: str) -> None:
        if index[0].size == 0:
            return
        flags = self._memory.of(array).flags
        acquires = order in ("consume", "acquire", "acq_rel", "seq_cst") and op != "store"
        releases = order in ("release", "acq_rel", "seq_cst") and op != "load"
        if not flags and not releases:
            return
        clock = self._clock
        past = clock.publish() if releases else clock.past
        for place in np.unique(np.stack(index), axis=1).T:
            element = array[tuple(slice(i, i + 1) for i in place)].reshape(1)
            number = element.__array_interface__["data"][0]
            if number not in flags and not releases:
                continue
            flag = flags.setdefault(number, Flag(element.item()))
            if acquires:
                flag.load(clock)
            if op != "load":
                flag.add(Update(flag.value, element.item(), past, releases, stores=op == "store"))

    def _flag(self, flag: np.ndarray, value: int) -> Flag:
        flags = self._memory.of(flag).flags
        return flags.setdefault(flag.__array_interface__["data"][0], Flag(value))

    def ends(self) -> None:
        run = self._run
        if run.program.extents and 1 in run.extents.values():
            return  # executed by one unit for many, so that the rest finds it done
        if self._waits.left:
            clocks = {clock.name: clock for task, clock in self._clocks.items() if task.parent is None}
            for unit in run.units:
                for array in unit.storage.values():
                    if isinstance(array, np.ndarray):
                        self._returned(unit, array, clocks[str(unit)])
        run.redundant_waits = self._waits.left

    def _returned(self, unit: Unit, array: np.ndarray, clock: Clock) -> None:
        """Memory, flags aside, that returns to a unit: it must have acquired what other units did there."""
        shadow = self._memory.of(array)
        if shadow.flags:
            return
        for number in np.unique(shadow.view(array)):
            for access in self._table[number].accesses():
                if self._run.number(access.unit) != self._run.number(unit):
                    self._waits.rests(clock, access.clock, access.time)

    # -- accesses ------------------------------------------------------------------------------------------------------

    def accesses(self, frame: Frame, home: Home, kind: str, array: np.ndarray, index: Any) -> None:
        clock = self._clocks[self._run.scheduler.current]
        if not (home.guarded or self._is_shared(home, clock)) or array.size == 0:
            return
        if self._table.full:
            self._table.keep(shadow.cells for shadow in self._memory)
        shadow = self._memory.of(array)
        cells = shadow.view(array)
        try:
            self._record(cells, index, self._access(clock, kind, home, frame, shadow))
        except Conflict as conflict:
            access = self._access(clock, kind, home, frame, shadow)
            hit = np.asarray(cells[index]) == conflict.number
            race = Race(conflict.other, access, self._table[conflict.number])
            raise race_error(self._run, race, shadow.box(array, index, hit), shadow.owner) from None

    def _is_shared(self, home: Home, clock: Clock) -> bool:
        """Whether on-chip memory is reached by tasks other than the program's."""
        return clock.depth > _PROGRAM or self._in_clusters or home.root in self._run.compiler.reached

    def _access(self, clock: Clock, kind: str, home: Home, frame: Frame, shadow: _Cells) -> Access:
        key = kind, home, frame.unit
        found = clock.notes.get(key)
        if found is None:
            if kind == DEVICE_ATOMIC and home.root in self._run.compiler.reached:
                self._of_one_device.add(home.root)
            mixed = kind not in (READ, WRITE) and (shadow.mixed or home.root in self._of_one_device)
            number, width = self._run.number(frame.unit), home.dtype.itemsize
            found = Access(clock, clock.time, kind, home, frame.unit, clock.waits, number, width, mixed)
            clock.notes[key] = found
        return found

    def _record(self, cells: np.ndarray, index: Any, access: Access) -> None:
        before = cells[index]
        if before.size == 0:
            return
        low = int(before.min())
        if low == before.max():
            after = self._table.after(low, access)
            if after != low:
                cells[index] = after
            return
        flat = before.reshape(-1)
        begins = np.append(0, np.flatnonzero(flat[1:] != flat[:-1]) + 1)  # States come in runs: rows of tiles.
        numbers, where = np.unique(flat[begins], return_inverse=True)
        following = np.array([self._table.after(int(n), access) for n in numbers], np.int32)
        cells[index] = np.repeat(following[where], np.diff(begins, append=flat.size)).reshape(before.shape)
