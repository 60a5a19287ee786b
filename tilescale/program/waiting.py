# SPDX-License-Identifier: MIT
"""Whether programs of a grid wait for others of the same grid: then all of them must be on the device at once.

Programs start in the order of their numbers, and one that waits keeps its place. So

- a wait for flags that nothing in the grid signals, or for work of earlier phases, needs no other program;
- programs that only wait for those of the same number on other devices (collectives and barriers of a coarser level;
  flags of which every program has its own), or of lower numbers on any device (the first programs send, those after
  them compute), always get on: the lowest number that is not done runs on all devices;
- any other wait may be for a program that has not started: all programs of the grid must be resident.

In a grid with unknown extents the slowest axes with known extents are considered: programs in a plane have lower
numbers than all programs in later planes.

The second assumes the order in which all NVIDIA GPUs start blocks, which CUDA does not guarantee; every wait is bounded
anyway. A program that needs it declares it (`T.Kernel(in_order=True)`), else the emulator also starts its blocks in
other orders.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tilelang_core import ir
from tilescale.errors import Location
from tilescale.hda import Machine
from tilescale.program.effects import Access, ProgramNames, names_of
from tilescale.program.grids import GridValues, UnknownValue, grid_of
from tilescale.program.model import GridPhase, Launch, Program, location
from tilescale.program.ops import WAIT

TRIED = 1 << 20
"""Values of a flag's index that are tried at most, over all programs; with more, they count as shared."""


def waits_across(
    phase: GridPhase, launch: Launch, program: Program, machine: Machine, sizes: Mapping[str, int]
) -> Location | None:
    """Location at which a program of the grid waits for others of the same grid; None if none does. That of the launch
    for a statement without one, which no user wrote. `sizes`: units of each launched level."""
    found = _waiting(phase, launch, program, machine, sizes)
    return None if found is None else location(found, "waits here") or launch.where


def _waiting(
    phase: GridPhase, launch: Launch, program: Program, machine: Machine, sizes: Mapping[str, int]
) -> ir.Stmt | None:
    """The first statement by which a program of the grid waits for others; the same one on all ranks."""
    names = names_of(program)
    uses: list[_FlagUse] = []
    for stmt, guards in _guarded(phase.stmt):
        effects = names.effects(stmt)
        # Programs of a cluster start together.
        if launch.cluster_size == 1 and any(machine.level(m.level).kind == "program" for m in effects.synchronizes):
            return stmt
        uses += [_FlagUse(stmt, guards, release.flag, waits=False) for release in effects.releases]
        uses += [_FlagUse(stmt, guards, acquire.flag, waits=True) for acquire in effects.acquires]
    uses += _polls(phase, names)
    grid = grid_of(phase, launch, machine, sizes)
    planes = grid_of(phase, launch, machine, sizes, in_part=True)
    for root in dict.fromkeys(use.flag.root for use in uses):
        same = [use for use in uses if use.flag.root.same_as(root)]
        waiting = [use for use in same if use.waits]
        if not waiting or len(waiting) == len(same):
            continue
        if not _own([use.flag for use in same], grid) and not _from_lower_numbers(same, planes):
            return waiting[0].stmt
    return None


def first_wait(phase: GridPhase, launch: Launch) -> Location | None:
    """Location at which programs of a grid wait for a flag, as that of `waits_across`; None if they do not."""
    waits = [stmt for stmt in ir.instances(phase.stmt, ir.Evaluate) if ir.op_name(stmt.value) == WAIT.name]
    located = filter(None, (location(wait, "waits here") for wait in waits))
    return next(located, launch.where) if waits else None


@dataclass(frozen=True)
class _FlagUse:
    """A flag that a statement signals or waits for, and the conditions under which it is executed."""

    stmt: ir.Stmt
    guards: tuple[ir.PrimExpr, ...]
    flag: Access
    waits: bool


def _polls(phase: GridPhase, names: ProgramNames) -> Iterator[_FlagUse]:
    """Polls: loads in `while` loops from memory that is stored to atomically, and these stores."""
    stores = [
        _FlagUse(stmt, guards, access, waits=False)
        for stmt, guards in _guarded(phase.stmt)
        for access in names.effects(stmt).accesses
        if access.writes and access.atomic
    ]
    stored = {use.flag.root for use in stores}
    for stmt, guards in _guarded(phase.stmt):
        if isinstance(stmt, ir.While):
            loads = [a for a in names.all_effects(stmt).reads if not a.writes and a.root in stored]
            yield from (_FlagUse(stmt, guards, load, waits=True) for load in loads)
            yield from (use for use in stores if use.flag.root in {load.root for load in loads})


def _guarded(stmt: ir.Stmt, guards: tuple[ir.PrimExpr, ...] = ()) -> Iterator[tuple[ir.Stmt, tuple[ir.PrimExpr, ...]]]:
    """A statement and all below it, each with the conditions of the branches around it."""
    yield stmt, guards
    if isinstance(stmt, ir.IfThenElse):
        yield from _guarded(stmt.then_case, (*guards, stmt.condition))
        if stmt.else_case is not None:
            yield from _guarded(stmt.else_case, (*guards, ir.Not(stmt.condition)))
        return
    for inner in ir.children(stmt):
        yield from _guarded(inner, guards)


def _from_lower_numbers(uses: Sequence[_FlagUse], grid: GridValues | None) -> bool:
    """Whether each program that signals has a number below those of all that wait."""
    if grid is None:
        return False
    signals, waits = (
        np.any([_executing(use, grid) for use in uses if use.waits == which], axis=0) for which in (False, True)
    )
    return not np.any(waits) or not np.any(signals[np.argmax(waits) :])


def _executing(use: _FlagUse, grid: GridValues) -> np.ndarray:
    """Programs that may execute a statement: all of them where a condition is not known."""
    masks = [np.ones(grid.count, bool)]
    for guard in use.guards:
        with contextlib.suppress(UnknownValue):
            masks.append(np.broadcast_to(grid.value(guard, {}), grid.count))
    return np.logical_and.reduce(masks)


def _own(flags: Sequence[Access], grid: GridValues | None) -> bool:
    """Whether every program has separate flags: no two programs of the grid use the same one."""
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
            except UnknownValue:
                return False
            columns = [np.broadcast_to(column, (grid.count,)).tolist() for column in index]
            for number, place in enumerate(zip(*columns, strict=True)):
                if owners.setdefault(place, number) != number:
                    return False
    return True
