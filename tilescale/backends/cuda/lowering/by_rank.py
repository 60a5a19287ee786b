# SPDX-License-Identifier: MIT
"""Grids with a branch by a device's rank in or around a pipelined loop: a grid for each way, the host takes one.

Why: what stands in a branch is not loaded ahead, and a kernel has one producer, for one loop; but a device knows its
rank before its programs start. The first device of a chain, which loads its input, and the others, which load what came
from the device before, each get a loop without the branch. Before: a program. After: the same, in which such a grid
phase is a branch of the host around two of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering.statements import is_pipelined
from tilescale.hda import Machine
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Program, Sequence
from tilescale.program.operations import Rank, operation

NOTE = "branches by a device's rank: a grid for each way, of which the host launches one"

_MOST = 2
"""Conditions of one grid that are decided: each doubles the number of kernels."""


def decided(program: Program, machine: Machine) -> tuple[Program, tuple[str, ...]]:
    """The program, and what is to be said of it."""
    body = _part(program.body, machine)
    return (program, ()) if body is program.body else (replace(program, body=body), (NOTE,))


def _part(part: Part, machine: Machine) -> Part:
    if isinstance(part, GridPhase):
        return _grid(part, machine, _MOST)
    if isinstance(part, Launch):
        body = _part(part.body, machine)
        return part if body is part.body else replace(part, body=body)
    if isinstance(part, Sequence | Control):
        parts = tuple(_part(inner, machine) for inner in part.parts)
        same = all(new is old for new, old in zip(parts, part.parts, strict=True))
        return part if same else replace(part, parts=parts)
    return part


def _grid(phase: GridPhase, machine: Machine, most: int) -> Part:
    ranks = {s.var: s for s in ir.statements(phase.stmt) if isinstance(s, ir.Bind) and _is_rank(s.value, machine)}
    condition = next(_conditions(phase.stmt, ranks), None) if most else None
    if condition is None:
        return phase
    ways = tuple(_grid(GridPhase(_taken(phase.stmt, condition, way)), machine, most - 1) for way in (True, False))
    # Variables of their own, as those of the grid are bound in its kernels.
    known = {var: ir.Var(var.name, var.dtype) for var in sorted(ir.variables(condition), key=str)}
    binds = tuple(DevicePhase(ir.Bind(mine, ranks[var].value)) for var, mine in known.items())
    branch = ir.IfThenElse(ir.substitute(condition, known), tir.sequence([]), tir.sequence([]))
    return Sequence((*binds, Control(branch, ways)))


def _is_rank(value: ir.PrimExpr, machine: Machine) -> bool:
    """Whether an expression is the rank of a device, or of what it is in."""
    rank = operation(value)
    return isinstance(rank, Rank) and machine.level(rank.level).kind == "unit"


def _conditions(stmt: ir.Stmt, ranks: dict[ir.Var, ir.Bind], inside: bool = False) -> Iterator[ir.PrimExpr]:
    """The conditions that ranks decide in and around pipelined loops; `inside`: whether one is around the statement."""
    if isinstance(stmt, ir.IfThenElse) and (inside or ir.contains(stmt, is_pipelined)):
        used = ir.variables(stmt.condition)
        if used and used <= ranks.keys() and ir.is_pure(stmt.condition):
            yield stmt.condition
    for inner in ir.children(stmt):
        yield from _conditions(inner, ranks, inside or is_pipelined(stmt))


def _taken(stmt: ir.Stmt, condition: ir.PrimExpr, way: bool) -> ir.Stmt:
    """A grid's statement on the devices that go one way."""

    def arm(node: ir.Stmt) -> ir.Stmt | None:
        if not isinstance(node, ir.IfThenElse) or not ir.same(node.condition, condition):
            return None
        chosen = node.then_case if way else node.else_case
        return _taken(chosen, condition, way) if chosen is not None else tir.sequence([])

    def dense(node: ir.Stmt) -> ir.Stmt | None:
        return tir.sequence(node.seq) if isinstance(node, ir.SeqStmt) and any(map(tir.is_nothing, node.seq)) else None

    return tir.rewrite(stmt, enter=arm, leave=dense)
