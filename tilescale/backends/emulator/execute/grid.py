# SPDX-License-Identifier: MIT
"""Grids: programs become resident as far as threads, registers and shared memory allow, in launch order; the next one
starts when one ends. So a program that needs more resident programs than fit deadlocks, as on hardware."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np

from tilescale.backends.emulator.execute.barriers import CountingBarrier
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.programs import Cluster
from tilescale.backends.emulator.execute.scheduler import TaskGroup
from tilescale.backends.emulator.execute.tasks import Task
from tilescale.backends.emulator.execute.units import Unit
from tilescale.errors import LaunchError
from tilescale.hda import Level
from tilescale.program.model import Launch


class Together(Protocol):
    """Runs a grid whose programs are not executed one by one."""

    def run(self, grid: Grid) -> None:
        """Run the grid with the effect of all its programs."""


@dataclass
class Plan:
    """The constants of a phase's grids.

    Attributes:
        program_level, tensor_level, cluster_level: None for the last where programs form no clusters.
        resident: programs that one tensor-owning unit holds at once.
        slots: slots of the program indices.
        threads: slot -> the number of each thread along an axis.
        allocate: makes a program's tiles and binds them in its frame.
        allocate_shared: the same for tiles of a cluster.
        private: fresh thread-private buffers, by slot.
        in_order: whether programs start in the order of their numbers, in any interleaving.
        together: None where all programs are executed one by one.
    """

    launch: Launch
    program_level: Level
    tensor_level: Level
    cluster_level: Level | None
    resident: int
    slots: list[int]
    threads: Mapping[int, Any]
    allocate: Callable[[Unit, Frame], None]
    allocate_shared: Callable[[Unit, Frame], None]
    private: Callable[[Frame], Mapping[int, Any]]
    in_order: bool
    together: Together | None = None


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
        cluster = self.plan.launch.cluster
        dims = cluster[: len(self.shape)]
        if any(n % c for n, c in zip(self.shape + (1,) * (3 - len(self.shape)), cluster, strict=True)):
            raise LaunchError(
                f"a grid of {self.shape} programs does not divide into clusters of {cluster}",
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

    def run(self, body: Callable[[Frame], Any]) -> None:
        """Run all programs; returns when the last has ended."""
        self.body = body
        size = self.plan.launch.cluster_size
        together = self.plan.together
        if self.device.run.recorder is not None:
            same = together is not None
            self.device.run.recorder.launches(self.count, self.plan.resident, size, self.plan.launch.where, same)
        self.group = self._group()
        self.device.run.grids.append(self)
        if together is not None:
            together.run(self)
            self.group.join()
        else:
            programs = list(enumerate(self.clusters))
            order = self.device.run.scheduler.order
            self.run_programs(programs if self.plan.in_order else order(programs, self.room))
        self.device.run.grids.remove(self)

    def run_programs(self, programs: list[tuple[int, list[tuple[int, ...]]]]) -> None:
        """Run clusters, by number and the indices of their programs; returns when the last has ended."""
        self.group, self.waiting = self._group(), iter(programs)
        for _ in range(min(self.room, len(programs))):
            self._start()
        self.group.join()

    def _group(self) -> TaskGroup:
        return TaskGroup(self.device.run.scheduler, "its programs", self.plan.launch.where)

    @property
    def places(self) -> int:
        """Number of programs that are resident at once."""
        return min(self.count, self.plan.resident)

    @property
    def not_started(self) -> int:
        """Number of programs that wait for residency."""
        return len(list(self.waiting)) * self.plan.launch.cluster_size

    def label(self, index: tuple[int, ...]) -> str:
        """The name of a program in messages."""
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
            self.device.run.programs_ended(self.device.unit, 1, {})
            if left == 0:
                cluster.release()
                then()

        return [
            self.group.spawn(str(program.unit), partial(self.body, program.frame), ended)
            for program in cluster.programs
        ]
