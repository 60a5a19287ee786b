# SPDX-License-Identifier: MIT
"""The statements of a task: the body of a block of a phase, with waits for other tasks and signals for later ones.

Waits are as late as possible, in front of the first statement that touches what others touch: what comes before them
overlaps with those tasks. Signals end the task.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.hda import Machine
from tilescale.passes.persistent.counters import Counter
from tilescale.passes.persistent.dependences import Need
from tilescale.passes.persistent.phases import Grid
from tilescale.program.effects import ProgramNames
from tilescale.program.operations import TileView, operation
from tilescale.program.ops import SCALE

_Waits = Sequence[tuple[Need, ir.Stmt]]


class TaskWriter:
    """Writes the tasks of phases.

    Args:
        needs: all dependences between them.

    Attributes:
        flags: the counters, each with its flags.
    """

    def __init__(self, needs: Sequence[Need], names: ProgramNames, machine: Machine):
        self.needs, self.names, self.machine = needs, names, machine
        counters = {id(need.counter): need.counter for need in needs}.values()
        self.flags = [(counter, _flags(counter)) for counter in counters]

    def task(self, number: int, grid: Grid) -> tuple[ir.Var, ir.Stmt]:
        """A variable for the number of a task of a phase, and the task's statements."""
        waits = [(n, n.counter.waits(n.boxes, self._of(n.counter))) for n in self.needs if n.later == number]
        body = self._waiting(grid.phase.stmt, waits)
        arrives = {id(n.counter): n.counter for n in self.needs if n.earlier == number}.values()
        last = list(ir.statements(grid.phase.stmt))[-1]
        signals = [tir.at(counter.signals(self._of(counter)), last) for counter in arrives]
        task = ir.Var("task", "int32")
        stmts = ir.substitute(tir.sequence([body, *signals]), _indices(grid, task))
        return task, tir.renamed(stmts, _has_a_value)

    def _of(self, counter: Counter) -> ir.Buffer:
        return next(flags for known, flags in self.flags if known is counter)

    def _waiting(self, stmt: ir.Stmt, waits: _Waits) -> ir.Stmt:
        """A statement with waits in front of the first statements inside it that need them."""
        if isinstance(stmt, ir.SeqStmt):
            return tir.sequence(list(self._each(stmt.seq, waits)))
        if isinstance(stmt, ir.AttrStmt) and self._is_of_programs(stmt):
            inner = self._waiting(stmt.body, waits)
            return tir.at(ir.AttrStmt(stmt.node, stmt.attr_key, stmt.value, inner), stmt)
        return tir.sequence([*(tir.at(wait, stmt) for _, wait in waits), stmt])

    def _each(self, stmts: Sequence[ir.Stmt], waits: _Waits) -> list[ir.Stmt]:
        found, left = [], list(waits)
        for stmt in stmts:
            touched = {access.root for access in self.names.all_effects(stmt).accesses}
            here = [pair for pair in left if touched & set(pair[0].roots)]
            left = [pair for pair in left if pair not in here]
            found.append(self._waiting(stmt, here))
        return found

    def _is_of_programs(self, stmt: ir.AttrStmt) -> bool:
        """Whether whole programs execute the statements of a scale."""
        level = self.machine.level(str(stmt.value.value)) if str(stmt.attr_key) == SCALE else None
        return level is not None and level.kind in ("unit", "program")


def _flags(counter: Counter) -> ir.Buffer:
    shape = [ir.IntImm("int32", n) for n in counter.shape]
    return tir.local_buffer(counter.name, shape, "int32", "global")


def _indices(grid: Grid, task: ir.Var) -> dict[ir.Var, ir.PrimExpr]:
    """The indices of a grid from the number of a task: its first axis runs fastest."""
    *faster, last = zip(grid.launch.programs, grid.launch.grid, strict=True)
    left: Any = task
    found: dict[ir.Var, ir.PrimExpr] = {}
    for var, extent in faster:
        found[var], left = left % extent, left // extent
    return {**found, last[0]: left}


def _has_a_value(node: Any) -> bool:
    """Whether a loop or binding names a number, not a view of memory."""
    return not (isinstance(node, ir.Bind) and isinstance(operation(node.value), TileView))
