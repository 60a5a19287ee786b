# SPDX-License-Identifier: MIT
"""The tasks of one launch in words: phases, their placement, counters, and what depends on what."""

from __future__ import annotations

from dataclasses import dataclass

from tilescale.passes.persistent.dependences import Need
from tilescale.passes.persistent.phases import Grid
from tilescale.passes.persistent.placement import Placement


@dataclass(frozen=True)
class Tasks:
    """Schedule of a program that is one launch; `str` of it has a line for each phase."""

    grids: tuple[Grid, ...]
    placements: tuple[Placement, ...]
    needs: tuple[Need, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """A line for each phase: its tasks, and the tasks that they wait for."""
        blocks = self.placements[0].blocks
        phases = zip(self.grids, self.placements, strict=True)
        return [f"{blocks} persistent blocks", *(self._phase(i, *phase) for i, phase in enumerate(phases))]

    def _phase(self, number: int, grid: Grid, placement: Placement) -> str:
        line = f" (line {grid.where.line})" if grid.where else ""
        tasks = f"{placement.count} task{'s' * (placement.count > 1)} from block {placement.first} on"
        waits = [f"; waits for {_waits(need)}" for need in self.needs if need.later == number]
        return f"phase {number}, {grid.title}{line}: {tasks}{''.join(waits)}"


def _waits(need: Need) -> str:
    counter = need.counter
    if counter.blocks is not None:
        return f"all {counter.blocks} blocks with tasks of phase {need.earlier} by {counter.name}"
    if len(counter.arrivals) == 1:
        return f"all {counter.arrivals[0]} tasks of phase {need.earlier} by {counter.name}"
    low, high = counter.arrivals.min(), counter.arrivals.max()
    tasks = str(low) if low == high else f"{low} to {high}"
    chunks = counter.touched(need.boxes).sum(axis=1).max()
    shape, extents = (" x ".join(map(str, numbers)) for numbers in (counter.shape, counter.chunk))
    return f"{chunks} of {shape} chunks of {extents}, each of {tasks} tasks of phase {need.earlier}, by {counter.name}"
