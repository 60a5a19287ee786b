# SPDX-License-Identifier: MIT
"""Lower scales inside a program (warpgroups, warps) to TileLang's exclusive branches on the thread index.

Why: stock TileLang runs a tile operation on the threads of its branch, but a fragment belongs to one range of threads,
and operations that it cannot place are silently dropped. Before: regions that every unit runs, and statements of the
program on tiles that units hold. After: runs of those as one clone for each unit in `if tx < n ... else ...`, with
barriers between them where they access memory. A clone is a program of its own, collectives included (collectives.py).
Declines 2-D threads and more units than there are hardware barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.groups import collectives  # noqa: F401 - they register rules
from tilescale.backends.tilelang.lowering.groups.clones import UnitClone
from tilescale.backends.tilelang.lowering.groups.distribution import accesses
from tilescale.backends.tilelang.lowering.groups.pipelines import UnitPipelines
from tilescale.backends.tilelang.lowering.groups.results import only_stored
from tilescale.backends.tilelang.lowering.groups.shares import UnitStatements
from tilescale.backends.tilelang.lowering.groups.state import GroupStage
from tilescale.backends.tilelang.lowering.groups.threads import ThreadNames
from tilescale.backends.tilelang.lowering.groups.unit import UnitThreads, branches
from tilescale.backends.tilelang.lowering.markers import sync
from tilescale.backends.tilelang.lowering.phase import Phase, ThreadGroups
from tilescale.backends.tilelang.lowering.statements import in_order, is_pipelined, must_keep_order
from tilescale.hda import Level
from tilescale.passes.structure import location
from tilescale.program import ops


def lower(phase: Phase) -> Phase:
    """A phase in which no unit inside a program is named any more. Raises UnsupportedError: something that has no
    lowering, with its line."""
    return _ThreadGroups(phase).lowered()


class _ThreadGroups(GroupStage):
    """The walk over the statements of a program. `used`: whether units have executed any."""

    def __init__(self, phase: Phase):
        super().__init__(phase)
        self.used = False
        self.pipelines = UnitPipelines(self)
        self.stored = only_stored(self)
        self._names = ThreadNames(self.launch)
        self._conditions = 0

    def lowered(self) -> Phase:
        body = self.stmt(self.phase.stmt)
        if not self.used and not self.distributions.held:
            return self.phase
        return self.done(
            tir.sequence([body, *self.pipelines.loader()]),
            graph=self.pipelines.graph if self.pipelines.loops else self.phase.graph,
            ordered=self.phase.ordered or self.used,
            groups=ThreadGroups(self.reducing, self.held_in_words(), self.exclusive()),
        )

    # -- statements of the program -----------------------------------------------------------------------------------

    def stmt(self, stmt: ir.Stmt) -> ir.Stmt:
        return tir.rewrite(stmt, enter=self._enter)

    def _enter(self, node: ir.Node) -> ir.Stmt | None:
        """The lowering of a statement of the program that units execute; None for all others."""
        if not isinstance(node, ir.Stmt):
            return None
        self.where = location(node) or self.where
        if self.pipelines.moves(node):
            return tir.sequence([])
        if isinstance(node, ir.Bind):
            self._names.note(node)
        if isinstance(node, ir.IfThenElse) and self._names.is_divergent(node.condition):
            return self._condition(node)
        if isinstance(node, ir.SeqStmt):
            return self._sequence(node.seq) if any(self._level(s) is not None for s in node.seq) else None
        if self._level(node) is not None:
            return self._sequence([node])
        if is_pipelined(node) and must_keep_order(node, self.phase.stmt):
            return in_order(node, self.stmt(node.body))
        return None

    def _condition(self, node: ir.IfThenElse) -> ir.Stmt:
        """A branch on the thread index: the units in it do not synchronize with the others."""
        self._conditions += 1
        arms = [self.stmt(arm) if arm is not None else None for arm in (node.then_case, node.else_case)]
        self._conditions -= 1
        return tir.at(ir.IfThenElse(node.condition, *arms), node)

    def _level(self, stmt: ir.Stmt) -> Level | None:
        """The level whose units execute a statement of the program, pipelined loops included."""
        loop = self.pipelines.of(stmt)
        return loop.level if loop is not None else self.level_of(stmt)

    def _sequence(self, stmts: Sequence[ir.Stmt]) -> ir.Stmt:
        """Runs of statements that units of one level execute become one chain of branches each."""
        result: list[ir.Stmt] = []
        run: list[ir.Stmt] = []
        before: Level | None = None
        for stmt in [*stmts, None]:
            level = self._level(stmt) if stmt is not None else None
            if before is not None and run and (level != before or self.pipelines.of(run[-1])):
                result.append(self._run(run, before))
                run = []
            before = level
            if level is not None:
                run.append(stmt)
            elif stmt is not None:
                result.append(self.stmt(stmt))
        return tir.sequence(result)

    def _run(self, stmts: list[ir.Stmt], level: Level) -> ir.Stmt:
        if self.launch.threads[1:] != (1, 1):
            raise self.unsupported(f"units of level {level.name!r} in a launch of 2-D threads")
        if self._conditions:
            raise self.unsupported(f"units of level {level.name!r} under a condition on the thread index")
        units = [self.whole] if level.threads == 1 else self.whole.units(level)
        self.used = True
        chain = branches(self.thread, units, [self.unit_statements(stmts, unit) for unit in units])
        if tir.is_nothing(chain):
            return chain
        return tir.sequence([chain, sync()] if any(_in_memory(s)[0] for s in stmts) else [chain])

    def unit_statements(
        self,
        stmts: Sequence[ir.Stmt],
        unit: UnitThreads,
        around: UnitClone | None = None,
        kept: frozenset[ir.Var] = frozenset(),
    ) -> ir.Stmt:
        """One unit's part of a run of statements, with a barrier of all threads where accesses to memory need one.

        Args:
            around: the clone of the loop whose body they are.
            kept: tiles that no statement of the loop writes.
        """
        barriers = _barriers_before(stmts, around is not None, lambda tile: self.distributions.base(tile) in kept)
        result: list[ir.Stmt] = []
        for number, stmt in enumerate(stmts):
            self.where = location(stmt) or self.where
            result += [unit.barrier()] if number in barriers else []
            clone, loop = UnitClone(self, unit, around, stmt), self.pipelines.of(stmt)
            if loop is not None:
                result.append(self.pipelines.work(loop, unit, self.unit_statements))
            elif isinstance(stmt, ir.AttrStmt):
                result.append(clone.scale(stmt) if unit is self.whole else clone.stmt(stmt.body))
            elif isinstance(stmt, ir.Bind):
                assert around is not None, "names are bound in loops"
                result.append(around.stmt(stmt))
            else:
                held = self.distributions.touched(stmt)
                assert held is not None, "units execute it because they hold a tile of it"
                part = UnitStatements(self, unit).stmt(stmt, held)
                result += [clone.stmt(part)] if part is not None else []
        return tir.sequence([*result, *([unit.barrier()] if len(stmts) in barriers else [])])


def _barriers_before(stmts: Sequence[ir.Stmt], repeated: bool, apart: Callable[[ir.Buffer], bool]) -> set[int]:
    """Before which statements of a run all units synchronize: where one writes what was touched, or reads what was
    written.

    Args:
        repeated: the first statement follows the last one: the number after the last stands for the end.
        apart: tiles that need no barrier.
    """
    found: set[int] = set()
    touched = written = any_written = False
    for number, stmt in enumerate(stmts):
        touches, writes = _in_memory(stmt, apart)
        if (touches and written) or (writes and touched):
            found.add(number)
            touched = written = False
        touched, written, any_written = touched or touches, written or writes, any_written or writes
    return found | ({len(stmts)} if repeated and touched and any_written else set())


def _in_memory(stmt: ir.Stmt, apart: Callable[[ir.Buffer], bool] = lambda tile: False) -> tuple[bool, bool]:
    """Whether a statement touches memory that units share (but for tiles `apart`), and whether it writes there."""
    if ir.contains(stmt, lambda n: ir.op_name(n) in ops.ALL_OPS - {ops.RANK.name, ops.VIEW.name}):
        return True, True
    named = [(buffer, writes) for buffer, _, writes in accesses(stmt) if not buffer.scope().startswith("local")]
    common = [writes for buffer, writes in named if not apart(buffer)]
    opaque = ir.contains(stmt, lambda n: ir.op_name(n) in (tl.ADDRESS_OF, tl.ACCESS_PTR))
    return bool(common) or opaque, any(common) or opaque
