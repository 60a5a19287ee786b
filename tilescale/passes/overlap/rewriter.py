# SPDX-License-Identifier: MIT
"""Changes of a traced function: statements replaced, phases put around or between others, memory added to a launch.

The result is a traced function like any other: it is analysed, checked, printed and run as the user's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilelang_core.trace import call
from tilescale.hda import Machine
from tilescale.passes.declined import Declined
from tilescale.program.model import (
    Control,
    DevicePhase,
    GridPhase,
    Launch,
    Part,
    Program,
    Sequence,
    location,
)
from tilescale.program.ops import FLAGS, IN_ORDER, RANK, SCALE


@dataclass
class LaunchRewriter:
    """Changes of one launch.

    Attributes:
        program, launch: the objects to change; statements are recognised by identity.
        statements: a statement and its replacement, in order.
        phases: a phase, or a part that contains phases, and its replacement; nothing inside a replacement is replaced.
        buffers, flags: memory that is added, flags among it also in `flags`.
        grid: axes with other extents than the launch has.
        in_order: whether programs come to rely on starting in the order of their numbers.
    """

    program: Program
    launch: Launch
    machine: Machine
    statements: list[tuple[ir.Stmt, ir.Stmt]] = field(default_factory=list)
    phases: list[tuple[Part, tuple[Part, ...]]] = field(default_factory=list)
    buffers: list[ir.Buffer] = field(default_factory=list)
    flags: list[ir.Var] = field(default_factory=list)
    grid: dict[ir.Var, Any] = field(default_factory=dict)
    in_order: bool = False

    def alloc_flags(self, name: str, shape: Iterable[Any]) -> ir.Buffer:
        """Flags that are zero when a call begins, as `T.alloc_flags` makes them."""
        flags = tir.local_buffer(name, [ir.int_node(n) for n in shape], "int32", "global")
        self.buffers.append(flags)
        self.flags.append(flags.data)
        return flags

    def alloc(self, name: str, shape: Iterable[Any], dtype: str, scope: str = "global") -> ir.Buffer:
        """A workspace of the device, or a tile."""
        buffer = tir.local_buffer(name, [ir.int_node(n) for n in shape], dtype, scope)
        self.buffers.append(buffer)
        return buffer

    def before(self, stmt: ir.Stmt, added: Iterable[ir.Stmt]) -> None:
        """Put statements before one, and before those that are there."""
        at = next((i for i, (old, _) in enumerate(self.statements) if old.same_as(stmt)), None)
        now = stmt if at is None else self.statements.pop(at)[1]
        self.statements.append((stmt, tir.sequence([*(tir.at(s, stmt) for s in added), now])))

    def instead(self, phase: DevicePhase, stmt: ir.Stmt, parts: Iterable[Part]) -> None:
        """Put phases in the place of a statement of a device phase. Raises Declined: the statement is inside another
        one."""
        stmts = ir.in_order(phase.stmt)
        at = next((i for i, s in enumerate(stmts) if s.same_as(stmt)), None)
        if at is None:
            raise Declined("it is inside another statement", location(stmt))
        before, after = (DevicePhase(tir.sequence(part)) for part in (stmts[:at], stmts[at + 1 :]))
        self.phases.append((phase, (before, *parts, after)))

    def apply(self) -> ir.PrimFunc:
        notes = dict(self.launch.notes)
        if self.flags:
            notes[FLAGS] = {**dict(notes.get(FLAGS, {})), **{var: ir.IntImm("int32", 1) for var in self.flags}}
        if self.in_order:
            notes[IN_ORDER] = ir.IntImm("int32", 1)
        body = self._rebuilt(self._part(self.launch.body))
        number = self.program.launches.index(self.launch)
        return tir.relaunched(self.program.func, number, body, self.buffers, notes, self.grid)

    def statement(self, stmt: ir.Stmt) -> ir.Stmt:
        """A statement with all in it that is replaced."""

        def enter(node: object) -> ir.Stmt | None:
            if not isinstance(node, ir.Stmt):
                return None
            return next((new for old, new in self.statements if old.same_as(node)), None)

        return tir.rewrite(stmt, enter=enter)

    def _part(self, part: Part) -> Part:
        changed = next((new for old, new in self.phases if old is part), None)
        if changed is not None:
            return Sequence(changed)
        if isinstance(part, Sequence):
            return Sequence(tuple(self._part(p) for p in part.parts))
        if isinstance(part, Control):
            return Control(part.stmt, tuple(self._part(p) for p in part.parts))
        assert isinstance(part, DevicePhase | GridPhase)
        return replace(part, stmt=self.statement(part.stmt))

    # -- phases as statements --------------------------------------------------------------------------------------

    def _rebuilt(self, part: Part) -> ir.Stmt:
        """A launch's phases as one statement, as `passes.structure` takes it apart."""
        found: list[ir.Stmt] = []
        before: Part | None = None
        for inner in _flat(part):
            if isinstance(inner, DevicePhase):
                if tir.is_nothing(inner.stmt):
                    continue
                found.append(self._scale(self.machine.tensor_level.name, inner.stmt))
            elif isinstance(inner, GridPhase):
                stmt = inner.stmt
                if isinstance(before, GridPhase):  # adjacent grid phases would be one phase
                    scale = self._scale(self.machine.program_level.name, stmt)
                    stmt = self._scale(self.machine.tensor_level.name, scale)
                found.append(stmt)
            else:
                assert isinstance(inner, Control)
                found.append(_around(inner.stmt, [self._rebuilt(p) for p in inner.parts]))
            before = inner
        return tir.sequence(found)

    def _scale(self, level: str, stmt: ir.Stmt) -> ir.Stmt:
        node = ir.StringImm(level)
        return ir.AttrStmt(node, SCALE, node, stmt)


def _flat(part: Part) -> list[Part]:
    if not isinstance(part, Sequence):
        return [part]
    return [inner for child in part.parts for inner in _flat(child)]


def _around(stmt: ir.Stmt, bodies: list[ir.Stmt]) -> ir.Stmt:
    if isinstance(stmt, ir.For):
        return tir.relooped(stmt, body=bodies[0])
    if isinstance(stmt, ir.While):
        return tir.at(ir.While(stmt.condition, bodies[0]), stmt)
    assert isinstance(stmt, ir.IfThenElse)
    return tir.at(ir.IfThenElse(stmt.condition, bodies[0], bodies[1] if len(bodies) > 1 else None), stmt)


def bound(name: str, value: ir.PrimExpr) -> tuple[ir.Var, ir.Stmt]:
    """A new variable, and the statement that binds it."""
    var = ir.Var(name, "int32")
    return var, ir.Bind(var, value)


def rank_of(level: str) -> tuple[ir.Var, ir.Stmt]:
    """A variable for the unit's number among its siblings."""
    return bound(f"{level}_rank", call(RANK, level, dtype="int32"))


def located(stmts: list[ir.Stmt], like: ir.Stmt) -> list[ir.Stmt]:
    """Statements, with all nested ones, at the location of the collective."""
    for stmt in stmts:
        for inner in ir.statements(stmt):
            tir.at(inner, like)
    return stmts
