# SPDX-License-Identifier: MIT
"""Execution of programs: alone, or as a cluster of programs that are resident together."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from tilescale.backends.emulator.execute.barriers import CountingBarrier, Participants
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.scheduler import TaskGroup
from tilescale.backends.emulator.execute.tasks import Task, Wait
from tilescale.backends.emulator.execute.units import Unit
from tilescale.errors import Location, PeerOutOfRangeError

if TYPE_CHECKING:
    from tilescale.backends.emulator.execute.emulation import Recorder
    from tilescale.backends.emulator.execute.grid import Grid


def run_together(frame: Frame, body: Callable[[Frame], Any], frames: list[Frame], where: Location | None) -> None:
    """Run `body` on every frame as a coroutine of its own; return when all have ended."""
    if len(frames) == 1:
        body(frames[0])
        return
    group = TaskGroup(frame.run.scheduler, "its units", where)
    for side in frames:
        group.spawn(str(side.unit), partial(body, side))
    group.join()


class Cluster:
    """Programs that are resident together; without clusters, a single program."""

    def __init__(self, grid: Grid, number: int, indices: list[tuple[int, ...]]):
        plan, device = grid.plan, grid.device
        self.barrier = CountingBarrier()
        self.unit = device.unit
        self.arrivals: list[ProgramInstance] = []
        self.bound: list[int] = []
        self.round = 0
        if plan.cluster_level is not None:
            self.unit = Unit(plan.cluster_level.name, number, device.unit, siblings=len(grid.clusters))
        self.programs = [ProgramInstance(grid, self, rank, index) for rank, index in enumerate(indices)]
        if plan.cluster_level is not None:
            plan.allocate_shared(self.unit, device)
            for program in self.programs:
                program.bind(self.unit.storage)

    def execute(self, body: Callable[[Frame], Any], frame: Frame, bound: list[int], where: Location | None) -> None:
        """All programs of the cluster arrive; then the body, which binds `bound`, runs once for all of them."""
        run, ticket = frame.run, self.round
        arrival, departure = (self, "arrives", ticket), (self, "leaves", ticket)
        frame.program.arrived, frame.program.task = frame.slots, run.scheduler.current
        run.publishes(arrival)
        self.arrivals.append(frame.program)
        if len(self.arrivals) == len(self.programs):
            self.arrivals, self.bound = [], bound
            first = self.programs[0]
            with self._as_one(run.recorder):
                run.acquires(arrival)
                body(Frame(frame.run, self.unit, first.arrived.copy(), frame.threads, first))
                run.publishes(departure)
            self.round += 1
            run.scheduler.progress += 1
        run.scheduler.block(
            Wait(
                lambda: self.round > ticket,
                "its cluster",
                lambda: f"{len(self.arrivals)} of {len(self.programs)} programs are there",
                where,
            )
        )
        run.acquires(departure)

    @contextlib.contextmanager
    def _as_one(self, recorder: Recorder | None) -> Iterator[None]:
        """The current task acts for all programs, each of which does a share."""
        if recorder is None:
            yield
            return
        recorder.unites([program.task for program in self.programs])
        yield
        recorder.divides()

    def fork(self, body: Callable[[Frame], Any], frame: Frame, where: Location | None) -> None:
        """Run `body` in each program, inside a region that the cluster executes as one unit."""
        sides = []
        for program in self.programs:
            side = Frame(frame.run, program.unit, program.arrived.copy(), frame.threads, program)
            for slot in self.bound:
                side.slots[slot] = frame.slots[slot]
            sides.append(side)
        run_together(frame, body, sides, where)

    def release(self) -> None:
        """Release the programs' on-chip memory, and the references of the cluster and its programs to each other."""
        for program in self.programs:
            if program.unit is not program.grid.device.unit:
                program.unit.storage.clear()
                program.unit.children.clear()
                program.frame.slots.clear()
            del program.frame
        self.programs.clear()


class ProgramInstance:
    """One running tile program.

    Attributes:
        arrived: the values of its slots at the last region that its cluster executed as one unit.
        task: the task that executed it until there.
    """

    arrived: list[Any]
    task: Task

    def __init__(self, grid: Grid, cluster: Cluster, rank: int, index: tuple[int, ...]):
        plan, device = grid.plan, grid.device
        self.grid, self.cluster, self.cluster_rank = grid, cluster, rank
        self._named: dict[int, CountingBarrier] = {}
        # The states of its threads' random number generators, by the calls that initialized them.
        self.random: dict[Any, Any] = {}
        if plan.program_level is plan.tensor_level:
            self.unit = device.unit
        else:
            linear = sum(i * math.prod(grid.shape[:axis]) for axis, i in enumerate(index))
            siblings = len(grid.shape) and (plan.launch.cluster_size if plan.cluster_level else grid.count)
            number = rank if plan.cluster_level else linear
            self.unit = Unit(plan.program_level.name, number, cluster.unit, index=index, siblings=siblings)
            cluster.unit.children[(plan.program_level.name, number)] = self.unit
        self.participants = Participants(plan.launch.thread_count)
        self.frame = Frame(device.run, self.unit, device.slots.copy(), plan.launch.thread_count, self)
        plan.allocate(self.unit, self.frame)
        self.bind(dict(zip(plan.slots, index, strict=True)))
        self.bind(plan.threads)
        self.bind(plan.private(self.frame))

    def bind(self, values: Mapping[int, Any]) -> None:
        """Set slots of this program's frame."""
        for slot, value in values.items():
            self.frame.slots[slot] = value

    def in_cluster(self, rank: int) -> ProgramInstance:
        """The program of that rank in this one's cluster. Raises PeerOutOfRangeError: there is none."""
        programs = self.cluster.programs
        if not 0 <= rank < len(programs):
            raise PeerOutOfRangeError(f"{self.unit} names program {rank} of its cluster, which has {len(programs)}")
        return programs[rank]

    def named_barrier(self, number: int) -> CountingBarrier:
        return self._named.setdefault(number, CountingBarrier())
