# SPDX-License-Identifier: MIT
"""Whether programs of a grid wait for others of the same grid: then all of them must be on the device at once.

Programs start in the order of their numbers, and one that waits keeps its place. So

- a wait for flags that nothing in the grid signals, or for work of earlier phases, needs no other program;
- programs that only wait for those of the same number on other devices (collectives and barriers of a coarser level;
  flags of which every program has its own) always get on: the lowest number that is not done runs on all devices;
- any other wait may be for a program that has not started: all programs of the grid must be resident.

The first two rest on the order in which all NVIDIA GPUs start blocks, which CUDA does not promise; every wait is
bounded anyway.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from tilelang_core import ir
from tilescale.errors import Location
from tilescale.hda import Machine
from tilescale.program.effects import Access, Surroundings
from tilescale.program.grids import Grid, Unknown, grid_of
from tilescale.program.model import GridPhase, Launch, Program, location

TRIED = 1 << 20
"""Values of a flag's index that are tried at most, over all programs; with more, they count as shared."""


def waits_across(
    phase: GridPhase, launch: Launch, program: Program, machine: Machine, sizes: Mapping[str, int]
) -> Location | None:
    """Where a program of the grid waits for others of the same grid; None if none does.

    Args:
        sizes: units of each launched level.
    """
    names = Surroundings(program)
    uses: list[tuple[ir.Stmt, Access, bool]] = []
    for stmt in ir.statements(phase.stmt):
        effects = names.effects(stmt)
        # Programs of a cluster start together.
        if launch.cluster_size == 1 and any(machine.level(m.level).kind == "program" for m in effects.meets):
            return location(stmt, "waits here")
        uses += [(stmt, told.flag, False) for told in effects.tells]
        uses += [(stmt, awaited.flag, True) for awaited in effects.awaits]
    for root in {flag.root for _, flag, _ in uses}:
        same = [(stmt, flag, waits) for stmt, flag, waits in uses if flag.root.same_as(root)]
        waiting = [stmt for stmt, _, waits in same if waits]
        grid = grid_of(phase, launch, machine, sizes)
        if waiting and len(waiting) < len(same) and not _own([flag for _, flag, _ in same], grid):
            return location(waiting[0], "waits here")
    return None


def _own(flags: Sequence[Access], grid: Grid | None) -> bool:
    """Whether every program has flags of its own: no two programs of the grid use the same one."""
    if grid is None:
        return False
    owners: dict[tuple[int, ...], int] = {}
    for flag in flags:
        if flag.begins is None:
            return False
        free = sorted({var for begin in flag.begins for var in grid.depends_on(begin)}, key=lambda var: str(var.name))
        if grid.count * math.prod(grid.free[var] for var in free) > TRIED:
            return False
        for values in itertools.product(*[range(grid.free[var]) for var in free]):
            try:
                index = [grid.value(begin, dict(zip(free, values, strict=True))) for begin in flag.begins]
            except Unknown:
                return False
            columns = [np.broadcast_to(column, (grid.count,)).tolist() for column in index]
            for number, place in enumerate(zip(*columns, strict=True)):
                if owners.setdefault(place, number) != number:
                    return False
    return True
