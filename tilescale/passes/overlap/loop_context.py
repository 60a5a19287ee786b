# SPDX-License-Identifier: MIT
"""Loop context of a device phase: its statements, the loops and branches around them, and the grids before it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.errors import Location
from tilescale.passes.declined import Declined
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Sequence
from tilescale.program.waiting import TRIED


@dataclass(frozen=True)
class LoopContext:
    """A device phase and its surroundings.

    Attributes:
        binds: bindings for its statements, in the phase or in the parts `before` it.
        stmts: its statements under all `conditions`.
        loops: the loops around it, outermost first.
        before: the parts directly before it, in the same iteration of all loops, that consist of grids; maybe empty.
        behind: the parts that follow it there.
        is_first: whether it is directly in the innermost loop, preceded only by the parts `before` it.
    """

    binds: tuple[ir.Stmt, ...]
    stmts: tuple[ir.Stmt, ...]
    conditions: tuple[ir.PrimExpr, ...]
    loops: tuple[Control, ...]
    before: tuple[Part, ...]
    behind: tuple[Part, ...]
    is_first: bool

    @classmethod
    def of(cls, phase: DevicePhase, launch: Launch, where: Location | None) -> LoopContext:
        """The loop context of a phase. Raises Declined unless all loops around it have known extents."""
        part: Part = phase
        parents, conditions = _parents(launch.body, phase), []
        while parents and _has_one_part(parents[-1]):
            part = parents.pop()
            if isinstance(part, Control):
                conditions.append(part.stmt.condition)
        binds, inner, stmts = _opened(phase.stmt)
        loops = tuple(around for around in parents if isinstance(around, Control))
        if not all(_is_known(loop.stmt) for loop in loops):
            raise Declined("it is in a branch, or in a loop of unknown extent", where)
        siblings = parents[-1].parts if parents and isinstance(parents[-1], Sequence) else (part,)
        at = next(i for i, sibling in enumerate(siblings) if sibling is part)
        before = last_of_grids(siblings[:at])
        earlier = [bind for part in before for bind in _binds_of(part)]
        is_first = len(before) == at and len(parents) > 1 and bool(loops) and parents[-2] is loops[-1]
        return cls((*earlier, *binds), stmts, (*conditions, *inner), loops, before, siblings[at + 1 :], is_first)

    @property
    def grids(self) -> list[GridPhase]:
        """The grids directly before it."""
        return [grid for part in self.before for grid in grids_of(part) or ()]

    @property
    def variables(self) -> list[ir.Var]:
        return [loop.stmt.loop_var for loop in self.loops]

    @property
    def extents(self) -> list[int]:
        return [ir.integer(loop.stmt.extent) for loop in self.loops]

    def values(self) -> Iterator[dict[ir.Var, int]]:
        """The loop variables' values in each iteration. Raises Declined if there are too many iterations."""
        iterations = itertools.product(*map(range, self.extents))
        for number, values in enumerate(iterations):
            if number == TRIED:
                raise Declined("the loops around it have too many iterations")
            yield dict(zip(self.variables, values, strict=True))

    def known(self, at: Mapping[ir.Var, int]) -> dict[ir.Var, ir.PrimExpr]:
        """Values of the loop variables, and of bindings computed from them, in an iteration."""
        found: dict[ir.Var, ir.PrimExpr] = {var: ir.IntImm("int32", value) for var, value in at.items()}
        for bind in self.binds:
            found[bind.var] = ir.simplify(ir.substitute(bind.value, found), {})
        return found

    def elsewhere(self, stmt: ir.Stmt) -> ir.Stmt:
        """A statement that happens under the conditions of the phase, with all that is computed for it."""
        for condition in self.conditions:
            stmt = ir.IfThenElse(condition, stmt, None)
        found = [stmt]
        for bind in reversed(self.binds):
            if bind.var in {var for s in found for inner in ir.statements(s) for var in ir.uses(inner)}:
                found.insert(0, bind)
        return tir.renamed(tir.sequence(found))


def _has_one_part(part: Part) -> bool:
    return isinstance(part, Sequence) and len(part.parts) == 1 or _is_branch(part)


def _parents(part: Part, wanted: DevicePhase) -> list[Part]:
    """The parts around a phase, outermost first."""
    for inner in part.parts if isinstance(part, Sequence | Control) else ():
        if inner is wanted:
            return [part]
        if found := _parents(inner, wanted):
            return [part, *found]
    return []


def last_of_grids(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """The last of some parts, as far as they consist of grids."""
    return tuple(itertools.takewhile(lambda part: grids_of(part) is not None, reversed(parts)))[::-1]


def grids_of(part: Part) -> list[GridPhase] | None:
    """The grids of a part, apart from bindings for others; None if the part has other contents."""
    if isinstance(part, DevicePhase | GridPhase):
        computes = all(isinstance(stmt, ir.Bind) for stmt in ir.in_order(part.stmt))
        return [] if computes else [part] if isinstance(part, GridPhase) else None
    inner = [grids_of(p) for p in part.parts] if isinstance(part, Sequence | Control) else [None]
    return None if None in inner else [grid for grids in inner for grid in grids or ()]


def _binds_of(part: Part) -> list[ir.Stmt]:
    """Bindings in the phases of a part, outside of loops and branches."""
    if isinstance(part, DevicePhase | GridPhase):
        return [stmt for stmt in ir.in_order(part.stmt) if isinstance(stmt, ir.Bind) and ir.is_pure(stmt.value)]
    return [bind for p in part.parts for bind in _binds_of(p)] if isinstance(part, Sequence) else []


def _is_branch(part: Part) -> bool:
    return isinstance(part, Control) and isinstance(part.stmt, ir.IfThenElse) and len(part.parts) == 1


def _is_known(loop: ir.Stmt) -> bool:
    return isinstance(loop, ir.For) and ir.constant(loop.min) == 0 and ir.constant(loop.extent) is not None


def _opened(stmt: ir.Stmt) -> tuple[tuple[ir.Stmt, ...], tuple[ir.PrimExpr, ...], tuple[ir.Stmt, ...]]:
    """Bindings of a statement, the conditions around its effects, and the effects."""
    stmts = ir.in_order(stmt)
    binds = tuple(s for s in stmts if isinstance(s, ir.Bind) and ir.is_pure(s.value))
    rest = tuple(s for s in stmts if not any(s.same_as(bind) for bind in binds))
    if len(rest) == 1 and isinstance(rest[0], ir.IfThenElse) and rest[0].else_case is None:
        more, conditions, inner = _opened(rest[0].then_case)
        return (*binds, *more), (rest[0].condition, *conditions), inner
    return binds, (), rest
