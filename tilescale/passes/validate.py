# SPDX-License-Identifier: MIT
"""Misuse that shows once a program is taken apart: values, tiles and tensors where they do not exist.

They change nothing. Tracing has checked single statements before; these checks need the phases.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilelang_core import ir, tl
from tilelang_core.dialect import names_bound_at
from tilelang_core.uneven_copies import COPIES, executed
from tilescale.errors import Location, PhaseError, ShapeError, UsageError, one
from tilescale.hda import Machine
from tilescale.passes.upstream_rules import check_rules
from tilescale.program.effects import phases, statements
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
from tilescale.program.ops import COPY, VIEW

_PRODUCTS = (tl.GEMM, tl.GEMM_SP, tl.WGMMA_GEMM, tl.WGMMA_GEMM_SP, tl.TCGEN05_GEMM, tl.TCGEN05_GEMM_SP)


def check_launches(program: Program, machine: Machine) -> None:
    """All launches are of the same units.

    Raises:
        UsageError: there is none.
        PhaseError: they differ.
    """
    if not program.launches:
        raise UsageError(f"{program.name!r} launches nothing", hint="write the work inside `with T.Kernel(...)`")
    first, *others = program.launches
    for launch in others:
        if [(k, str(v)) for k, v in launch.extents] != [(k, str(v)) for k, v in first.extents]:
            raise PhaseError(
                f"launches of one program use different units: {_text(first)} and {_text(launch)}",
                hint="give every T.Kernel of the program the same levels",
                where=[w for w in (launch.where, first.where) if w],
            )


def check_loops(program: Program, machine: Machine) -> None:
    """Reject loops that TileLang refuses, in a program that TileLang does not receive unchanged. Raises UsageError:
    there are."""
    if program.is_hierarchical:
        check_rules(program)


def check_copies(program: Program, machine: Machine) -> None:
    """Both sides of each copy have extents with which TileLang copies something. Raises ShapeError: one has not."""
    for stmt, _, _ in statements(program.body):
        if not isinstance(stmt, ir.Evaluate) or ir.op_name(stmt.value) not in (*COPIES, COPY.name):
            continue
        if executed(stmt.value) is not None:
            continue
        source, target = (ir.region_parts(region) for region in ir.regions_of_copy(stmt.value))
        extents = [f"({', '.join(map(str, extents))}) of {buffer.name!r}" for buffer, _, extents in (source, target)]
        raise ShapeError(
            f"a copy between tiles of different extents: {' and '.join(extents)}",
            hint="slice both to the same extents",
            where=location(stmt),
        )


def _text(launch: Launch) -> str:
    return ", ".join(f"{name}={extent}" for name, extent in launch.extents) or "one device"


def check_whole_uses(program: Program, machine: Machine) -> None:
    """A parameter that is split over units exists nowhere as a whole: its uses must go through the view. Raises
    UsageError: one does not."""
    split = {v.parameter: v for p in program.parameters for v in p.views if not v.layout.is_replica}
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


def check_extents(program: Program, machine: Machine) -> None:
    """Check extents of allocations: memory is allocated before anything runs, equally for all units, from the arguments
    of a call. Raises UsageError: a tile whose extent is known in the launch only."""
    known = {p.var for p in program.parameters} | {var for _, var in program.extents if isinstance(var, ir.Var)}
    for parameter in program.parameters:
        if parameter.buffer is not None:
            known |= {var for n in parameter.buffer.shape for var in ir.variables(n)}
    for launch in program.launches:
        for buffer in launch.buffers:
            _check_extent(buffer, launch, known)


def _check_extent(buffer: ir.Buffer, launch: Launch, known: set[ir.Var]) -> None:
    unknown = sorted({str(var.name) for n in buffer.shape for var in ir.variables(n) if var not in known})
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
    owned_above = {var for var, level in launch.owners if machine.level(level).kind == "unit"}
    return {b.data: b for b in launch.buffers if b.scope() != "global" and b.data not in owned_above}


def check_device_phases(program: Program, machine: Machine) -> None:
    """Reject program indices, thread indices, programs' tiles, and GEMMs in a device phase, and in control flow around
    phases. Raises PhaseError: it has."""
    for launch in program.launches:
        _check_device_phases(launch, machine)


def _check_device_phases(launch: Launch, machine: Machine) -> None:
    program, device = machine.program_level.name, machine.tensor_level.name
    indices = {*launch.programs, *(var for var, _ in launch.thread_vars)}
    tiles = {data: b for data, b in _tiles(launch, machine).items() if b.scope() != ir.VARIABLE}
    for stmt in _device_statements(launch.body):
        if isinstance(stmt, ir.Evaluate) and str(ir.op_name(stmt.value)) in _PRODUCTS:
            raise PhaseError(
                f"T.gemm needs the threads of {one(program)}, but this runs once per {device}",
                hint=f"write it inside T.Scale({program!r}), of tiles: T.alloc, T.copy, T.gemm, T.copy",
                where=location(stmt),
            )
        used = next((var for var in ir.uses(stmt) if var in indices or var in tiles), None)
        if used is not None and used in indices:
            raise PhaseError(
                f"{_written_as(used, launch)!r} is an index of {one(program)}, but this runs once per {device}",
                hint=f"write it inside T.Scale({program!r}); ranks of coarser levels are there too",
                where=location(stmt),
            )
        if used is not None:
            raise PhaseError(
                f"tile {tiles[used].name!r} is one of {one(program)}, but this runs once per {device}",
                hint=f"write all that {one(program)} does inside T.Scale({program!r}); "
                f"T.Scale({device!r}) in there only says whose ranks are meant",
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


def _written_as(index: ir.Var, launch: Launch) -> str:
    """An index of a launch under the name that `with T.Kernel(...) as (x, y):` gives it."""
    names = names_bound_at(launch.where.file, launch.where.line) if launch.where else []
    number = next((i for i, var in enumerate(launch.programs) if var.same_as(index)), len(names))
    return names[number] if number < len(names) else index.name


def check_tiles(program: Program, machine: Machine) -> None:
    """Check that on-chip tiles are not used after their grid phase. Raises PhaseError: it is used in two."""
    for launch in program.launches:
        _check_tiles(launch, machine)


def _check_tiles(launch: Launch, machine: Machine) -> None:
    tiles = _tiles(launch, machine)
    seen: dict[ir.Var, tuple[int, Location | None]] = {}
    for number, phase in enumerate([phase for phase, _ in phases(launch.body) if isinstance(phase, GridPhase)]):
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
