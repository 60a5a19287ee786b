# SPDX-License-Identifier: MIT
"""Whether two accesses may touch the same element.

A variable that is bound outside both statements has one value for both; one that runs inside a statement, such as a
loop's, takes all its values. Regions count as apart only where that is proven along one dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tilelang_core import accesses, ir
from tilescale.program.effects import Access
from tilescale.program.model import Launch


@dataclass
class BoundVariables:
    """Variables bound inside a statement, and their ranges.

    Attributes:
        ranges: loop variables, and those of the programs of a whole grid: where each begins, how many values it takes.
        values: other variables and their definitions; None for values read from memory.
        names: those bound by the statement: all but the indices of programs and threads.
        steady: tensors whose elements are constant during it and may be used in bounds.
    """

    ranges: dict[ir.Var, tuple[Any, Any]] = field(default_factory=dict)
    values: dict[ir.Var, ir.PrimExpr | None] = field(default_factory=dict)
    names: set[ir.Var] = field(default_factory=set)
    steady: frozenset[ir.Var] = frozenset()

    @classmethod
    def of(cls, stmt: ir.Stmt, launch: Launch | None = None) -> BoundVariables:
        """The variables of a statement; with a launch, of all programs of its grid that execute it."""
        found = cls()
        if launch is not None:
            zero = ir.IntImm("int32", 0)
            found.ranges = {var: (zero, count) for var, count in zip(launch.programs, launch.grid, strict=True)}
            found.ranges |= {var: (zero, ir.IntImm("int32", launch.threads[axis])) for var, axis in launch.thread_vars}
        for inner in ir.statements(stmt):
            if isinstance(inner, ir.For):
                found.ranges[inner.loop_var] = (inner.min, inner.extent)
                found.names.add(inner.loop_var)
            elif isinstance(inner, ir.Bind):
                calls = ir.contains(inner.value, lambda node: isinstance(node, ir.Call))
                found.names.add(inner.var)
                found.values[inner.var] = None if calls else inner.value
        return found

    def bounds(self, access: Access) -> list[tuple[Any, Any] | None]:
        """Begin and end along each dimension of the smallest box that is known to hold an access."""
        if access.begins is None or access.extents is None:
            return [None] * len(access.buffer.shape)
        return [self._bounds(*pair) for pair in zip(access.begins, access.extents, strict=True)]

    def _bounds(self, begin: Any, extent: Any) -> tuple[Any, Any] | None:
        begin, extent = self.known(begin), self.known(extent)
        return None if begin is None or extent is None else accesses.span(begin, extent, self.ranges)

    def known(self, expr: ir.PrimExpr) -> Any:
        """An expression in variables from outside and the running ones; None if it depends on memory. Elements of
        `steady` tensors are allowed if they are the same for all values of these variables."""
        expr = self.inlined(expr)
        return None if ir.variables(expr) & self.values.keys() or ir.contains(expr, self._varies) else expr

    def inlined(self, expr: ir.PrimExpr) -> Any:
        """An expression with the definitions of its variables in their place, but of those read from memory."""
        while used := {var for var in ir.variables(expr) if self.values.get(var) is not None}:
            expr = ir.substitute(expr, {var: self.values[var] for var in used})
        return expr

    def _varies(self, node: ir.Node) -> bool:
        if isinstance(node, ir.BufferLoad):
            running = any(ir.variables(index) & self.ranges.keys() for index in node.indices)
            return running or node.buffer.data not in self.steady
        return isinstance(node, ir.Call)


def may_overlap(a: Access, inside_a: BoundVariables, b: Access, inside_b: BoundVariables) -> bool:
    """Whether two accesses may touch the same element of an instance; an access to a peer may reach the unit itself."""
    if not a.root.same_as(b.root):
        return False
    if str(a.buffer.dtype) != str(b.buffer.dtype) or _text(a.buffer.shape) != _text(b.buffer.shape):
        return True  # the indices of one do not determine those of the other
    pairs = zip(inside_a.bounds(a), inside_b.bounds(b), strict=True)
    return not any(first and second and _apart(first, second) for first, second in pairs)


def _apart(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return accesses.known_before(a[1], b[0]) or accesses.known_before(b[1], a[0])


def _text(shape: Sequence[Any]) -> list[str]:
    return [str(n) for n in shape]


def conflict(
    a: Sequence[Access], inside_a: BoundVariables, b: Sequence[Access], inside_b: BoundVariables
) -> tuple[Access, Access] | None:
    """Two accesses of which one writes memory that the other may touch; None if there are none. Atomic ones count
    too."""
    for first in a:
        for second in b:
            if (first.writes or second.writes) and may_overlap(first, inside_a, second, inside_b):
                return first, second
    return None
