# SPDX-License-Identifier: MIT
"""Programs of a launch in simulated time: as many at once as its unit has places for, the others when some end."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Any

from tilescale.timing.steps import LaunchStep, RecordedTask

if TYPE_CHECKING:
    from tilescale.timing.live import RunningTask
    from tilescale.timing.replay import Simulation


class SimulatedGrid:
    """The programs of one launch on one tensor-owning unit."""

    def __init__(self, replay: Simulation, live: RunningTask, step: LaunchStep):
        self.replay, self.live, self.step = replay, live, step
        # The emptiest place first, as a scheduler of thread blocks does. More places than programs stay empty.
        places = min(step.places, len(step.tasks))
        waves = min(step.each, math.ceil(len(step.tasks) / max(places, 1)))
        self.free = [(wave, place) for wave in range(waves) for place in range(places)]
        self.next = 0
        self.running = 0
        self.over = False

    def fill(self) -> None:
        """Start as many programs as fit; the launching task continues when none is left."""
        tasks, group = self.step.tasks, self.step.group
        while self.next < len(tasks) and len(self.free) >= group:
            members = tasks[self.next : self.next + group]
            self.next += group
            slots = [heapq.heappop(self.free) for _ in members]
            cluster = _ProgramGroup(self, slots)
            self.running += 1
            for task, slot in zip(members, slots, strict=True):
                cluster.start(task, slot)
        if not self.running and self.next >= len(tasks) and not self.over:
            self.over = True
            self.replay.land(self.live, lambda: self.replay.go_on(self.live))


class _ProgramGroup:
    """Programs that started together; their places are free when all have ended."""

    def __init__(self, grid: SimulatedGrid, slots: list[tuple[int, int]]):
        self.grid, self.slots, self.left = grid, slots, len(slots)

    def start(self, task: RecordedTask, slot: tuple[int, int]) -> None:
        grid = self.grid
        wave, place = slot
        engine = f"{grid.replay.program} {place}" + (f".{wave}" if grid.step.each > 1 else "")
        grid.replay.start(task, grid.live, place, engine, self.ended, grid.step.alike)

    def ended(self, child: Any) -> None:
        live = self.grid.live
        live.visible_s, live.last = max(live.visible_s, child.visible_s), child.last
        self.left -= 1
        if not self.left:
            self.grid.running -= 1
            for slot in self.slots:
                heapq.heappush(self.grid.free, slot)
            events = self.grid.replay.events
            events.at(events.now, self.grid.fill)
