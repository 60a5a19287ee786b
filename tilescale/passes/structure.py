# SPDX-License-Identifier: MIT
"""Take a traced function apart into launches and phases.

Why: the emulator, the cost model and the lowering all need to know what runs per device and what per program.
Before: one PrimFunc whose kernel body mixes `T.Scale` regions. After: a `Program` (see program/model.py).

A kernel body's top-level statements run on the grid, except those inside a scale of a level above the program, which
are a device phase; a finer scale inside a device phase opens the grid again. Control flow that contains a device
phase stays outside the grid. It declines nothing: what has no order is a PhaseError.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilelang_core import ir
from tilescale.errors import Location, PhaseError, UsageError
from tilescale.hda import Machine
from tilescale.program.layout import Layout
from tilescale.program.model import (
    Control,
    DevicePhase,
    GridPhase,
    Launch,
    Parameter,
    Part,
    Program,
    Sequence,
    View,
)
from tilescale.program.ops import EXTENT, OWNER, SCALE, VIEW


def location(stmt: ir.Stmt, what: str = "") -> Location | None:
    """Where a statement stands in the user's program."""
    found = ir.stmt_location(stmt)
    return Location(*found, what) if found else None


def structure(func: ir.PrimFunc, machine: Machine) -> Program:
    """The program that a traced function is, for a machine.

    Raises:
        PhaseError: a program index in a device phase, an on-chip tile that lives across phases, launches that differ in
            their units.
        UsageError: a sharded parameter used whole; no launch at all.
    """
    program = Program(
        name=str(func.attrs["global_symbol"]) if func.attrs and "global_symbol" in func.attrs else "program",
        func=func,
        parameters=_parameters(func),
        body=_Builder(machine).host(func.body),
    )
    if not program.launches:
        raise UsageError(f"{program.name!r} launches nothing", hint="write the work inside `with T.Kernel(...)`")
    _check_launches(program)
    _check_whole_uses(program)
    for launch in program.launches:
        _check_phases(launch, machine)
    return program


class _Builder:
    def __init__(self, machine: Machine):
        self.machine = machine
        self.program_index = machine.index(machine.program_level.name)

    # -- host level: launches and what is around them ---------------------------------------------------------------

    def host(self, stmt: ir.Stmt) -> Part:
        if _is_grid_loop(stmt):
            return self.launch(stmt)
        if isinstance(stmt, ir.SBlockRealize | ir.SBlock | ir.AttrStmt):
            return Sequence(tuple(self.host(s) for s in ir.children(stmt)))
        if isinstance(stmt, ir.SeqStmt):
            return Sequence(tuple(self.host(s) for s in stmt.seq))
        if isinstance(stmt, ir.For | ir.While | ir.IfThenElse) and ir.contains(stmt, _is_grid_loop):
            return Control(stmt, tuple(self.host(s) for s in ir.children(stmt)))
        return DevicePhase(stmt)

    def launch(self, stmt: ir.Stmt) -> Launch:
        where, grid, programs, threads = location(stmt), [], [], []
        while _is_grid_loop(stmt):
            grid.append(stmt.extent)
            programs.append(stmt.loop_var)
            stmt = stmt.body
        for inner in _flat(stmt):
            if isinstance(inner, ir.Bind):
                threads.append((inner.var, ir.constant(inner.value.args[0])))
            elif isinstance(inner, ir.SBlockRealize):
                block = inner.block
        notes = {str(k): v for k, v in block.annotations.items()}
        extents = {k.removeprefix(EXTENT): v for k, v in notes.items() if k.startswith(EXTENT)}
        coarse_first = sorted(extents, key=self.machine.index, reverse=True)
        return Launch(
            extents=tuple((name, extents[name]) for name in coarse_first),
            grid=tuple(grid),
            programs=tuple(programs),
            threads=tuple(int(n) for n in notes["tl.launch_threads"]),
            thread_vars=tuple(threads),
            cluster=tuple(int(n) for n in notes.get("cluster_dims", (1, 1, 1))),
            buffers=tuple(block.alloc_buffers),
            owners=tuple((var, str(level.value)) for var, level in notes.get(OWNER, {}).items()),
            barriers=tuple((v, tuple(int(n) for n in counts)) for v, counts in notes.get("barrier_init", {}).items()),
            body=self.phases(block.body),
            where=where,
        )

    # -- inside a launch: phases ----------------------------------------------------------------------------------------

    def phases(self, stmt: ir.Stmt) -> Part:
        """Statements outside any scale, or between scales of both kinds."""
        if not ir.contains(stmt, self._is_device_scale):
            return GridPhase(stmt)
        if self._is_device_scale(stmt):
            return self.device(stmt.body)
        if isinstance(stmt, ir.SeqStmt):
            return self._group(stmt, self._is_phase_free, GridPhase, self.phases)
        if isinstance(stmt, ir.AttrStmt) and str(stmt.attr_key) == SCALE:
            return GridPhase(stmt)
        if isinstance(stmt, ir.AttrStmt):
            return self.phases(stmt.body)
        return Control(stmt, tuple(self.phases(s) for s in ir.children(stmt)))

    def device(self, stmt: ir.Stmt) -> Part:
        """Statements inside a scale above the program."""
        if not ir.contains(stmt, self._is_grid_scale):
            return DevicePhase(stmt)
        if self._is_grid_scale(stmt):
            return GridPhase(stmt)
        if isinstance(stmt, ir.SeqStmt):
            return self._group(stmt, lambda s: not ir.contains(s, self._is_grid_scale), DevicePhase, self.device)
        if isinstance(stmt, ir.AttrStmt):
            return self.device(stmt.body)
        return Control(stmt, tuple(self.device(s) for s in ir.children(stmt)))

    def _is_phase_free(self, stmt: ir.Stmt) -> bool:
        if isinstance(stmt, ir.AttrStmt) and str(stmt.attr_key) == SCALE:
            return not self._is_device_scale(stmt)
        return not _contains_outside_grid_scales(stmt, self._is_device_scale, self._is_grid_scale)

    def _group(self, stmt: ir.SeqStmt, plain, phase, recurse) -> Part:
        """Runs of statements that `plain` accepts become one phase each; the others are taken apart."""
        parts: list[Part] = []
        run: list[ir.Stmt] = []
        for inner in [*stmt.seq, None]:
            if inner is not None and plain(inner):
                run.append(inner)
                continue
            if run:
                parts.append(phase(run[0] if len(run) == 1 else ir.SeqStmt(run)))
                run = []
            if inner is not None:
                parts.append(recurse(inner))
        return Sequence(tuple(parts))

    def _is_device_scale(self, node: object) -> bool:
        return self._scale_index(node) > self.program_index and not self._is_grid_scale(node)

    def _is_grid_scale(self, node: object) -> bool:
        index = self._scale_index(node)
        return 0 <= index <= self.program_index or (index >= 0 and self.machine.levels[index].kind == "cluster")

    def _scale_index(self, node: object) -> int:
        is_scale = isinstance(node, ir.AttrStmt) and str(node.attr_key) == SCALE
        return self.machine.index(str(node.value.value)) if is_scale else -1


def _contains_outside_grid_scales(stmt: ir.Stmt, wanted, barrier) -> bool:
    """Whether `wanted` holds for a statement below `stmt` that no scale of the grid encloses."""
    if wanted(stmt):
        return True
    return not barrier(stmt) and any(_contains_outside_grid_scales(s, wanted, barrier) for s in ir.children(stmt))


def _is_grid_loop(node: object) -> bool:
    return (
        isinstance(node, ir.For)
        and node.kind == ir.ForKind.THREAD_BINDING
        and str(node.thread_binding.thread_tag).startswith("blockIdx")
    )


def _flat(stmt: ir.Stmt) -> Iterator[ir.Stmt]:
    if isinstance(stmt, ir.SeqStmt):
        for inner in stmt.seq:
            yield from _flat(inner)
    else:
        yield stmt


# -- parameters and their views --------------------------------------------------------------------------------------


def _parameters(func: ir.PrimFunc) -> tuple[Parameter, ...]:
    views = list(_views(func))
    result = []
    for var, buffer in ir.parameters(func):
        mine = tuple(v for v in views if buffer is not None and v.parameter.same_as(buffer.data))
        shape = tuple(buffer.shape) if buffer is not None else ()
        for view in mine:
            shape = view.shape
        result.append(Parameter(var, buffer, shape, mine))
    return tuple(result)


def _views(func: ir.PrimFunc) -> Iterator[View]:
    tensors = [b.data for _, b in ir.parameters(func) if b is not None]
    binds: list[ir.Bind] = []
    ir.walk(func.body, lambda n: binds.append(n) if isinstance(n, ir.Bind) and ir.op_name(n.value) == VIEW.name else 0)
    for bind in binds:
        base = ir.region_parts(bind.value.args[0])[0]
        if any(base.data.same_as(t) for t in tensors):
            layout = Layout(ir.attribute(bind.value, "dim"), ir.attribute(bind.value, "block"))
            shape = tuple(bind.value.args[1:])
            yield View(base.data, bind.var, ir.attribute(bind.value, "level"), layout, shape, location(bind))


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_launches(program: Program) -> None:
    first, *others = program.launches
    for launch in others:
        if [(k, str(v)) for k, v in launch.extents] != [(k, str(v)) for k, v in first.extents]:
            raise PhaseError(
                f"launches of one program use different units: {_text(first)} and {_text(launch)}",
                hint="give every T.Kernel of the program the same levels",
                where=[w for w in (first.where, launch.where) if w],
            )


def _text(launch: Launch) -> str:
    return ", ".join(f"{name}={extent}" for name, extent in launch.extents) or "one device"


def _check_whole_uses(program: Program) -> None:
    """A parameter that is split over units exists nowhere as a whole: its uses must go through the view."""
    for parameter in program.parameters:
        split = next((v for v in parameter.views if not v.layout.is_replica), None)
        if split is None:
            continue
        for stmt, node in _leaf_uses(program.func.body):
            is_view = isinstance(stmt, ir.Bind) and ir.op_name(stmt.value) == VIEW.name
            if node.buffer.data.same_as(parameter.buffer.data) and not is_view:
                raise UsageError(
                    f"{parameter.name!r} is split over level {split.level!r} by a view, but used whole here",
                    hint="use the view: each unit holds only its share",
                    where=[w for w in (location(stmt, "used whole"), split.where) if w],
                )


def _leaf_uses(stmt: ir.Stmt) -> Iterator[tuple[ir.Stmt, object]]:
    """Statements without inner statements, each with the buffer accesses in it."""
    inner = list(ir.children(stmt))
    for child in inner:
        yield from _leaf_uses(child)
    if not inner:
        accesses: list[object] = []
        ir.walk(stmt, lambda n: accesses.append(n) if isinstance(n, ir.BufferLoad | ir.BufferStore) else None)
        yield from ((stmt, node) for node in accesses)


def _check_phases(launch: Launch, machine: Machine) -> None:
    indices = {var.name: var for var in (*launch.programs, *(v for v, _ in launch.thread_vars))}
    seen: dict[str, Location | None] = {}
    owned_above = {var for var, level in launch.owners if machine.level(level).kind == "unit"}
    on_chip = [b for b in launch.buffers if b.scope() != "global" and b.data not in owned_above]
    grid_number = 0
    for phase in _leaves(launch.body):
        if isinstance(phase, DevicePhase):
            _check_device_phase(phase, indices, machine)
            continue
        grid_number += 1
        for stmt, node in _leaf_uses(phase.stmt):
            tile = next((b for b in on_chip if b.data.same_as(node.buffer.data)), None)
            if tile is None:
                continue
            number, first = seen.setdefault(tile.name, (grid_number, location(stmt, "first used")))
            if number != grid_number:
                raise PhaseError(
                    f"tile {tile.name!r} is used in two phases; what a program holds on chip ends with its phase",
                    hint="keep it in device memory between phases: T.alloc(..., level=...) of a global layer",
                    where=[w for w in (location(stmt, "used again"), first) if w],
                )


def _check_device_phase(phase: DevicePhase, indices: dict[str, ir.Var], machine: Machine) -> None:
    for stmt, used in _variables(phase.stmt):
        name = next((name for name, var in indices.items() if any(var.same_as(u) for u in used)), None)
        if name is not None:
            raise PhaseError(
                f"{name!r} is an index of a {machine.program_level.name}, but this runs once per "
                f"{machine.tensor_level.name}",
                hint=f"write it inside T.Scale({machine.program_level.name!r}); ranks of coarser levels are there too",
                where=location(stmt),
            )


def _variables(stmt: ir.Stmt) -> Iterator[tuple[ir.Stmt, list[ir.Var]]]:
    inner = list(ir.children(stmt))
    for child in inner:
        yield from _variables(child)
    if not inner:
        used: list[ir.Var] = []
        ir.walk(stmt, lambda n: used.append(n) if isinstance(n, ir.Var) else None)
        yield stmt, used


def _leaves(part: Part) -> Iterator[DevicePhase | GridPhase]:
    if isinstance(part, Sequence | Control):
        for inner in part.parts:
            yield from _leaves(inner)
    elif isinstance(part, DevicePhase | GridPhase):
        yield part

