# SPDX-License-Identifier: MIT
"""Take a traced function apart into launches and phases.

Why: the emulator, the cost model and the lowering all need to know the statements per device and per program. Before:
one PrimFunc whose kernel body mixes `T.Scale` regions. After: a `Program` (see program/model.py).

A kernel body's top-level statements run on the grid, except those inside a scale of a level above the program, which
are a device phase; a finer scale inside a device phase opens the grid again. Control flow that contains a device phase
stays outside the grid. Values that one phase computes and another uses are computed in both (rematerialize.py);
unordered phases are an error (validate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tilelang_core import ir, tl
from tilelang_core.launches import in_one_form
from tilelang_core.rules import counted_from_the_begin
from tilelang_core.scalars import thread_axis
from tilelang_core.trace import DEFAULT_THREADS
from tilescale.hda import Machine
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
    location,
)
from tilescale.program.operations import TileView, operation
from tilescale.program.ops import ALL_OPS, EXTENT, FLAGS, IN_ORDER, OWNER, SCALE


def name_of(func: ir.PrimFunc) -> str:
    """The name of a traced function."""
    return str(func.attrs["global_symbol"]) if func.attrs and "global_symbol" in func.attrs else "program"


def structure(func: ir.PrimFunc, machine: Machine) -> Program:
    """The program that a traced function is, for a machine.

    It knows nothing yet of values between phases, and has not been checked: see pipeline.py.
    """
    return Program(
        name=name_of(func),
        func=func,
        parameters=_parameters(func),
        body=_Builder(machine).host(in_one_form(counted_from_the_begin(func)).body),
        is_hierarchical=ir.contains(func.body, _is_ours),
    )


def _is_ours(node: object) -> bool:
    if isinstance(node, ir.AttrStmt):
        return str(node.attr_key) == SCALE
    if isinstance(node, ir.SBlock):
        return any(str(key).startswith(EXTENT) for key in node.annotations)
    return ir.op_name(node) in ALL_OPS


class _Builder:
    def __init__(self, machine: Machine):
        self.machine = machine
        self.program_index = machine.index(machine.program_level.name)
        self.buffers: list[ir.Buffer] = []

    # -- host level: launches and enclosing control flow -----------------------------------------------------------

    def host(self, stmt: ir.Stmt) -> Part:
        if _is_grid_loop(stmt):
            return self.launch(stmt)
        if isinstance(stmt, ir.SBlock):
            self.buffers += stmt.alloc_buffers
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
        for inner in ir.in_order(stmt):
            if isinstance(inner, ir.Bind):
                threads.append((inner.var, thread_axis(inner.value)))
            elif isinstance(inner, ir.SBlockRealize):
                block = inner.block
        notes = {str(k): v for k, v in block.annotations.items()}
        extents = {k.removeprefix(EXTENT): v for k, v in notes.items() if k.startswith(EXTENT)}
        coarse_first = sorted(extents, key=self.machine.index, reverse=True)
        return Launch(
            extents=tuple((name, extents[name]) for name in coarse_first),
            grid=tuple(grid),
            programs=tuple(programs),
            threads=_three(notes.get(tl.LAUNCH_THREADS, (DEFAULT_THREADS, 1, 1))),
            thread_vars=tuple(threads),
            cluster=_three(notes.get("cluster_dims", (1, 1, 1))),
            buffers=(*self.buffers, *block.alloc_buffers),
            owners=tuple((var, str(level.value)) for var, level in notes.get(OWNER, {}).items()),
            barriers=tuple((v, tuple(int(n) for n in counts)) for v, counts in notes.get("barrier_init", {}).items()),
            flags=tuple(notes.get(FLAGS, ())),
            in_order=IN_ORDER in notes,
            notes=tuple(notes.items()),
            body=self.phases(block.body),
            where=where,
        )

    # -- inside a launch: phases ---------------------------------------------------------------------------------------

    def phases(self, stmt: ir.Stmt) -> Part:
        """Statements outside any scale, or between scales of both kinds."""
        if self._is_phase_free(stmt):
            return GridPhase(stmt)
        if self._is_device_scale(stmt):
            return self.device(stmt.body)
        if isinstance(stmt, ir.SeqStmt):
            return self._group(stmt, self._is_phase_free, GridPhase, self.phases)
        if isinstance(stmt, ir.AttrStmt):
            return _in_attribute(stmt, self.phases(stmt.body))
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
        """Whether no scale above the program is below `stmt`, but for those inside scales of the grid."""
        if self._is_device_scale(stmt):
            return False
        return self._is_grid_scale(stmt) or all(self._is_phase_free(s) for s in ir.children(stmt))

    def _group(
        self,
        stmt: ir.SeqStmt,
        plain: Callable[[ir.Stmt], bool],
        phase: Callable[[ir.Stmt], Part],
        recurse: Callable[[ir.Stmt], Part],
    ) -> Part:
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
        if not isinstance(node, ir.AttrStmt) or str(node.attr_key) != SCALE:
            return -1
        return self.machine.index(str(node.value.value))


def _three(extents: Iterable[Any]) -> tuple[int, int, int]:
    x, y, z = map(int, extents)
    return x, y, z


def _is_grid_loop(node: object) -> bool:
    return (
        isinstance(node, ir.For)
        and node.kind == ir.ForKind.THREAD_BINDING
        and str(node.thread_binding.thread_tag).startswith("blockIdx")
    )


def _in_attribute(stmt: ir.AttrStmt, part: Part) -> Part:
    """Apply an attribute such as an order of blocks to each grid phase in it."""
    if isinstance(part, GridPhase):
        return GridPhase(ir.AttrStmt(stmt.node, stmt.attr_key, stmt.value, part.stmt))
    if isinstance(part, Sequence):
        return Sequence(tuple(_in_attribute(stmt, inner) for inner in part.parts))
    if isinstance(part, Control):
        return Control(part.stmt, tuple(_in_attribute(stmt, inner) for inner in part.parts))
    return part


# -- parameters and their views --------------------------------------------------------------------------------------


def _parameters(func: ir.PrimFunc) -> tuple[Parameter, ...]:
    views = list(_views(func))
    result = []
    for var, buffer in ir.parameters(func):
        if buffer is None:
            result.append(Parameter(var, None))
            continue
        mine = tuple(v for v in views if v.parameter.same_as(buffer.data))
        shape = tuple(buffer.shape)
        for view in mine:
            shape = view.shape
        result.append(Parameter(var, buffer, shape, mine))
    return tuple(result)


def _views(func: ir.PrimFunc) -> Iterator[View]:
    tensors = [b.data for _, b in ir.parameters(func) if b is not None]
    for bind in (stmt for stmt in ir.statements(func.body) if isinstance(stmt, ir.Bind)):
        view = operation(bind.value)
        if isinstance(view, TileView) and any(view.base.data.same_as(t) for t in tensors):
            yield View(view.base.data, bind.var, view.level, view.layout, view.shape, location(bind))
