# SPDX-License-Identifier: MIT
"""Split a phase between producer and consumers, on the thread index.

Before: a lowered phase whose loads are marked (markers.py): those of thread groups after all other statements,
complete; those of a cluster in place in a body that is marked too. There the producer warps run the same loops and
branches, and the same barriers of the cluster, which wait for all of its threads. So a load stays after every barrier
before it, and runs ahead of everything else, as far as its ring has free slots. After: a branch, each role with its
registers. The consumers keep their thread indices. Declines phases in which the producer could not evaluate the
program's branches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.clusters.dsmem import is_barrier
from tilescale.backends.tilelang.lowering.markers import is_grid_wait, is_loading
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.backends.tilelang.lowering.role_graph.graph import COMPUTE, LOAD, Role, RoleGraph
from tilescale.backends.tilelang.ptx import WARP, WARPGROUP, most_threads
from tilescale.hda import Machine
from tilescale.program.model import Launch

APART = "tilescale.apart"
"""AttrStmt key: a body whose marked statements the producer executes concurrently with the rest."""


def producer_graph(
    launch: Launch, machine: Machine, phase: ir.Stmt, concerns: Callable[[ir.Stmt], bool] = lambda stmt: True
) -> RoleGraph:
    """The roles of a program in which warps load ahead; none if its loads cannot be split off. `concerns`: whether the
    producer runs a loop or branch."""
    x, y, z = launch.threads
    added = WARP if x % WARPGROUP else WARPGROUP
    if x % WARP or y * z > 1 or x + added > most_threads(machine) or _is_unforeseen(phase, set(), concerns):
        return RoleGraph()
    graph = RoleGraph((Role(COMPUTE, x), Role(LOAD, added)))
    # A single group has as many registers as an instruction can name.
    return graph.with_registers(machine) if added == WARPGROUP < x else graph


def _is_unforeseen(stmt: ir.Stmt, read: set[ir.Var], concerns: Callable[[ir.Stmt], bool]) -> bool:
    """Whether the control flow of a statement depends on memory, also through the names in `read`."""

    def depends(expr: object) -> bool:
        return isinstance(expr, ir.PrimExpr) and (not ir.is_pure(expr) or bool(ir.variables(expr) & read))

    if isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL:
        return False
    if not isinstance(stmt, ir.Bind | ir.SeqStmt) and not concerns(stmt):
        return False
    if isinstance(stmt, ir.Bind) and depends(stmt.value):
        read.add(stmt.var)
    decisive = {ir.For: ("min", "extent"), ir.IfThenElse: ("condition",)}.get(type(stmt), ())
    if isinstance(stmt, ir.While) or any(depends(getattr(stmt, name)) for name in decisive):
        return True
    return any(_is_unforeseen(inner, read, concerns) for inner in ir.children(stmt))


def apart(body: ir.Stmt) -> ir.Stmt:
    """A body whose loads the loading role is to make, once it is lowered."""
    return ir.AttrStmt(ir.StringImm(APART), APART, ir.IntImm("int32", 1), body)


def is_apart(node: ir.Node) -> bool:
    """Whether a node is such a body."""
    return isinstance(node, ir.AttrStmt) and str(node.attr_key) == APART


def lower(phase: Phase) -> Phase:
    """A phase in which nothing is marked as loading any more."""
    if not phase.graph.added:
        return phase
    thread = next(var for var, axis in phase.launch.thread_vars if axis == 0)
    split = _Split(thread, *phase.graph.roles)

    def leave(node: ir.Node) -> ir.Stmt | None:
        return split.in_place(node.body) if is_apart(node) else None

    return replace(phase, stmt=split.at_the_end(tir.rewrite(phase.stmt, leave=leave)))


@dataclass(frozen=True)
class _Split:
    """The branch on the thread index between two roles."""

    thread: ir.Var
    compute: Role
    load: Role

    def in_place(self, body: ir.Stmt) -> ir.Stmt:
        one = self.thread < self.compute.threads + WARP
        return self._branch(_ProducerStatements(one).role(body), tir.rewrite(body, enter=_without_loads))

    def at_the_end(self, stmt: ir.Stmt) -> ir.Stmt:
        """A program with its loads after all other statements. Their text is first: tiles after a loop may then share
        memory with its rings."""
        stmts = list(stmt.seq) if isinstance(stmt, ir.SeqStmt) else [stmt]
        loads = next(filter(is_loading, stmts), None)
        if loads is None:
            return stmt
        # Where this grid may begin while the one before it still runs, loads wait for that, too.
        before = [first for first in stmts[:1] if is_grid_wait(first)]
        program = [other for other in stmts[len(before) :] if other is not loads]
        return tir.sequence([*before, self._branch(loads.body, tir.sequence(program))])

    def _branch(self, loads: ir.Stmt, work: ir.Stmt) -> ir.Stmt:
        if self.load.registers:
            loads = tir.sequence([tir.register_limit(self.load.registers, more=False), loads])
            work = tir.sequence([tir.register_limit(self.compute.registers, more=True), work])
        return tir.specialized(self.thread >= self.compute.threads, loads, work)


def _without_loads(node: object) -> ir.Stmt | None:
    return tir.sequence([]) if is_loading(node) else None


class _ProducerStatements:
    """The statements of the producer warps: one of them issues the loads, all of them run the barriers, in the
    enclosing loops and branches.

    Attributes:
        one: whether a thread is of the warp that loads.
        named: the names that the statements visited so far use; they are visited last one first.
    """

    def __init__(self, one: ir.PrimExpr):
        self.one = one
        self.named: set[ir.Var] = set()

    def role(self, body: ir.Stmt) -> ir.Stmt:
        return tir.renamed(self._part(body))

    def _part(self, stmt: ir.Stmt) -> ir.Stmt:
        if is_loading(stmt):
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
            return self._around(stmt, [body], lambda: tir.relooped(stmt, body=body, annotations={}))
        return tir.sequence([])

    def _around(self, stmt: ir.Stmt, parts: list[ir.Stmt | None], again: Callable[[], ir.Stmt]) -> ir.Stmt:
        """A loop or branch around its parts, unless they do nothing."""
        if all(part is None or tir.is_nothing(part) for part in parts):
            return tir.sequence([])
        self.named.update(ir.uses(stmt))
        return again()
