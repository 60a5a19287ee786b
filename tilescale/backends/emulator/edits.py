# SPDX-License-Identifier: MIT
"""A traced function with one more statement: the location of a source line in it, and the names in scope there."""

from __future__ import annotations

import linecache
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

from tilelang_core import ir, rewrite, trace
from tilelang_core.dialect import names_bound_at
from tilescale.errors import Location
from tilescale.program import ops
from tilescale.program.operations import Rank, operation

_TOGETHER = (ir.ForKind.PARALLEL, ir.ForKind.VECTORIZED, ir.ForKind.UNROLLED)
"""Loops into which no statement is added: the whole loop is one statement of its unit."""


@dataclass(frozen=True)
class Place:
    """A statement before or after which another one can be inserted.

    Attributes:
        lines: its first and last source line.
        names: integers in scope, the innermost last.
        ranks: integers in scope that are ranks, and their levels.
        grid: variables of the program's indices, the first axis first, their extents, and the user's names.
        loops: serial loops around it, the innermost last.
        level: the level whose ranks `dst=` means there.
    """

    stmt: ir.Stmt | None = None
    lines: tuple[int, int] = (0, 0)
    names: tuple[ir.Var, ...] = ()
    ranks: tuple[tuple[ir.Var, str], ...] = ()
    grid: tuple[tuple[ir.Var, ir.PrimExpr, str], ...] = ()
    loops: tuple[ir.For, ...] = ()
    level: str | None = None

    def of(self, written: Container[str]) -> Place:
        """The same place with only those names that the user has given."""
        names = tuple(var for var in self.names if var.name in written and var.name != "_")
        return replace(self, names=names, ranks=tuple(pair for pair in self.ranks if pair[0] in names))


def places(func: ir.PrimFunc, where: Location) -> list[Place]:
    """The statements of the function that come from a source line: several where Python repeats the line."""
    written = set(re.findall(r"\w+", "".join(linecache.getlines(where.file))))
    return [place.of(written) for place in _places(func.body, where, Place())]


def _places(stmt: ir.Stmt, where: Location, scope: Place) -> Iterator[Place]:
    if isinstance(stmt, ir.For) and stmt.kind in _TOGETHER or not any(True for _ in ir.children(stmt)):
        lines = sorted({line for file, line in _locations(stmt) if file == where.file})
        if where.line in lines:
            yield replace(scope, stmt=stmt, lines=(lines[0], lines[-1]))
        return
    if isinstance(stmt, ir.AttrStmt) and str(stmt.attr_key) == ops.SCALE:
        scope = replace(scope, level=str(stmt.value.value))
    elif isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.THREAD_BINDING:
        bound = names_bound_at(*(ir.stmt_location(stmt) or ("", 0)))
        own = bound[len(scope.grid)] if len(bound) > len(scope.grid) else stmt.loop_var.name
        scope = replace(scope, grid=(*scope.grid, (stmt.loop_var, stmt.extent, own)))
    elif isinstance(stmt, ir.For):
        scope = replace(scope, names=(*scope.names, stmt.loop_var), loops=(*scope.loops, stmt))
    found = False
    for inner in ir.children(stmt):
        for place in _places(inner, where, scope):
            found = True
            yield place
        if isinstance(inner, ir.Bind) and str(inner.var.dtype).startswith("int"):
            rank = operation(inner.value) if isinstance(inner.value, ir.Call) else None
            ranks = ((inner.var, rank.level),) if isinstance(rank, Rank) else ()
            scope = replace(scope, names=(*scope.names, inner.var), ranks=(*scope.ranks, *ranks))
    if not found and isinstance(stmt, ir.IfThenElse) and ir.stmt_location(stmt) == (where.file, where.line):
        yield replace(scope, stmt=stmt, lines=(where.line, where.line))


def _locations(stmt: ir.Stmt) -> Iterator[tuple[str, int]]:
    found = (ir.stmt_location(inner) for inner in ir.statements(stmt))
    return (place for place in found if place is not None)


def added(func: ir.PrimFunc, at: Sequence[Place], made: ir.Stmt, *, behind: bool) -> ir.PrimFunc:
    """The function with a statement inserted before, or after, each of some places."""

    def enter(node: ir.Stmt) -> ir.Stmt | None:
        if not any(node.same_as(place.stmt) for place in at):
            return None
        new = rewrite.at(ir.Evaluate(made.value), like=node)
        return ir.SeqStmt([node, new] if behind else [new, node])

    return func.with_body(rewrite.rewrite(func.body, enter=enter))


def wait(flag: ir.Buffer, index: Sequence[ir.PrimExpr], value: ir.PrimExpr) -> ir.Stmt:
    """`T.wait(flag[index], ">=", value)`."""
    return ir.Evaluate(trace.call(ops.WAIT, _element(flag, index), value, compare=">="))


def signal(flag: ir.Buffer, index: Sequence[ir.PrimExpr], peer: ir.PrimExpr | None, level: str | None) -> ir.Stmt:
    """`T.signal(flag[index], dst=peer)`; without a peer the unit's own flag."""
    element, one = _element(flag, index), ir.int_node(1)
    if peer is None:
        return ir.Evaluate(trace.call(ops.SIGNAL, element, one, op="add"))
    return ir.Evaluate(trace.call(ops.SIGNAL, element, one, peer, level=level, op="add"))


def _element(flag: ir.Buffer, index: Sequence[ir.PrimExpr]) -> ir.Call:
    return rewrite.region(flag, list(index), [1] * len(index), "rw")
