# SPDX-License-Identifier: MIT
"""One emulation: the units of a launch, their memory, their activity, and the report of a deadlock."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tilescale.backends.emulator.compiled import Compiled
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.interleave import Interleaved
from tilescale.backends.emulator.execute.memory import address
from tilescale.backends.emulator.execute.observe import Actor, Observer
from tilescale.backends.emulator.execute.queues import CopyQueue
from tilescale.backends.emulator.execute.scheduler import Deadlock, Scheduler
from tilescale.backends.emulator.execute.tasks import Task, Wait
from tilescale.backends.emulator.execute.units import Unit
from tilescale.errors import DeadlockError, Location
from tilescale.hda import Machine
from tilescale.hda.units import format_count
from tilescale.passes.mod_analysis import written_parameters
from tilescale.program.model import Program


@dataclass
class Activity:
    """The activity of one tensor-owning unit (a device).

    Attributes:
        programs: tile programs that ran.
        sent, received: bytes that copies of any unit moved from it to peers and from peers to it.
        messages: number of copies to or from peers that it issued.
        signals: number of flag updates it issued.
        collectives: number of collectives it took part in, by level, name and algorithm.
        contributed: bytes it passed to collectives with other devices.
        workspaces: bytes of memory through which its programs exchange tiles with other devices, for each collective
            of the program: from each sender two messages to each program that is on the device at once.
    """

    programs: int = 0
    sent: int = 0
    received: int = 0
    messages: int = 0
    signals: int = 0
    contributed: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    workspaces: dict[int, int] = field(default_factory=dict)


class Run:
    """The state that all frames of an emulation share."""

    def __init__(
        self,
        program: Program,
        machine: Machine,
        progress: Callable[[int], None],
        observers: Sequence[Observer] = (),
        seed: int | None = None,
        compiled: Compiled | None = None,
    ):
        self.program, self.machine = program, machine
        compiled = compiled or Compiled(program, machine, preempts=seed is not None)
        self.compiler, self.body = compiled.compiler, compiled.body
        self.recorder = recorder = compiled.recorder
        # Every listener sees what orders tasks; the recorder does not need single accesses.
        self.observers = observers
        # Observers of accesses by one statement to one buffer.
        self.watching: dict[Any, Sequence[Observer]] = {}
        self.listeners = (*observers, recorder) if recorder is not None else observers
        self.scheduler = Scheduler(self.listeners) if seed is None else Interleaved(self.listeners, seed)
        if recorder is not None:
            recorder.watches(lambda: self.scheduler.current)
        self.rendezvous: dict[Any, Any] = {}
        self.activity: list[Activity] = []
        # By tensor and line, the tile operations that were wholly out of bounds.
        self.missed: Counter[tuple[str, Location | None]] = Counter()
        # The same for operations partly out of bounds, and for accesses with an index below zero.
        self.clipped: Counter[tuple[str, Location | None]] = Counter()
        self.negative: Counter[tuple[str, Location | None]] = Counter()
        # Parts of outputs that the program did not write, and of tensors that it made different between units.
        self.unwritten: list[tuple[str, Location | None]] = []
        self.diverged: list[tuple[str, Location | None]] = []
        # The flag's name and the line of redundant waits.
        self.redundant_waits: list[tuple[str, Location | None]] = []
        self.grids: list[Any] = []
        self._queues: dict[Unit, CopyQueue] = {}
        self.root = Unit("", 0)
        self._numbers: dict[Unit, int] = {}
        self._signallers: dict[int, dict[Unit, None]] = {}
        # By names of tensor and element, flags that were nonzero at the start, so that waits for them did not block.
        self.stale: dict[tuple[str, str], int] = {}
        self._at_begin: dict[int, int] = {}
        self._ended: list[str] = []
        self._progress = progress
        for observer in observers:
            observer.starts(self)

    @cached_property
    def written(self) -> frozenset[int]:
        """Positions of the parameters that the program writes."""
        return written_parameters(self.program)

    def launch(
        self, extents: list[tuple[str, int]], values: list[dict[int, Any]], mesh: tuple[int, ...] = ()
    ) -> None:
        """Run the program. Raises DeadlockError: no unit can make progress.

        Args:
            extents: units of each launched level above the program, coarsest first; [] for a single device.
            values: for each tensor-owning unit, slot -> its array or scalar.
            mesh: the grid, slowest axis first, where its programs own tensors.
        """
        level = self.machine.tensor_level.name
        levels = extents or [(level, len(values))]
        self.extents, self.mesh = dict(levels), mesh
        units = list(self._units(self.root, levels))
        # Coroutines inherit numpy's error state where they are spawned.
        with np.errstate(all="ignore"), _one_thread():
            for number, unit in enumerate(units):
                self._numbers[unit] = number
                self.activity.append(Activity())
            for unit, mine in self.scheduler.order(list(zip(units, values, strict=True)), len(units)):
                self._spawn(unit, mine)
            try:
                self.scheduler.run()
            except Deadlock as deadlock:
                raise self._deadlock_error(deadlock.waits) from None
            for observer in self.observers:
                observer.ends()

    def _spawn(self, unit: Unit, values: dict[int, Any]) -> None:
        unit.storage.update(values)
        slots: list[Any] = [None] * (self.compiler.slot_count + 1)
        for slot, value in values.items():
            slots[slot] = value
        frame = Frame(self, unit, slots, threads=1)
        self.scheduler.spawn(str(unit), lambda: self.body(frame), lambda: self._unit_ended(unit))

    def _unit_ended(self, unit: Unit) -> None:
        self._ended.append(str(unit))
        if unit in self._queues:
            self._queues[unit].close()

    def queue_of(self, unit: Unit) -> CopyQueue:
        if unit not in self._queues:
            self._queues[unit] = CopyQueue(self, unit)
        return self._queues[unit]

    def is_queue(self, task: str) -> bool:
        """Whether a task of that name is a copy queue."""
        return any(queue.name == task for queue in self._queues.values())

    def _units(self, parent: Unit, levels: list[tuple[str, int]]) -> Iterator[Unit]:
        if not levels:
            yield parent
            return
        (name, extent), *finer = levels
        for rank in range(extent):
            unit = parent.child(name, rank)
            unit.siblings = extent
            yield from self._units(unit, finer)

    # -- events for observers
    # -------------------------------------------------------------------------------------------

    def publishes(self, place: Hashable) -> None:
        for observer in self.listeners:
            observer.publishes(place)

    def acquires(self, place: Hashable) -> None:
        for observer in self.listeners:
            observer.acquires(place)

    def synchronizes(self, frame: Actor) -> None:
        """The threads of a frame, which run in lockstep, synchronize or may synchronize."""
        for observer in self.observers:
            observer.synchronizes(frame)

    # -- statistics
    # --------------------------------------------------------------------------------------------------------

    @property
    def units(self) -> Iterable[Unit]:
        """The units that own tensors, in the order of the arguments."""
        return self._numbers.keys()

    def number(self, unit: Unit) -> int:
        while unit not in self._numbers:
            unit = unit.outer
        return self._numbers[unit]

    def _of(self, unit: Unit) -> Activity:
        return self.activity[self.number(unit)]

    def moved(self, unit: Unit, peer: Unit, size: int, sent: bool) -> None:
        """A unit has copied `size` bytes to or from a peer."""
        mine, other = self._of(unit), self._of(peer)
        if mine is other:
            return
        mine.messages += 1
        source, target = (mine, other) if sent else (other, mine)
        source.sent += size
        target.received += size

    def signalled(self, unit: Unit, level: str | None, flag: int) -> None:
        self._of(unit).signals += 1
        self._signallers.setdefault(flag, {})[unit.around(level) if level else unit] = None

    def flag_at_begin(self, flag: np.ndarray, now: int) -> int:
        return self._at_begin.setdefault(address(flag), now)

    def collected(self, unit: Unit, name: str, level: str, size: int, algorithm: str) -> None:
        account = self._of(unit)
        if self.machine.level(level).kind == "unit":
            account.contributed += size
        label = f"{level} {name} ({algorithm})"
        account.collectives[label] = account.collectives.get(label, 0) + 1

    def exchanged(self, unit: Unit, made: int, size: int) -> None:
        self._of(unit).workspaces[made] = size

    def collectives_of(self, unit: Unit) -> Counter[str]:
        return Counter(self._of(unit).collectives)

    def programs_ended(self, unit: Unit, count: int, collectives: Mapping[str, int]) -> None:
        account = self._of(unit)
        account.programs += count
        for label, times in collectives.items():
            account.collectives[label] = account.collectives.get(label, 0) + times
        self._progress(count)

    def signallers(self, flag: int, lines: list[Location | None]) -> str:
        if not lines:
            return "no statement of the program signals it"
        places = ", ".join(f"{line.file}:{line.line}" for line in lines if line)
        units = list(self._signallers.get(flag, ()))
        if not units:
            return f"no unit has signalled it; the program signals it at {places}"
        ranks = {u.rank for u in units}
        absent = [r for r in range(units[0].siblings) if r not in ranks]
        done = f"signalled so far by {'; '.join(map(str, units[:8]))}"
        missing = f"; not by {units[0].siblings_named(absent)}" if absent else ""
        return f"{done}{missing}; the program signals it at {places}"

    # -- deadlock ------------------------------------------------------------------------------------------------------

    def _deadlock_error(self, waits: Mapping[Task, Wait]) -> DeadlockError:
        self.observers = ()  # reads of memory for the report are not accesses
        waits = {task: wait for task, wait in waits.items() if not wait.quiet}
        groups: dict[tuple[str, str, Location | None], list[Task]] = {}
        for task, wait in waits.items():
            groups.setdefault((wait.what, wait.seen(), wait.where), []).append(task)
        waiting = f"{format_count(len(waits), 'unit')} wait{'s' * (len(waits) == 1)}"
        lines = [f"deadlock: {waiting} and no unit can make progress"]
        for (what, seen, _), members in list(groups.items())[:8]:
            lines.append(f"  {_some([t.name for t in members])} wait{'s' if len(members) == 1 else ''} for {what}")
            details = f"now: {seen}" if seen else "", waits[members[0]].missing()
            lines += [f"    {text}" for text in details if text]
        if len(groups) > 8:
            lines.append(f"  ... and {len(groups) - 8} more groups")
        lines += self._queued_behind()
        lines += self._not_resident()
        if self._ended:
            lines.append(f"  {_some(self._ended)} ended without waiting")
        hint = "signal what is waited for before waiting, or let every unit reach the same barriers"
        where = [w for (*_, w) in list(groups)[:8] if w]
        return DeadlockError("\n".join(lines), hint=hint, where=list(dict.fromkeys(where)))

    def _queued_behind(self) -> list[str]:
        lines = []
        for queue in self._queues.values():
            places = [f"{where.file}:{where.line}" for where in queue.behind()]
            if places:
                count = f"{len(places)} more copies" if len(places) > 1 else "one more copy"
                started = ", ".join(dict.fromkeys(places))
                lines.append(f"  behind what {queue.name} executes, {count} wait{'s' * (len(places) == 1)}: {started}")
        return lines

    def _not_resident(self) -> list[str]:
        lines = []
        for grid in self.grids:
            left = grid.not_started
            if left:
                what = self.machine.program_level.name
                lines.append(
                    f"  {grid.device.unit} holds {grid.plan.resident} {what}s at once; {left} of {grid.count} have not "
                    f"started, and those that run wait: launch at most {grid.plan.resident} that wait for each other"
                )
        return lines


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Run numpy with one thread: tiles are small, so that splitting a GEMM costs more than computing it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _some(names: list[str]) -> str:
    shown = "; ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown}; and {len(names) - 3} more"
