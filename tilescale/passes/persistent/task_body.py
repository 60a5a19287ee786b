# SPDX-License-Identifier: MIT
"""The statements of a task: the body of a block of a phase, with waits for other tasks and signals for later ones.

Waits are as late as possible, in front of the first statement that touches what others touch: what comes before them
overlaps with those tasks. Signals end the task, or the last one of the block's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.hda import Machine
from tilescale.passes.persistent.counters import Counter
from tilescale.passes.persistent.dependences import Need
from tilescale.passes.persistent.phases import Grid, Loop
from tilescale.passes.persistent.placement import Task
from tilescale.passes.persistent.ring import Ring
from tilescale.program.effects import ProgramNames
from tilescale.program.operations import TileView, operation
from tilescale.program.ops import SCALE

_Waits = Sequence[tuple[Need, ir.Stmt]]


class TaskWriter:
    """Writes the tasks of phases.

    Args:
        grids: the phases.
        needs: all dependences between them.
        ring: of tiles loaded ahead, if there is one.

    Attributes:
        flags: the counters, each with its flags.
    """

    def __init__(
        self, grids: Sequence[Grid], needs: Sequence[Need], names: ProgramNames, machine: Machine, ring: Ring | None
    ):
        self.grids, self.needs, self.names, self.machine, self.ring = grids, needs, names, machine, ring
        counters = {id(need.counter): need for need in needs}.values()
        self.flags = [(need.counter, _flags(need.counter, grids[need.earlier].loop)) for need in counters]

    def task(self, number: int) -> Task:
        """The statements of a task of a phase."""
        grid = self.grids[number]
        waits = [(need, self._wait(need)) for need in self.needs if need.later == number]
        first, body = self._alike(ir.in_order(self._waiting(grid.phase.stmt, waits)), grid)
        arrives = {id(n.counter): n.counter for n in self.needs if n.earlier == number}.values()
        last = list(ir.statements(grid.phase.stmt))[-1]
        now = [] if grid.loop is None else [grid.loop.index]
        signals = [(counter, tir.at(counter.signals(self._of(counter), *now), last)) for counter in arrives]
        of_tasks = [signal for counter, signal in signals if counter.blocks is None]
        of_blocks = [signal for counter, signal in signals if counter.blocks is not None]
        task = ir.Var("task", "int32")
        rest = tir.sequence(body)
        if self.ring is not None:
            rest = self.ring.used(number, task, rest)
        stmts = ir.substitute(tir.sequence([rest, *of_tasks]), grid.indices(task))
        first = [tir.renamed(stmt, _has_a_value) for stmt in first]
        return Task(task, first, tir.renamed(stmts, _has_a_value), of_blocks)

    def _wait(self, need: Need) -> ir.Stmt:
        """A wait for tasks of the same iteration, of the previous one, or of the last one of an earlier loop."""
        before, loop = self.grids[need.earlier].loop, self.grids[need.later].loop
        iteration: list[Any] = []
        if before is not None:
            iteration = [loop.index - int(need.previous) if loop is before else before.count - 1]
        wait = need.counter.waits(need.boxes, self._of(need.counter), *iteration)
        if loop is None or loop is before and not need.previous:
            return wait
        return ir.IfThenElse(loop.index > 0 if need.previous else loop.index.equal(0), wait, None)

    def _alike(self, stmts: list[ir.Stmt], grid: Grid) -> tuple[list[ir.Stmt], list[ir.Stmt]]:
        """The first statements, as far as they are the same in each task and what they write stays; the other ones.

        Names that are bound in between belong to the others.
        """
        written = [{access.root for access in self.names.all_effects(stmt).writes} for stmt in stmts]
        own, count = set(grid.launch.programs), 0
        for stmt, roots in zip(stmts, written, strict=True):
            if isinstance(stmt, ir.Bind):
                own.add(stmt.var)
            elif _named(stmt) & own or any(map(self.names.shared, roots)):
                break
            count += 1
        while set().union(*written[:count]) & set().union(*written[count:]):
            count -= 1
        first = stmts[:count]
        bound = [stmt for stmt in first if isinstance(stmt, ir.Bind)]
        return [stmt for stmt in first if not isinstance(stmt, ir.Bind)], bound + stmts[count:]

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


def _flags(counter: Counter, loop: Loop | None) -> ir.Buffer:
    """Flags of a counter: in a loop, some for each iteration."""
    iterations = () if loop is None else (loop.count,)
    shape = [ir.IntImm("int32", n) for n in (*iterations, *counter.shape)]
    return tir.local_buffer(counter.name, shape, "int32", "global")


def _named(stmt: ir.Stmt) -> set[ir.Var]:
    return {var for inner in ir.statements(stmt) for var in ir.uses(inner)}


def _has_a_value(node: ir.Node) -> bool:
    """Whether a loop or binding names a number, not a view of memory."""
    return not (isinstance(node, ir.Bind) and isinstance(operation(node.value), TileView))
