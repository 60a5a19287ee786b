# SPDX-License-Identifier: MIT
"""Rematerialize values in the phases that use them, where another phase computes them.

Why: a name bound between device phases, `row = bx * 128`, is a value of every program; the grid phase that binds it
ends before the next one begins. Before: such a binding is in one grid phase only. After: every later phase that uses it
begins with the binding, and control flow around phases that uses it follows a device phase with the binding. A binding
in a device phase needs nothing: the device outlives its phases.

Declines: a value that was read from memory may be another one later, which is a PhaseError.
"""

from __future__ import annotations

from dataclasses import replace

from tilelang_core import ir
from tilescale.errors import PhaseError
from tilescale.hda import Machine
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Program, Sequence, location
from tilescale.program.ops import VIEW


def rematerialize(program: Program, machine: Machine) -> Program:
    """The program, in which each phase has all bindings of earlier grid phases that it uses. Raises PhaseError: a value
    read from memory in one phase and used in another."""
    return replace(program, body=_in_launches(program.body))


def _in_launches(part: Part) -> Part:
    if isinstance(part, Launch):
        return replace(part, body=_Rematerializer().part(part.body))
    if isinstance(part, Sequence | Control):
        return replace(part, parts=tuple(map(_in_launches, part.parts)))
    return part


class _Rematerializer:
    def __init__(self) -> None:
        self.bound: dict[ir.Var, ir.Bind] = {}

    def part(self, part: Part) -> Part:
        if isinstance(part, Sequence):
            return Sequence(tuple(self.part(p) for p in part.parts))
        if isinstance(part, Control):
            needed = self._needed(part.stmt, ir.uses(part.stmt))
            inner = Control(part.stmt, tuple(self.part(p) for p in part.parts))
            return Sequence((DevicePhase(_in_order(needed)), inner)) if needed else inner
        if not isinstance(part, GridPhase | DevicePhase):
            return part
        needed = self._needed(part.stmt, [var for stmt in ir.statements(part.stmt) for var in ir.uses(stmt)])
        if isinstance(part, GridPhase):
            self._note(part.stmt)
        return type(part)(_in_order([*needed, part.stmt])) if needed else part

    def _note(self, stmt: ir.Stmt) -> None:
        for inner in ir.in_order(stmt):
            if isinstance(inner, ir.Bind):
                self.bound[inner.var] = inner

    def _needed(self, stmt: ir.Stmt, used: list[ir.Var]) -> list[ir.Bind]:
        """The bindings of earlier phases that are used, and those that they use, in order."""
        needed: set[ir.Var] = set()
        todo = list(used)
        while todo:
            var = todo.pop()
            if var in self.bound and var not in needed:
                self._check_pure(self.bound[var], stmt)
                needed.add(var)
                todo += ir.uses(self.bound[var])
        return [bind for var, bind in self.bound.items() if var in needed]

    def _check_pure(self, bind: ir.Bind, user: ir.Stmt) -> None:
        if ir.op_name(bind.value) == VIEW.name or ir.is_pure(bind.value):
            return
        raise PhaseError(
            f"{bind.var.name!r} is read from memory in one phase and used in another, when it may have changed",
            hint="read it again in the phase that uses it",
            where=[w for w in (location(user, "used here"), location(bind, "read here")) if w],
        )


def _in_order(stmts: list[ir.Stmt]) -> ir.Stmt:
    flat = [inner for stmt in stmts for inner in ir.in_order(stmt)]
    return flat[0] if len(flat) == 1 else ir.SeqStmt(flat)
