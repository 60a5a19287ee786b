# SPDX-License-Identifier: MIT
"""Two roles in a program of a cluster: warps that load ahead, and the user's threads, which use what was loaded.

Before: the lowered body of a phase, with the loads of its loops marked. After: a branch on the thread index. The user's
threads keep their numbers and run everything but the loads; threads beyond them run the loads, in the same loops and
branches, with the same barriers of the cluster, which wait for all of its threads. So a load stays behind every barrier
that stood before it, and runs ahead of everything else, as far as its ring has room. Declines phases in which the
loading threads could not know which way the program goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang_core import ir, specialise
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering.clusters.dsmem import is_barrier
from tilescale.backends.cuda.lowering.roles import LOADING
from tilescale.backends.cuda.ptx import WARP, WARPGROUP, most_threads, registers_of
from tilescale.hda import Machine
from tilescale.program.model import Launch

AHEAD = "tilescale.ahead"
"""Marks a statement of the loading warps."""

APART = "tilescale.apart"
"""AttrStmt key: a body whose marked statements so many added threads, the value, execute beside the rest."""

def ahead(stmt: ir.Stmt) -> ir.Stmt:
    """Mark a statement as one of the loading warps."""
    return ir.AttrStmt(ir.IntImm("int32", 0), AHEAD, ir.IntImm("int32", 0), stmt)


def loaders(launch: Launch, machine: Machine, phase: ir.Stmt) -> int:
    """How many threads may be added to a phase's program to load for it; 0 if its loads cannot be split off."""
    x, y, z = launch.threads
    added = WARP if x % WARPGROUP else WARPGROUP
    if x % WARP or y * z > 1 or x + added > most_threads(machine) or _is_unforeseen(phase, set()):
        return 0
    return added


def _is_unforeseen(stmt: ir.Stmt, read: set[ir.Var]) -> bool:
    """Whether the way through a statement depends on memory, by way of the names in `read` too."""

    def depends(expr: Any) -> bool:
        return isinstance(expr, ir.PrimExpr) and (not ir.is_pure(expr) or bool(ir.variables(expr) & read))

    if isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL:
        return False
    if isinstance(stmt, ir.Bind) and depends(stmt.value):
        read.add(stmt.var)
    decisive = {ir.For: ("min", "extent"), ir.IfThenElse: ("condition",)}.get(type(stmt), ())
    if isinstance(stmt, ir.While) or any(depends(getattr(stmt, name)) for name in decisive):
        return True
    return any(_is_unforeseen(inner, read) for inner in ir.children(stmt))


def apart(added: int, body: ir.Stmt) -> ir.Stmt:
    """A body whose loads `added` threads are to make, once it is lowered (`split`)."""
    return ir.AttrStmt(ir.StringImm(APART), APART, ir.IntImm("int32", added), body)


def split(launch: Launch, machine: Machine, stmt: ir.Stmt) -> ir.Stmt:
    """A phase with a branch in the place of each body with loads: the threads added load, the others do the rest."""

    def leave(node: Any) -> ir.Stmt | None:
        is_apart = isinstance(node, ir.AttrStmt) and str(node.attr_key) == APART
        return _branch(launch, machine, ir.integer(node.value), node.body) if is_apart else None

    return tir.rewrite(stmt, leave=leave)


def _branch(launch: Launch, machine: Machine, added: int, body: ir.Stmt) -> ir.Stmt:
    threads, thread = launch.thread_count, next(var for var, axis in launch.thread_vars if axis == 0)
    roles = [_Loading(thread < threads + WARP).role(body), tir.rewrite(body, enter=_without_loads)]
    if added == WARPGROUP < threads:  # a single group has as many registers as an instruction can name
        more = specialise.registers_left(registers_of(machine), threads, LOADING)
        limits = (tir.register_limit(LOADING, more=False), tir.register_limit(more, more=True))
        roles = [tir.sequence([limit, role]) for limit, role in zip(limits, roles, strict=True)]
    return tir.specialized(thread >= threads, *roles)


def is_split(body: ir.Stmt) -> bool:
    """Whether a body has loads to split off."""
    return ir.contains(body, _is_ahead)


def _is_ahead(node: Any) -> bool:
    return isinstance(node, ir.AttrStmt) and str(node.attr_key) == AHEAD


def _without_loads(node: Any) -> ir.Stmt | None:
    return tir.sequence([]) if _is_ahead(node) else None


class _Loading:
    """What the loading warps run: one of them the loads, all of them the barriers, in the loops and branches around.

    Attributes:
        one: whether a thread is of the warp that loads.
        named: the names that the statements visited so far use; they are visited last one first.
    """

    def __init__(self, one: ir.PrimExpr):
        self.one = one
        self.named: set[ir.Var] = set()

    def role(self, body: ir.Stmt) -> ir.Stmt:
        """The part of a body, with names of its own."""
        return tir.renamed(self._part(body))

    def _part(self, stmt: ir.Stmt) -> ir.Stmt:
        if _is_ahead(stmt):
            self.named.update(v for inner in ir.statements(stmt.body) for v in ir.uses(inner))
            return ir.IfThenElse(self.one, stmt.body, None)
        if is_barrier(stmt) or (isinstance(stmt, ir.Bind) and stmt.var in self.named):
            self.named.update(ir.uses(stmt))
            return stmt
        if isinstance(stmt, ir.SeqStmt):
            return tir.sequence([self._part(inner) for inner in reversed(stmt.seq)][::-1])
        if isinstance(stmt, ir.AttrStmt):
            return self._part(stmt.body)
        if isinstance(stmt, ir.IfThenElse):
            cases = [None if case is None else self._part(case) for case in (stmt.else_case, stmt.then_case)][::-1]
            return self._around(stmt, cases, lambda: ir.IfThenElse(stmt.condition, *cases))
        if isinstance(stmt, ir.For) and stmt.kind != ir.ForKind.PARALLEL:
            body = self._part(stmt.body)
            return self._around(stmt, [body], lambda: ir.For(stmt.loop_var, stmt.min, stmt.extent, stmt.kind, body))
        return tir.sequence([])

    def _around(self, stmt: ir.Stmt, parts: list[ir.Stmt | None], again: Callable[[], ir.Stmt]) -> ir.Stmt:
        """A loop or branch around its parts, unless they do nothing."""
        if all(part is None or tir.is_nothing(part) for part in parts):
            return tir.sequence([])
        self.named.update(ir.uses(stmt))
        return again()
