# SPDX-License-Identifier: MIT
"""Launches and phases: a device runs its phases in order; a grid phase runs programs as the machine's units take them.

Programs become resident as far as threads, registers and shared memory allow, in launch order; the next one starts when
one ends. So a program that needs more resident programs than fit deadlocks here as it does on hardware.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.barriers import CountingBarrier, Crew
from tilescale.backends.emulator.execute.frame import Frame, uniform
from tilescale.backends.emulator.execute.scheduler import Family, Task, Wait
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.expr import Closure
from tilescale.backends.emulator.interpret.scales import run_together
from tilescale.backends.emulator.record.equivalence import alike
from tilescale.backends.emulator.record.memoization import Takeover
from tilescale.errors import LaunchError, PeerOutOfRangeError
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Sequence


def compile_part(compiler: Compiler, part: Part) -> Closure:
    """The closure of a part of a program, run on a device's frame."""
    if isinstance(part, Sequence):
        return _in_order([compile_part(compiler, p) for p in part.parts])
    if isinstance(part, DevicePhase):
        with compiler.executing_as(compiler.machine.tensor_level):
            return compiler.stmt(part.stmt)
    if isinstance(part, Control):
        return _control(compiler, part)
    if isinstance(part, GridPhase):
        return _grid_phase(compiler, part)
    return _launch(compiler, part)


def _in_order(parts: list[Closure]) -> Closure:
    def run(frame: Frame) -> None:
        for part in parts:
            part(frame)

    return run


def _control(compiler: Compiler, part: Control) -> Closure:
    stmt = part.stmt
    if isinstance(stmt, ir.For):
        compiler.loop_variables.discard(stmt.loop_var)
    bodies = [compile_part(compiler, p) for p in part.parts]
    if isinstance(stmt, ir.IfThenElse):
        condition = compiler.expr(stmt.condition)

        def branch(frame: Frame) -> None:
            taken = uniform(condition(frame), frame, "a condition around phases")
            if taken or len(bodies) > 1:
                bodies[0 if taken else 1](frame)

        return branch
    if isinstance(stmt, ir.While):
        condition = compiler.expr(stmt.condition)

        def loop_while(frame: Frame) -> None:
            while uniform(condition(frame), frame, "a condition around phases"):
                bodies[0](frame)

        return loop_while
    slot, begin, extent = compiler.slot(stmt.loop_var), compiler.expr(stmt.min), compiler.expr(stmt.extent)

    def loop(frame: Frame) -> None:
        first = uniform(begin(frame), frame, "where a loop begins")
        for i in range(first, first + uniform(extent(frame), frame, "a loop's extent")):
            frame.slots[slot] = i
            bodies[0](frame)

    return loop


def _launch(compiler: Compiler, launch: Launch) -> Closure:
    compiler.launch = launch
    compiler.begin_function(launch)
    body = compile_part(compiler, launch.body)
    owned = compiler.device_buffers(launch)

    def run(frame: Frame) -> None:
        compiler.allocate(owned, frame.unit, frame)
        body(frame)

    return run


def _grid_phase(compiler: Compiler, phase: GridPhase) -> Closure:
    launch = compiler.launch
    extents = [compiler.expr(n) for n in launch.grid]
    slots = [compiler.slot(v) for v in launch.programs]
    compiler.loop_variables -= set(launch.programs)
    threads = [(compiler.slot(var), axis) for var, axis in launch.thread_vars]
    compiler.begin_function(launch)
    body = compiler.stmt(phase.stmt)
    plan = Plan(compiler, launch, slots, threads)
    found = alike(compiler, launch, phase.stmt)
    plan.takeover = Takeover(found) if found is not None else None

    def run(frame: Frame) -> None:
        shape = tuple(uniform(n(frame), frame, "the grid's extent") for n in extents)
        Grid(plan, shape, frame).run(body)

    return run


class Plan:
    """What all grids of one launch have in common."""

    def __init__(self, compiler: Compiler, launch: Launch, slots: list[int], threads: list[tuple[int, int]]):
        self.compiler, self.launch, self.slots = compiler, launch, slots
        self.takeover: Takeover | None = None
        self.thread_indices = {slot: _thread_index(launch, axis) for slot, axis in threads}
        machine = compiler.machine
        self.program_level, self.tensor_level = machine.program_level, machine.tensor_level
        clusters = [level for level in machine.levels if level.kind == "cluster"]
        self.cluster_level = clusters[0] if launch.cluster_size > 1 else None
        self.own = compiler.owned_by(self.program_level.name)
        self.cluster_own = compiler.owned_by(self.cluster_level.name) if self.cluster_level else []
        self.private = [b for b in launch.buffers if b.scope() in ("local", "local.var")]
        self.resident = self._resident()

    def _resident(self) -> int:
        """Programs that one device holds at once.

        Raises:
            LaunchError: not even one fits.
        """
        machine, launch = self.compiler.machine, self.launch
        if not self.program_level.virtual:
            return self.program_level.count
        room = machine.capacity(machine.layer_for("shared").name)
        # The compiler reuses shared memory between tiles that do not live at the same time: their sum may exceed it.
        shared = min(self.compiler.bytes_in("shared", launch), room)
        registers = machine.capacity(machine.layer_for("fragment").name, launch.thread_count)
        fragments = min(self.compiler.bytes_in("fragment", launch), registers)
        per_unit = machine.residency(
            threads=launch.thread_count, shared_bytes=shared, fragment_bytes=fragments
        )
        if per_unit == 0:
            raise LaunchError(
                f"a program of {launch.thread_count} threads and {shared} bytes of shared memory does not fit one "
                f"{self.program_level.title or self.program_level.name} of {machine.name!r}",
                hint="use fewer threads or smaller tiles",
                where=launch.where,
            )
        return per_unit * machine.count(self.program_level.name, self.tensor_level.name)


def _thread_index(launch: Launch, axis: int) -> Any:
    x, y, _ = launch.threads
    extent = launch.threads[axis]
    linear = np.arange(launch.thread_count, dtype=np.int32)
    return linear // (1, x, x * y)[axis] % extent if extent > 1 else 0


class Grid:
    """One grid phase on one device."""

    def __init__(self, plan: Plan, shape: tuple[int, ...], device: Frame):
        self.plan, self.shape, self.device = plan, shape, device
        self.count = math.prod(shape)
        self.barrier = CountingBarrier()
        self.number = device.unit.counters["grids"] = device.unit.counters.get("grids", 0) + 1
        self.room = max(plan.resident // plan.launch.cluster_size, 1)
        self.waiting: Iterator[tuple[int, list[tuple[int, ...]]]] = iter(())

    @cached_property
    def clusters(self) -> list[list[tuple[int, ...]]]:
        """Program indices, grouped by cluster, in launch order: the first axis fastest."""
        dims = (self.plan.launch.cluster + (1,) * len(self.shape))[: len(self.shape)]
        if any(n % c for n, c in zip(self.shape, dims, strict=True)):
            raise LaunchError(
                f"a grid of {self.shape} programs does not divide into clusters of {dims}",
                hint="make each axis of the grid a multiple of the cluster's",
                where=self.plan.launch.where,
            )
        outer = [range(0, n, c) for n, c in zip(self.shape, dims, strict=True)]
        inner = [range(c) for c in dims]
        corners = [index[::-1] for index in np.ndindex(*(len(r) for r in outer[::-1]))]
        steps = [index[::-1] for index in np.ndindex(*(len(r) for r in inner[::-1]))]
        groups = [
            [tuple(r[i] + s for r, i, s in zip(outer, corner, step, strict=True)) for step in steps]
            for corner in corners
        ]
        if self.plan.program_level is self.plan.tensor_level:
            return [groups[self.device.unit.rank]]
        return groups

    def run(self, body: Closure) -> None:
        """Run all programs; returns when the last has ended."""
        self.body = body
        size = self.plan.launch.cluster_size
        takeover = self.plan.takeover
        if self.device.run.clock is not None:
            alike = takeover is not None
            self.device.run.clock.launches(self.count, self.plan.resident, size, self.plan.launch.where, alike)
        self.family = Family(self.device.run.scheduler, "its programs", self.plan.launch.where)
        self.device.run.grids.append(self)
        if takeover is not None:
            takeover.run(self)
        else:
            self.waiting = iter(self.device.run.scheduler.order(list(enumerate(self.clusters)), self.room))
            for _ in range(min(self.room, len(self.clusters))):
                self._start()
        self.family.join()
        self.device.run.grids.remove(self)

    @property
    def not_started(self) -> int:
        """Programs that wait for room."""
        return len(list(self.waiting)) * self.plan.launch.cluster_size

    def label(self, index: tuple[int, ...]) -> str:
        """What a person calls a program of that index."""
        return str(Unit(self.plan.program_level.name, 0, index=index))

    def _start(self) -> None:
        following = next(self.waiting, None)
        if following is not None:
            self.start(*following, self._start)

    def start(self, number: int, indices: list[tuple[int, ...]], then: Callable[[], None]) -> list[Task]:
        """Start the programs of a cluster; `then` is called when all have ended."""
        cluster = Cluster(self, number, indices)
        left = len(cluster.programs)

        def ended() -> None:
            nonlocal left
            left -= 1
            self.device.run.program_ended(self.device.unit)
            if left == 0:
                cluster.release()
                then()

        return [
            self.family.spawn(str(program.unit), lambda p=program: self.body(p.frame), ended)
            for program in cluster.programs
        ]


class Cluster:
    """Programs that are resident together; without clusters, a single program."""

    def __init__(self, grid: Grid, number: int, indices: list[tuple[int, ...]]):
        plan, device = grid.plan, grid.device
        self.barrier = CountingBarrier()
        self.unit = device.unit
        self.meeting: list[ProgramInstance] = []
        self.bound: list[int] = []
        self.round = 0
        if plan.cluster_level is not None:
            self.unit = Unit(plan.cluster_level.name, number, device.unit, siblings=len(grid.clusters))
        self.programs = [ProgramInstance(grid, self, rank, index) for rank, index in enumerate(indices)]
        if plan.cluster_level is not None:
            plan.compiler.allocate(plan.cluster_own, self.unit, device)
            for program in self.programs:
                program.bind(self.unit.storage)

    def execute(self, body: Closure, frame: Frame, bound: list[int], where: Any) -> None:
        """All programs of the cluster arrive; then the body, which binds `bound`, runs once, for all as one unit."""
        run, ticket = frame.run, self.round
        arrival, departure = (self, "arrives", ticket), (self, "leaves", ticket)
        frame.program.arrived = frame.slots
        run.publishes(arrival)
        self.meeting.append(frame.program)
        if len(self.meeting) == len(self.programs):
            self.meeting, self.bound = [], bound
            first = self.programs[0]
            run.acquires(arrival)
            body(Frame(frame.run, self.unit, first.arrived.copy(), frame.threads, first))
            run.publishes(departure)
            self.round += 1
            run.scheduler.progress += 1
        run.scheduler.block(
            Wait(
                lambda: self.round > ticket,
                "its cluster",
                lambda: f"{len(self.meeting)} of {len(self.programs)} programs are there",
                where,
            )
        )
        run.acquires(departure)

    def fork(self, body: Closure, frame: Frame, where: Any) -> None:
        """From the cluster as one unit back to each of its programs."""
        sides = []
        for program in self.programs:
            side = Frame(frame.run, program.unit, program.arrived.copy(), frame.threads, program)
            for slot in self.bound:
                side.slots[slot] = frame.slots[slot]
            sides.append(side)
        run_together(frame, body, sides, where)

    def release(self) -> None:
        """Free what the programs held on chip."""
        for program in self.programs:
            if program.unit is not program.grid.device.unit:
                program.unit.storage.clear()
                program.unit.children.clear()
                program.frame.slots.clear()


class ProgramInstance:
    """One running tile program."""

    def __init__(self, grid: Grid, cluster: Cluster, rank: int, index: tuple[int, ...]):
        plan, device = grid.plan, grid.device
        self.grid, self.cluster, self.cluster_rank = grid, cluster, rank
        self._named: dict[int, CountingBarrier] = {}
        if plan.program_level is plan.tensor_level:
            self.unit = device.unit
        else:
            linear = sum(i * math.prod(grid.shape[:axis]) for axis, i in enumerate(index))
            siblings = len(grid.shape) and (plan.launch.cluster_size if plan.cluster_level else grid.count)
            number = rank if plan.cluster_level else linear
            self.unit = Unit(plan.program_level.name, number, cluster.unit, index=index, siblings=siblings)
            cluster.unit.children[(plan.program_level.name, number)] = self.unit
        self.crew = Crew(plan.launch.thread_count)
        self.frame = Frame(device.run, self.unit, device.slots.copy(), plan.launch.thread_count, self)
        plan.compiler.allocate(plan.own, self.unit, self.frame)
        self.arrived: list[Any] = []
        self.bind(dict(zip(plan.slots, index, strict=True)))
        self.bind(plan.thread_indices)
        self.bind(plan.compiler.private(plan.private, self.frame))

    def bind(self, values: dict[int, Any]) -> None:
        """Give slots of this program's frame their values."""
        for slot, value in values.items():
            self.frame.slots[slot] = value

    def in_cluster(self, rank: int) -> ProgramInstance:
        """The program of that rank in this one's cluster.

        Raises:
            PeerOutOfRangeError: the cluster has no such program.
        """
        programs = self.cluster.programs
        if not 0 <= rank < len(programs):
            raise PeerOutOfRangeError(f"{self.unit} names program {rank} of its cluster, which has {len(programs)}")
        return programs[rank]

    def named_barrier(self, number: int) -> CountingBarrier:
        """A named barrier of this program."""
        return self._named.setdefault(number, CountingBarrier())
