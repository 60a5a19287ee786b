# SPDX-License-Identifier: MIT
"""Misuse that shows once a program is taken apart: values, tiles and tensors where they do not exist.

It changes nothing. Tracing has checked single statements before; these checks need the phases.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilelang_core import ir
from tilescale.errors import Location, PhaseError, UsageError
from tilescale.hda import Machine
from tilescale.passes.room import check_room
from tilescale.passes.rules import check_rules
from tilescale.program.effects import Surroundings, statements
from tilescale.program.model import (
    Control,
    DevicePhase,
    GridPhase,
    Launch,
    Part,
    Program,
    Sequence,
    declaration,
    location,
)
from tilescale.program.ops import VIEW


def validate(program: Program, machine: Machine) -> None:
    """Check a whole program.

    Raises:
        PhaseError: a program index or an on-chip tile in a device phase, an on-chip tile that lives across phases,
            launches that differ in their units.
        UsageError: a sharded parameter used whole; a tile whose extent is known in the launch only; no launch at all;
            loops that TileLang refuses.
        AllocationTooLargeError: tiles that do not fit shared memory together.
    """
    if not program.launches:
        raise UsageError(f"{program.name!r} launches nothing", hint="write the work inside `with T.Kernel(...)`")
    if program.is_hierarchical:  # a plain one is TileLang's
        check_rules(program)
    _check_launches(program)
    _check_whole_uses(program)
    names = Surroundings(program)
    for launch in program.launches:
        _check_extents(program, launch)
        _check_device_phases(launch, machine)
        _check_tiles(launch, machine)
        for phase in _grid_phases(launch.body):
            check_room(phase, launch, names, machine)


def _check_launches(program: Program) -> None:
    first, *others = program.launches
    for launch in others:
        if [(k, str(v)) for k, v in launch.extents] != [(k, str(v)) for k, v in first.extents]:
            raise PhaseError(
                f"launches of one program use different units: {_text(first)} and {_text(launch)}",
                hint="give every T.Kernel of the program the same levels",
                where=[w for w in (launch.where, first.where) if w],
            )


def _text(launch: Launch) -> str:
    return ", ".join(f"{name}={extent}" for name, extent in launch.extents) or "one device"


def _check_whole_uses(program: Program) -> None:
    """A parameter that is split over units exists nowhere as a whole: its uses must go through the view."""
    split = {p.buffer.data: v for p in program.parameters for v in p.views if not v.layout.is_replica}
    if not split:
        return
    for stmt, _, _ in statements(program.body):
        if isinstance(stmt, ir.Bind) and ir.op_name(stmt.value) == VIEW.name:
            continue
        view = next((split[var] for var in ir.uses(stmt) if var in split), None)
        if view is not None:
            raise UsageError(
                f"{view.parameter.name!r} is split over level {view.level!r} by a view, but used whole here",
                hint="use the view: each unit holds only its share",
                where=[w for w in (location(stmt, "used whole"), view.where) if w],
            )


def _check_extents(program: Program, launch: Launch) -> None:
    """Memory is allocated before anything runs, the same for all units: by what a call knows of its arguments."""
    known = {p.var for p in program.parameters} | {var for _, var in program.extents if isinstance(var, ir.Var)}
    for parameter in program.parameters:
        if parameter.buffer is not None:
            known |= {var for n in parameter.buffer.shape for var in ir.variables(n)}
    for buffer in launch.buffers:
        unknown = sorted({var.name for n in buffer.shape for var in ir.variables(n) if var not in known})
        if unknown:
            raise UsageError(
                f"the shape ({', '.join(map(str, buffer.shape))}) of {buffer.name!r} depends on {', '.join(unknown)}, "
                "which has no value when memory is allocated",
                hint="take an extent that is the same for all units: a number, or one that follows from the arguments; "
                "and a part of it, tile[0:n], where less is needed",
                where=declaration(buffer, "") or launch.where,
            )


# -- the phases of a launch --------------------------------------------------------------------------------------------


def _tiles(launch: Launch, machine: Machine) -> dict[ir.Var, ir.Buffer]:
    """What programs hold on chip."""
    owned_above = {var for var, level in launch.owners if machine.level(level).kind == "unit"}
    return {b.data: b for b in launch.buffers if b.scope() != "global" and b.data not in owned_above}


def _check_device_phases(launch: Launch, machine: Machine) -> None:
    """A device phase, and control flow around phases, has no program index, no thread index and no program's tiles."""
    program, device = machine.program_level.name, machine.tensor_level.name
    indices = {*launch.programs, *(var for var, _ in launch.thread_vars)}
    tiles = {data: b for data, b in _tiles(launch, machine).items() if b.scope() != "local.var"}
    for stmt in _device_statements(launch.body):
        used = next((var for var in ir.uses(stmt) if var in indices or var in tiles), None)
        if used in indices:
            raise PhaseError(
                f"{used.name!r} is an index of a {program}, but this runs once per {device}",
                hint=f"write it inside T.Scale({program!r}); ranks of coarser levels are there too",
                where=location(stmt),
            )
        if used is not None:
            raise PhaseError(
                f"tile {tiles[used].name!r} is one of a {program}, but this runs once per {device}",
                hint=f"write all that a {program} does inside T.Scale({program!r}); T.Scale({device!r}) in there only "
                "says whose ranks are meant",
                where=location(stmt),
            )


def _device_statements(part: Part) -> Iterator[ir.Stmt]:
    if isinstance(part, Control):
        yield part.stmt
    if isinstance(part, Sequence | Control):
        for inner in part.parts:
            yield from _device_statements(inner)
    elif isinstance(part, DevicePhase):
        yield from ir.statements(part.stmt)


def _check_tiles(launch: Launch, machine: Machine) -> None:
    """What a program holds on chip ends with its grid phase."""
    tiles = _tiles(launch, machine)
    seen: dict[ir.Var, tuple[int, Location | None]] = {}
    for number, phase in enumerate(_grid_phases(launch.body)):
        for stmt in ir.statements(phase.stmt):
            for data in tiles.keys() & set(ir.uses(stmt)):
                first, where = seen.setdefault(data, (number, location(stmt, "first used")))
                if first != number:
                    raise PhaseError(
                        f"tile {tiles[data].name!r} is used in two phases; what a program holds on chip ends with "
                        "its phase",
                        hint="keep it in device memory between phases, T.alloc(..., level=...) of a global layer; or "
                        f"write all of it inside one `with T.Scale({machine.program_level.name!r}):`, where scales of "
                        "coarser levels end no phase",
                        where=[w for w in (location(stmt, "used again"), where) if w],
                    )


def _grid_phases(part: Part) -> Iterator[GridPhase]:
    if isinstance(part, Sequence | Control):
        for inner in part.parts:
            yield from _grid_phases(inner)
    elif isinstance(part, GridPhase):
        yield part
