# SPDX-License-Identifier: MIT
"""Whether all threads of a unit reach its collective operations: signals, waits, barriers, copies between units.

A value is *uniform* over a unit if all its threads have the same. That is a number for each value: 0 for one that is
uniform over a program, k for one that is uniform over the units of the k-th level inside a program, coarsest first, and
one more for a value that differs between threads. What a unit executes may depend on values that are uniform over it.
Loads are uniform where their indices are: a concurrent write is a race. An atomic load, which is not a race, counts as
one load of the unit; back ends ensure this (`Uniformity.together`). Results of other atomics differ between threads, as
each thread makes its own update.

Conditions on thread indices alone are evaluated: the first thread of a unit has to be among those that pass, as it is
the one that signals and waits for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import pointed
from tilescale.errors import Location, UsageError, one
from tilescale.hda import Machine
from tilescale.program import ops
from tilescale.program.effects import phases
from tilescale.program.expressions import as_written
from tilescale.program.grids import GridValues, UnknownValue
from tilescale.program.model import GridPhase, Launch, Program, location
from tilescale.program.operations import Rank

_OF_A_UNIT = (ops.SIGNAL, ops.WAIT, ops.COPY, ops.ATOMIC_ADD, ops.INVOKE_ONE)
TOGETHER = ops.COLLECTIVES | {op.name for op in _OF_A_UNIT}
"""Operations that all threads of a unit execute together."""

_OF_A_THREAD = (
    *tl.GET_WARP_OR_LANE, tl.THREAD_INDEX, tl.ELECT, tl.WARP_SHUFFLE, tl.WARP_REDUCE, tl.ACTIVEMASK, tl.BALLOT,
    tl.ANY_SYNC, tl.ALL_SYNC, tl.MATCH_ANY_SYNC, tl.MATCH_ALL_SYNC, tl.CALL_EXTERN, tl.RNG_RAND,
)  # fmt: skip
"""Prefixes of the names of operations whose values differ between threads, or may."""

_ROUNDS = 20
"""Number of rounds in which values of a loop are followed; fewer levels exist that one can fall to."""


def check_together(program: Program, machine: Machine) -> None:
    """Check that collective statements of a unit are under no condition that its threads may decide differently. Raises
    UsageError: it does, or its operands differ between them."""
    for phase, launch in phases(program.body):
        if isinstance(phase, GridPhase) and launch is not None and ir.contains(phase.stmt, _is_of_a_unit):
            Uniformity(launch, machine).look(phase.stmt)


@dataclass(frozen=True)
class _BranchCondition:
    """A condition under which a statement is executed.

    Attributes:
        differs: how far it is uniform.
        threads: which threads pass, for one on thread indices alone.
        by: the statement, and its condition.
    """

    differs: int
    by: ir.Stmt
    expr: ir.PrimExpr
    threads: np.ndarray | None = None


@dataclass
class _Loop:
    """Facts about a loop from earlier iterations of the enclosing loops; they only grow.

    Attributes:
        begin: how uniform values are at the begin of an iteration.
        left: how uniform its breaks are.
        inside: the loops in its body, in their order.
        visited: number of loops in the body that were reached so far.
    """

    begin: dict[ir.Var, int] = field(default_factory=dict)
    left: int = 0
    inside: list[_Loop] = field(default_factory=list)
    visited: int = 0

    def following(self) -> _Loop:
        """The following loop of the body."""
        if self.visited == len(self.inside):
            self.inside.append(_Loop())
        self.visited += 1
        return self.inside[self.visited - 1]


class Uniformity:
    """Uniformity levels of the values of a phase, from the first statement to the last. `together`: of the `while`
    loops and the statements with an atomic load, those whose value all threads of a unit share."""

    def __init__(self, launch: Launch, machine: Machine):
        self._machine, self._program = machine, machine.program_level
        inside = [level for level in machine.levels if level.kind == "thread_group"]
        self._depths = {level.name: depth for depth, level in enumerate(reversed(inside), 1)}
        self._sizes = {level.name: level.threads for level in inside}
        self._nothing = len(inside) + 1
        number, step, known = np.arange(launch.thread_count), 1, {}
        for var, axis in sorted(launch.thread_vars, key=lambda pair: pair[1]):
            known[var] = number // step % launch.threads[axis]
            step *= launch.threads[axis]
        self._grid = GridValues(launch.thread_count, known)
        self._differs: dict[ir.Var, int] = dict.fromkeys(known, self._nothing)
        self._set_at: dict[ir.Var, Location | None] = {}
        self._written: list[set[ir.Var]] = [set()]
        self._around: list[_BranchCondition] = []
        self._left: list[tuple[int, int]] = []  # for each loop: the conditions around it, how uniform breaks are
        self._inside = _Loop()
        self._unit, self._depth = self._program.name, 0
        self._trial = self._in_parallel = False
        self.together: list[ir.Stmt] = []

    # -- statements --------------------------------------------------------------------------------------------------

    def look(self, stmt: ir.Stmt) -> None:
        """Look at a statement and all inside it. Raises UsageError."""
        if isinstance(stmt, ir.AttrStmt):
            self._marked(stmt)
        elif isinstance(stmt, ir.IfThenElse):
            self._branch(stmt)
        elif isinstance(stmt, ir.For | ir.While):
            self._loop(stmt)
        elif isinstance(stmt, ir.Bind):
            self._note(stmt, [stmt.value])
            self._grid.bound[stmt.var] = stmt.value
            self._set(stmt.var, self.differs(stmt.value), stmt)
        elif isinstance(stmt, ir.BufferStore):
            self._note(stmt, [stmt.value])
            self._store(stmt)
        elif isinstance(stmt, ir.Evaluate):
            self._evaluate(stmt)
        else:
            for inner in ir.children(stmt):
                self.look(inner)

    def _marked(self, stmt: ir.AttrStmt) -> None:
        level = self._machine.level(str(stmt.value.value)) if str(stmt.attr_key) == ops.SCALE else None
        if level is None or level.kind != "thread_group":
            return self.look(stmt.body)
        outer = self._unit, self._depth
        self._unit, self._depth = level.name, self._depths[level.name]
        self.look(stmt.body)
        self._unit, self._depth = outer
        return None

    def _store(self, stmt: ir.BufferStore) -> None:
        if ir.scope_kind(stmt.buffer) != "fragment":
            return
        differs = max(map(self.differs, (stmt.value, *stmt.indices)))
        if not _is_single(stmt.buffer):
            differs = max(differs, self._differs.get(stmt.buffer.data, 0))
        self._set(stmt.buffer.data, differs, stmt)

    def _set(self, var: ir.Var, differs: int, by: ir.Stmt) -> None:
        self._differs[var] = max(differs, self._depth)
        self._set_at[var] = location(by, f"{var.name} is set here")
        for written in self._written:
            written.add(var)

    def _branch(self, stmt: ir.IfThenElse) -> None:
        self._note(stmt, [stmt.condition])
        conditions = [self._condition(part, stmt) for part in ir.conjuncts(stmt.condition)]
        self._written.append(set())
        before = dict(self._differs)
        with self._under(*conditions):
            self.look(stmt.then_case)
        then, self._differs = self._differs, before
        if stmt.else_case is not None:
            with self._under(self._otherwise(conditions, stmt)):
                self.look(stmt.else_case)
        self._join(then, max(c.differs for c in conditions), self._written.pop())

    def _otherwise(self, conditions: list[_BranchCondition], stmt: ir.IfThenElse) -> _BranchCondition:
        only = conditions[0]
        threads = None if only.threads is None or len(conditions) > 1 else ~only.threads
        return _BranchCondition(max(c.differs for c in conditions), stmt, ir.Not(stmt.condition), threads)

    def _join(self, other: dict[ir.Var, int], differs: int, written: set[ir.Var]) -> None:
        """Variables that were written in one of two ways to here, or in both, as `differs` has decided."""
        for var in written:
            self._differs[var] = max(self._differs.get(var, 0), other.get(var, 0), differs)

    def _loop(self, stmt: ir.For | ir.While) -> None:
        own = [stmt.condition] if isinstance(stmt, ir.While) else [stmt.min, stmt.extent]
        self._note(stmt, own)
        known = self._inside.following()
        self._written.append({*known.begin})
        self._join(known.begin, 0, self._written[-1])
        self._left.append((len(self._around), known.left))
        outer, self._trial = self._trial, True
        for _ in range(_ROUNDS):
            entry, left = dict(self._differs), self._left[-1]
            self._iteration(stmt, own, known)
            self._join(entry, 0, self._written[-1])
            if self._left[-1] == left and all(self._differs[var] == entry.get(var, 0) for var in self._written[-1]):
                break
        known.begin, known.left = {var: self._differs[var] for var in self._written[-1]}, self._left[-1][1]
        self._trial = outer
        if not outer:  # else an enclosing loop repeats the body with checks
            entry = dict(self._differs)
            self._iteration(stmt, own, known)
        decided = max(*map(self.differs, own), self._left.pop()[1])
        self._join(entry, decided, self._written.pop())

    def _iteration(self, stmt: ir.For | ir.While, own: list[Any], known: _Loop) -> None:
        if isinstance(stmt, ir.For):
            differs = self._nothing if _is_parallel(stmt) else self.differs(stmt.min)
            self._set(stmt.loop_var, differs, stmt)
        decided = [self._condition(expr, stmt) for expr in own if not isinstance(stmt, ir.For) or expr is own[1]]
        outer, self._in_parallel = self._in_parallel, self._in_parallel or _is_parallel(stmt)
        around, self._inside, known.visited = self._inside, known, 0
        with self._under(*decided, _BranchCondition(self._left[-1][1], stmt, None)):
            self.look(stmt.body)
        self._in_parallel, self._inside = outer, around

    def _evaluate(self, stmt: ir.Evaluate) -> None:
        name = ir.op_name(stmt.value)
        if name in tl.LEAVE_LOOP and self._left:
            outside, before = self._left[-1]
            self._left[-1] = outside, max([before, *(c.differs for c in self._around[outside:])])
        if name in TOGETHER and not self._in_parallel:
            self._execute(stmt)

    # -- conditions --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _under(self, *conditions: _BranchCondition) -> Iterator[None]:
        before = len(self._around)
        self._around += conditions
        yield
        del self._around[before:]

    def _condition(self, expr: ir.PrimExpr, by: ir.Stmt) -> _BranchCondition:
        differs, threads = self.differs(expr), None
        if differs > self._depth:
            with contextlib.suppress(UnknownValue):
                threads = np.broadcast_to(self._grid.value(expr, {}), (self._grid.count,)).astype(bool)
        return _BranchCondition(differs, by, expr, threads)

    def _is_together(self) -> bool:
        return all(c.differs <= self._depth for c in self._around)

    def _note(self, stmt: ir.Stmt, exprs: list[Any]) -> None:
        """Note a `while` loop or an atomic load that all threads of a unit execute together."""
        looks = isinstance(stmt, ir.While) or any(map(loads_atomically, exprs))
        if self._trial or self._depth == self._nothing - 1 or not looks:
            return
        if self._is_together() and all(self.differs(expr) <= self._depth for expr in exprs):
            self.together.append(stmt)

    def _execute(self, stmt: ir.Evaluate) -> None:
        """An operation of a unit, whose results all its threads have."""
        if not self._trial:
            self._check(stmt)
        for region in stmt.value.args:
            if ir.op_name(region) == tl.REGION and ir.region_parts(region)[0].scope() == ir.VARIABLE:
                self._set(ir.region_parts(region)[0].data, 0, stmt)

    def _check(self, stmt: ir.Evaluate) -> None:
        """Threads come together to an operation of their unit, with the same operands."""
        for condition in self._around:
            if condition.differs > self._depth and not self._first_passes(condition.threads):
                raise self._divergent(stmt, condition)
        differing = [expr for expr in _operands(stmt.value) if self.differs(expr) > self._depth]
        if differing:
            unit, operand = one(self._unit), as_written(differing[0])
            raise UsageError(
                f"{_name(stmt)} with an operand that differs between threads of {unit}: {operand}",
                hint=self._advice(),
                where=self._where(stmt, differing[0]),
            )

    def _first_passes(self, passing: np.ndarray | None) -> bool:
        """Whether the first thread of each unit passes of which any does."""
        if passing is None:
            return False
        size = self._sizes.get(self._unit) or passing.size
        units = passing.reshape(-1, min(size, passing.size))
        return bool(np.all(units[:, 0] | ~units.any(axis=1)))

    def _divergent(self, stmt: ir.Evaluate, condition: _BranchCondition) -> UsageError:
        name, unit, hint = _name(stmt), one(self._unit), self._advice()
        if condition.expr is None:
            found = f"in a loop that threads of {unit} may leave in different iterations"
        elif condition.threads is not None:
            found = f"under a condition that the first thread of {unit} does not pass: {as_written(condition.expr)}"
            hint = f"write it in T.Scale of the units that are meant, or move {name} out of the condition"
        else:
            found = f"under a condition that may differ between threads of {unit}: {as_written(condition.expr)}"
        by = location(condition.by, "the condition" if condition.expr is not None else "the loop")
        places = [*self._where(stmt, condition.expr), *([by] if by else [])]
        return UsageError(f"{name} {found}", hint=hint, where=places)

    def _advice(self) -> str:
        return (
            f"all threads of {one(self._unit)} execute it together: let one of them find the value for all, "
            "v = T.invoke_one(...), or load it where all have the same index"
        )

    def _where(self, stmt: ir.Stmt, expr: ir.PrimExpr) -> list[Location]:
        """The statement, and where the variables of an expression got values that differ."""
        used = [*ir.variables(expr)]
        if isinstance(expr, ir.PrimExpr):
            used += [load.buffer.data for load in ir.instances(expr, ir.BufferLoad)]
        set_at = [self._set_at.get(var) for var in used if self._differs.get(var, 0) > self._depth]
        return [place for place in dict.fromkeys((location(stmt), *set_at)) if place is not None]

    # -- values ------------------------------------------------------------------------------------------------------

    def differs(self, expr: ir.PrimExpr) -> int:
        """Uniformity level of an expression at its position."""
        if isinstance(expr, ir.Var):
            return self._differs.get(expr, 0)
        if isinstance(expr, ir.BufferLoad):
            return max([self._loaded(expr.buffer), *map(self.differs, expr.indices)])
        if isinstance(expr, ir.Call):
            return self._called(expr)
        parts = [getattr(expr, name, None) for name in ("a", "b", "value", "condition", "true_value", "false_value")]
        return max((self.differs(part) for part in parts if isinstance(part, ir.PrimExpr)), default=0)

    def _loaded(self, buffer: ir.Buffer) -> int:
        if ir.scope_kind(buffer) != "fragment":
            return self._depth
        is_tile = buffer.scope() == "local.fragment" and not _is_single(buffer)
        return self._nothing if is_tile else self._differs.get(buffer.data, 0)

    def _called(self, call: ir.Call) -> int:
        name = str(ir.op_name(call))
        if name == ops.RANK.name:
            return self._depths.get(Rank.of(call).level, 0)
        if name.startswith(tl.ATOMICS) and not loads_atomically(call) or name.startswith(_OF_A_THREAD):
            return self._nothing
        return max((self.differs(arg) for arg in call.args if isinstance(arg, ir.PrimExpr)), default=0)


def loads_atomically(expr: ir.PrimExpr) -> bool:
    """Whether an expression has an atomic load of device or shared memory."""
    return isinstance(expr, ir.PrimExpr) and ir.contains(expr, is_atomic_load)


def is_atomic_load(node: ir.Node) -> bool:
    if ir.op_name(node) != tl.atomic("load"):
        return False
    return ir.scope_kind(pointed(ir.loaded_element(node)).buffer) != "fragment"


def _is_of_a_unit(node: ir.Node) -> bool:
    return ir.op_name(node) in TOGETHER


def _is_single(buffer: ir.Buffer) -> bool:
    return all(ir.constant(n) == 1 for n in buffer.shape)


def _is_parallel(stmt: ir.For | ir.While) -> bool:
    return isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL


def _operands(call: ir.Call) -> Iterator[Any]:
    """Operands of an operation that are not tiles; values that one thread evaluates for all may differ between
    threads."""
    for arg in call.args if ir.op_name(call) != ops.INVOKE_ONE.name else ():
        if ir.op_name(arg) == tl.REGION:
            _, begins, extents = ir.region_parts(arg)
            yield from (*begins, *extents)
        elif isinstance(arg, ir.PrimExpr):
            yield arg


def _name(stmt: ir.Evaluate) -> str:
    return f"T.{stmt.value.op.name.removeprefix('tilescale.')}"
