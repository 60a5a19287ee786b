# SPDX-License-Identifier: MIT
"""The recorder: the steps of all tasks of a run, for the simulation of time.

The steps come from the costs of operations (costs.py, transfers.py) and, for the order of tasks, from the events of
observers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.memory import address
from tilescale.backends.emulator.execute.observe import Observer
from tilescale.backends.emulator.execute.queues import Start
from tilescale.backends.emulator.execute.tasks import Task
from tilescale.backends.emulator.execute.unit_rendezvous import Moves, Rendezvous
from tilescale.backends.emulator.interpret.buffers import Home
from tilescale.collectives.routes import Sizes
from tilescale.collectives.select import numbering
from tilescale.errors import Location
from tilescale.hda import Machine, Mechanism
from tilescale.timing import steps
from tilescale.timing.epilogues import PersistentTask
from tilescale.timing.plans import CollectivePlans
from tilescale.timing.rates import Rates, TileCache, bandwidth, cache_name
from tilescale.timing.record import CacheLookup, TaskLog
from tilescale.timing.replay import Simulation
from tilescale.timing.steps import (
    AcquireStep,
    LaunchStep,
    PublishStep,
    SettleStep,
    UnitResource,
    WorkPart,
    WorkStep,
    merged,
)
from tilescale.timing.steps import RecordedTask as Recorded
from tilescale.timing.timeline import Timeline
from tilescale.timing.united import ClusterLog

COPY_QUEUE = "copy queue"
"""The name of a tensor-owning unit's queue among its engines."""

Tile = Callable[[Frame], tuple[Hashable, int]]
"""The identity of an operation's tile, and its bytes."""


class Recorder(Observer[Frame, Home]):
    """The record of one run.

    Args:
        extents: units of each launched level down to the one that owns tensors, coarsest first.
        grid: extents of the grid, the slowest axis first, where programs own tensors.
    """

    def __init__(self, machine: Machine, extents: Sequence[tuple[str, int]], grid: tuple[int, ...] = ()):
        self.machine, self.rates = machine, Rates(machine)
        self.extents = dict(extents)
        self.sizes: Sizes = numbering(machine, self.extents, grid)
        self.plans = CollectivePlans(machine, self.sizes)
        self._memory = self.rates.layers["global"]
        self._queue = _queue(machine)
        self._clear()

    def _clear(self) -> None:
        self._roots: list[TaskLog] = []
        self._queues: list[TaskLog] = []
        # The latency that remains before a queue moves the first bytes of an operation.
        self._starting: dict[TaskLog, AcquireStep] = {}
        self._logs: dict[Task, TaskLog | ClusterLog] = {}
        self._counts: dict[Hashable, int] = {}
        self._values: dict[Hashable, Any] = {}
        # Flags by address, and their last known values.
        self._flags: dict[Hashable, np.ndarray] = {}
        self._seen: dict[Hashable, Any] = {}
        self._caches: dict[int, TileCache] = {}

    def take(self) -> Recorder:
        """The record of the run that has ended, as a recorder of its own; this one is empty after it."""
        self._join_queues()
        record = copy.copy(self)
        self._clear()
        return record

    def _join_queues(self) -> None:
        """The call ends when its queues do, where they move anything."""
        for queue in self._queues:
            if any(isinstance(step, WorkStep) for step in queue.task.steps):
                place, seconds = ("join", queue.task.row), self._queue.fork_and_join
                queue.step(PublishStep(place, name="join"))
                root = self._roots[queue.task.row]
                root.step(AcquireStep(place, 1, "fork and join", None, delay_s=seconds, idle=True))

    def watches(self, current: Callable[[], Task]) -> None:
        """Set a callback: the acting task."""
        self.current = current

    @property
    def log(self) -> TaskLog | ClusterLog:
        return self._logs[self.current()]

    def timeline(self) -> Timeline:
        """The simulation of all that was recorded."""
        level = self.machine.tensor_level.name
        program = self.machine.program_level.name
        replay = Simulation(level, program, self.rates.places, self.rates.kinds, self._values)
        return replay.run([log.task for log in self._roots], [log.task for log in self._queues])

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def begins(self, task: Task) -> None:
        if task.started_by is not None:
            log = TaskLog(Recorded(task.name, self._logs[task.started_by].task.row, engine=COPY_QUEUE))
            self._queues.append(log)
        elif task.parent is None:
            log = TaskLog(Recorded(task.name, len(self._roots)))
            self._roots.append(log)
        else:
            parent = self._logs[task.parent]
            log = parent.begins(task.name.removeprefix(task.parent.name).removeprefix(", "))
            if isinstance(parent.family, LaunchStep) and not parent.family.alike:
                self._starts(log.task.row, 1)
        self._logs[task] = log

    def joins(self, ended: Sequence[Task]) -> None:
        self.log.joins()
        for task in ended:
            del self._logs[task]

    def unites(self, tasks: Sequence[Task]) -> None:
        """The current task acts for all of a cluster's programs, until `divides`: each does its share."""
        own, barrier = self.own_log, self.machine.program_level.barrier
        self._logs[self.current()] = ClusterLog([self.log_of(task) for task in tasks], own, barrier)

    def divides(self) -> None:
        self._logs[self.current()] = self.own_log

    def begins_persistent_loop(self) -> bool:
        """The current task begins a persistent loop. Returns whether its roles are recorded, until
        `ends_persistent_loop`."""
        log = self.log
        if not isinstance(log, TaskLog) or log.loops or log.muted or log.ahead is not None:
            return False
        self._logs[self.current()] = PersistentTask(log)
        return True

    def waits_for_epilogue(self) -> None:
        """The following steps overwrite the tile that the loop's last epilogue has been handed."""
        if isinstance(self.log, PersistentTask):
            self.log.waits_for_room()

    @contextlib.contextmanager
    def as_epilogue(self, begins: bool, ends: bool) -> Iterator[None]:
        """The following steps belong to the epilogue role of the current task's loop."""
        log = self.log
        if not isinstance(log, PersistentTask):
            yield
            return
        self._logs[self.current()] = log.hands_over() if begins else log.epilogue
        yield
        self._logs[self.current()] = log
        if ends:
            log.is_taken()

    def ends_persistent_loop(self) -> None:
        """The loop and its epilogues end."""
        if isinstance(self.log, PersistentTask):
            self._logs[self.current()] = self.log.around

    def launches(self, count: int, resident: int, group: int, where: Location | None, same: bool) -> None:
        """The current task starts a grid of programs, of which `resident` fit on the machine at once. Where programs
        have the `same` steps, those that are not run are reported by `repeats` or `takes_over`, and all starts by
        `starts`."""
        places, log = self.rates.places, self.own_log
        if self._memory.cache_capacity:
            self._caches[log.task.row] = self._caches.get(log.task.row) or TileCache(
                self._memory.cache_capacity, resident
            )
            self._caches[log.task.row].together = resident
        seconds = self.machine.tensor_level.launch
        log.launch(LaunchStep(places, max(resident // places, 1), group, seconds, f"launch of {count}", where, same))

    # -- programs with equal steps -------------------------------------------------------------------------------------

    @property
    def launched(self) -> LaunchStep:
        """The grid that the current task has started."""
        launched = self.log.family
        assert isinstance(launched, LaunchStep)
        return launched

    @property
    def own_log(self) -> TaskLog:
        """The log of the current task alone, also where it acts for a cluster."""
        return self.log_of(self.current())

    def log_of(self, task: Task) -> TaskLog:
        """The log of a task that has not been joined, without the rest of its cluster."""
        log = self._logs[task]
        return log.own if isinstance(log, ClusterLog) else log

    def repeats(self, name: str, task: Recorded) -> None:
        """A program of the current task's grid repeats the steps of another one."""
        self.launched.tasks.append(Recorded(name, task.row, task.steps))

    def takes_over(self, tasks: list[Recorded], cache: TileCache | None) -> None:
        """The current task's grid repeats the steps of another one, after which the cache's content is as given."""
        self.launched.tasks = tasks
        if cache is not None:
            self._caches[self.log.task.row] = cache.copy()

    def current_cache(self) -> TileCache | None:
        """The content of the cache of the current task's tensor-owning unit."""
        return self._caches.get(self.log.task.row)

    def starts(self, count: int) -> None:
        """`count` programs of the current task's grid start."""
        self._starts(self.log.task.row, count)

    def _starts(self, row: int, count: int) -> None:
        if row in self._caches:
            self._caches[row].starts(count)

    def in_cache(self, tile: Hashable, nbytes: int) -> bool:
        """Whether the cache has a tile that the current task, or a program of it, accesses now."""
        cache = self.current_cache()
        return cache is not None and cache.holds(tile, nbytes)

    # -- order ---------------------------------------------------------------------------------------------------------

    def publishes(self, place: Hashable) -> None:
        if isinstance(place, Rendezvous):
            return
        self._counts[place] = self._counts.get(place, 0) + self.log.width
        named = place if isinstance(place, Start) else self.log.place(place)
        self.log.step(PublishStep(named, name="arrival"))

    def acquires(self, place: Hashable) -> None:
        if place not in self._counts:
            return
        if isinstance(place, Start):
            self.log.step(AcquireStep(place, 1, "start", place.where, idle=True))
            self._starting[self.own_log] = AcquireStep(place, 1, "start-up", place.where, lag_s=self._queue.startup)
        else:
            delay = self.machine.program_level.barrier
            self.log.step(AcquireStep(self.log.place(place), self._counts[place], "barrier", None, delay_s=delay))

    def flag(self, element: np.ndarray) -> Hashable:
        """The record of a flag, whose value is known from now on."""
        place = "flag", address(element)
        if place not in self._values:
            self._flags[place] = flat = element.reshape(-1)
            self._values[place] = self._seen[place] = flat[0].item()
        return place

    def signal(
        self, element: np.ndarray, op: str, value: Any, delay_s: float, where: Location | None, name: str
    ) -> None:
        """The current task is about to update a flag."""
        place = self.flag(element)
        self._seen[place] = value if op == "set" else self._seen[place] + value
        self._changes(place, op, value, PublishStep(place, delay_s=delay_s, name=name, where=where))

    def _changes(self, place: Hashable, op: str, value: Any, step: PublishStep) -> None:
        self._counts[place] = self._counts.get(place, 0) + 1
        step.change = (lambda _: value) if op == "set" else (lambda old: old + value)
        self.log.step(step)

    def written(self, op: str) -> None:
        """The current task may have changed flags by means other than signals: a store ("set"), an atomic ("add")."""
        for place, element in self._flags.items():
            now, before = element[0].item(), self._seen[place]
            if now != before:
                self._seen[place] = now
                self._changes(place, op, now if op == "set" else now - before, PublishStep(place, name="store"))

    def waited(self, frame: Frame, home: Home, flag: np.ndarray, holds: Callable[[Any], bool]) -> None:
        place = self.flag(flag)
        count = self._counts.get(place, 0)
        if count:
            # A queue that waited for a flag starts up again.
            delay = self._queue.startup if self.log.task.engine == COPY_QUEUE else 0.0
            self.log.step(AcquireStep(place, count, f"wait for {home.name}", home.where, holds, delay))

    def polled(self, element: np.ndarray, where: Location | None) -> None:
        """A polling loop of the current task has ended with the value it read from a flag."""
        place = self.flag(element)
        count, seen = self._counts.get(place, 0), self._seen[place]
        if count:
            self.log.step(AcquireStep(place, count, "wait in a loop", where, lambda value: value == seen))

    def settle(self, left: int) -> None:
        """The current task waits until at most `left` of its asynchronous copies are in flight."""
        self.log.step(SettleStep(left))

    def rendezvous(self, call: Rendezvous, rank: int, name: str, level: str, moves: Moves, on_tiles: bool) -> None:
        inside = self.machine.index(level) < self.machine.index(self.machine.tensor_level.name)
        place, where = self.log.place(call) if inside else call, call.where
        in_slots = on_tiles and not inside and moves.nbytes > 0

        def work(rows: tuple[int, ...]) -> WorkStep:
            sent = moves.operation, level, rows, moves.nbytes, moves.algorithm, on_tiles
            plan = self.plans.plan(*sent, call.parts)
            kind = "sync" if name == "barrier" else "collective"
            written = [self._slots(row, plan.nbytes + moves.nbytes) for row in set(rows) if in_slots]
            part = WorkPart(f"{name} ({plan.algorithm})", kind, where, merged([plan.links, *written]), plan.nbytes)
            return WorkStep([part], plan.seconds)

        self.log.step(steps.RendezvousStep(place, call.size, rank, f"wait for {name}", where, work))
        if in_slots:
            sent = moves.operation, level, tuple(range(call.size)), moves.nbytes, moves.algorithm, on_tiles
            self._reads_slots(name, level, where, self.plans.plan(*sent).nbytes + moves.nbytes)

    def _slots(self, row: int, nbytes: int) -> dict[Hashable, float]:
        """Demands for writing tiles into the memory through which programs of several units exchange them."""
        rate, cache = bandwidth(self._memory), self._memory.cache_bandwidth
        written: dict[Hashable, float] = {UnitResource(row, self._memory.name): nbytes / rate} if rate else {}
        return {**written, UnitResource(row, cache_name(self._memory)): nbytes / cache} if cache else written

    def _reads_slots(self, name: str, level: str, where: Location | None, nbytes: int) -> None:
        """The current task reads its own tile, and the received ones once flags say that they have arrived."""
        layer, network = self._memory, self.machine.network(level)
        demands: dict[Hashable, float] = {}
        if layer.cache_bandwidth:
            demands[UnitResource(None, cache_name(layer))] = nbytes / layer.cache_bandwidth
        floor = layer.latency + (nbytes / layer.per_program if layer.per_program else 0.0)
        flag = network.latency if network is not None else 0.0
        self.log.work(WorkPart(f"{name}, read", "sync", where, demands, nbytes), flag + floor)

    # -- memory --------------------------------------------------------------------------------------------------------

    def touches(self, frame: Frame, tile: Tile, writes: bool) -> tuple[dict[Hashable, float], int]:
        """Demands for moving a tile between the memory that holds tensors and the current task, and its bytes. `tile`:
        the tile's identity and bytes, from a frame. Repeated reads hit the cache while the tile is there."""
        log, layer = self.log, self._memory
        name, nbytes = tile(frame)
        if layer.level == self.machine.program_level.name:
            return self.rates.on_chip("global", nbytes), nbytes
        demands: dict[Hashable, float] = {}
        if self.current_cache() is not None and layer.cache_bandwidth:
            demands[UnitResource(None, cache_name(layer))] = nbytes / layer.cache_bandwidth
        if log.answers is not None:
            held = next(log.answers)
        else:
            held = not log.muted and self.in_cache(name, nbytes * log.repeats)
        if log.looks is not None:
            log.looks.append(CacheLookup(frame.fork(frame.unit, frame.own), tile, log.repeats, (held, nbytes)))
        rate = bandwidth(layer)
        if rate and (writes or not held):
            demands[UnitResource(None, layer.name)] = nbytes / rate
        return demands, nbytes

    def far_memory(self, row: int, nbytes: int) -> dict[Hashable, float]:
        """Demand on the memory of another unit."""
        rate = bandwidth(self._memory)
        return {UnitResource(row, self._memory.name): nbytes / rate} if rate else {}

    def spread(self, demands: Mapping[Hashable, float], frame: Frame) -> Mapping[Hashable, float]:
        """Demands on the resources of each program unit: in a phase of tensor-owning units all of their program units
        share the work."""
        if frame.program is not None:
            return demands
        places = self.rates.places
        return {
            UnitResource(None, key) if isinstance(key, str) else key: seconds / places
            if isinstance(key, str)
            else seconds
            for key, seconds in demands.items()
        }

    def work(
        self,
        frame: Frame,
        part: WorkPart,
        floor_s: float = 0.0,
        tail_s: float = 0.0,
        asynchronous: bool = False,
    ) -> None:
        """The current task executes a step that takes time."""
        part.demands = self.spread(part.demands, frame)
        if self.log in self._starting:
            self.log.step(self._starting.pop(self.log))
        if frame.program is None and not self.log.task.engine:
            floor_s += self.machine.tensor_level.launch
        self.log.work(part, floor_s, tail_s, asynchronous)


def _queue(machine: Machine) -> Mechanism:
    """The mechanism of copy queues; one without start-up where there is none."""
    networks = [network for network in machine.networks if network.level == machine.tensor_level.name]
    mechanisms = [m for network in networks for m in network.mechanisms if m.started_by == "host"]
    return min(mechanisms, key=lambda m: m.startup, default=Mechanism(name="none", started_by="host"))
