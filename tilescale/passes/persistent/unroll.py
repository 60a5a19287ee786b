# SPDX-License-Identifier: MIT
"""Unroll loops around phases: layers of a model, steps of a decode loop.

Before: a serial loop of known trip count around launches or phases. After: the phases of each iteration, one after the
other, so tasks of one iteration depend on tasks of the one before tile by tile. Other control flow stays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.program.effects import phases
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Sequence
from tilescale.program.operations import TileView, operation


def unrolled(part: Part) -> Part:
    """A part of a program without loops around phases whose trip counts are known."""
    if isinstance(part, Launch):
        return replace(part, body=unrolled(part.body))
    if isinstance(part, Sequence):
        return Sequence(tuple(map(unrolled, part.parts)))
    if not isinstance(part, Control):
        return part
    inside = tuple(map(unrolled, part.parts))
    loop = part.stmt
    bounds = ir.constants([loop.min, loop.extent]) if isinstance(loop, ir.For) else None
    if bounds is None:
        return Control(loop, inside)
    begin, count = bounds
    return Sequence(tuple(_iteration(Sequence(inside), loop.loop_var, value) for value in range(begin, begin + count)))


def _iteration(part: Part, var: ir.Var, value: int) -> Part:
    """A part with a value for a loop's variable, and values of devices under names that no other iteration has."""
    mapping: dict[ir.Var, ir.PrimExpr] = {var: ir.IntImm(str(var.dtype), value)}
    for phase, _ in phases(part):
        for stmt in ir.statements(phase.stmt) if isinstance(phase, DevicePhase) else ():
            if isinstance(stmt, ir.Bind) and not isinstance(operation(stmt.value), TileView):
                mapping[stmt.var] = ir.Var(stmt.var.name, str(stmt.var.dtype))
    return _substituted(part, mapping)


def _substituted(part: Part, mapping: dict[ir.Var, ir.PrimExpr]) -> Part:
    if isinstance(part, DevicePhase | GridPhase):
        return type(part)(_renamed(ir.substitute(part.stmt, mapping), mapping))
    if isinstance(part, Launch):
        grid = tuple(ir.substitute(extent, mapping) for extent in part.grid)
        return replace(part, grid=grid, body=_substituted(part.body, mapping))
    inner = tuple(_substituted(p, mapping) for p in part.parts)
    return replace(part, parts=inner)


def _renamed(stmt: ir.Stmt, mapping: dict[ir.Var, ir.PrimExpr]) -> ir.Stmt:
    """Statements that bind the new names."""

    def leave(node: Any) -> ir.Stmt | None:
        name = mapping.get(node.var) if isinstance(node, ir.Bind) else None
        return tir.at(ir.Bind(name, node.value), node) if isinstance(name, ir.Var) else None

    return tir.rewrite(stmt, leave=leave)
