# SPDX-License-Identifier: MIT
"""Unroll loops around loops of phases: steps of a decode loop around layers of a model.

Before: a serial loop of known trip count around another loop of phases, or of one iteration. After: the parts of each
iteration, one after the other. Each iteration has its own tiles: one of all iterations would keep its shared memory
from the first to the last. Other control flow stays, so innermost loops do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.program.effects import phases
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Sequence
from tilescale.program.operations import TileView, operation


def unrolled(part: Part) -> Part:
    """A part of a program without loops of known trip counts around loops of phases."""
    if isinstance(part, Launch):
        return replace(part, body=unrolled(part.body))
    if isinstance(part, Sequence):
        return Sequence(tuple(map(unrolled, part.parts)))
    if not isinstance(part, Control):
        return part
    inside = tuple(map(unrolled, part.parts))
    loop = part.stmt
    bounds = ir.constants([loop.min, loop.extent]) if isinstance(loop, ir.For) else None
    if bounds is None or bounds[1] > 1 and not any(map(_has_control, inside)):
        return Control(loop, inside)
    begin, count = bounds
    return Sequence(tuple(_iteration(Sequence(inside), loop.loop_var, value) for value in range(begin, begin + count)))


def _has_control(part: Part) -> bool:
    """Whether there is a loop or branch around phases."""
    if isinstance(part, Launch):
        return _has_control(part.body)
    return isinstance(part, Control) or isinstance(part, Sequence) and any(map(_has_control, part.parts))


def _iteration(part: Part, var: ir.Var, value: int) -> Part:
    """A part with a value for a loop's variable, and values of devices under names that no other iteration has."""
    mapping: dict[ir.Var, ir.PrimExpr] = {var: ir.IntImm(str(var.dtype), value)}
    for phase, _ in phases(part):
        for stmt in ir.statements(phase.stmt) if isinstance(phase, DevicePhase) else ():
            if isinstance(stmt, ir.Bind) and not isinstance(operation(stmt.value), TileView):
                mapping[stmt.var] = ir.Var(stmt.var.name, str(stmt.var.dtype))
    return _with_own_tiles(_substituted(part, mapping))


def _with_own_tiles(part: Part) -> Part:
    """A part whose launches have tiles that no other iteration has; workspaces in device memory stay."""
    if isinstance(part, Launch):
        own = {b.data: _like(b) for b in part.buffers if b.scope() != "global"}
        buffers = tuple(own.get(b.data, b) for b in part.buffers)
        owners = tuple(_of_own(dict(part.owners), own).items())
        notes = tuple((key, _of_own(value, own)) for key, value in part.notes)
        return replace(part, buffers=buffers, owners=owners, notes=notes, body=_of_tiles(part.body, own))
    if isinstance(part, Sequence | Control):
        return replace(part, parts=tuple(map(_with_own_tiles, part.parts)))
    return part


def _like(tile: ir.Buffer) -> ir.Buffer:
    return tir.local_buffer(tile.name, tile.shape, str(tile.dtype), tile.scope())


def _of_own(value: Any, own: Mapping[ir.Var, ir.Buffer]) -> Any:
    """An annotation of a launch: by the data of its buffers, or not."""
    if not isinstance(value, Mapping):
        return value
    return {own[key].data if key in own else key: each for key, each in value.items()}


def _of_tiles(part: Part, own: Mapping[ir.Var, ir.Buffer]) -> Part:
    """A part with other tiles, by the data of those that it has."""

    def leave(node: ir.Node) -> Any:
        if isinstance(node, ir.BufferLoad) and node.buffer.data in own:
            return ir.BufferLoad(own[node.buffer.data], node.indices)
        if isinstance(node, ir.BufferStore) and node.buffer.data in own:
            return ir.BufferStore(own[node.buffer.data], node.value, node.indices)
        return None

    if isinstance(part, DevicePhase | GridPhase):
        data = {old: tile.data for old, tile in own.items()}
        return type(part)(ir.substitute(tir.rewrite(part.stmt, leave=leave), data))
    assert not isinstance(part, Launch), "launches are not nested"
    return replace(part, parts=tuple(_of_tiles(p, own) for p in part.parts))


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

    def leave(node: ir.Node) -> ir.Stmt | None:
        name = mapping.get(node.var) if isinstance(node, ir.Bind) else None
        return tir.at(ir.Bind(name, node.value), node) if isinstance(name, ir.Var) else None

    return tir.rewrite(stmt, leave=leave)
