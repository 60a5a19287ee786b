# SPDX-License-Identifier: MIT
"""A pipelined loop with a loader, taken apart, and what its parts evaluate."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tilelang_core import ir
from tilescale.backends.cuda.lowering.groups.gates import Step, waits_of
from tilescale.backends.cuda.lowering.groups.loads import Load
from tilescale.hda import Level
from tilescale.program import ops
from tilescale.program.footprint import stages_of

Around: TypeAlias = "tuple[ir.For | ir.PrimExpr, ...]"
"""Serial loops, and conditions that hold, outermost first."""


@dataclass(frozen=True)
class Loop:
    """A pipelined loop, taken apart.

    Attributes:
        level: whose units work in it.
        around: what it stands in; no condition in a loop, and each of these loops has no other one with a loader.
        steps: what the loader does in an iteration: loads, and waits in front of those that they order.
        released: whether units have to tell the loader that they have come to the loop.
        moved: waits in front of it that are among its `steps` now.
        binds: the names that `steps`, `around` and extents use, bound before the loop or in it (`inner`).
        rest: what units execute.
    """

    stmt: ir.For
    level: Level
    around: Around
    steps: tuple[Step, ...]
    released: bool
    moved: tuple[ir.Stmt, ...]
    binds: tuple[ir.Bind, ...]
    inner: tuple[ir.Bind, ...]
    rest: tuple[ir.Stmt, ...]

    @property
    def loads(self) -> list[Load]:
        """Its copies from memory, of this device or of peers, into tiles."""
        return [step for step in self.steps if isinstance(step, Load)]

    @property
    def gates(self) -> list[ir.Stmt]:
        """Its waits."""
        return [step for step in self.steps if isinstance(step, ir.Stmt)]

    @property
    def free(self) -> list[Load]:
        """The loads in front of its first wait, which nothing orders but tiles, unless the loop is released."""
        return [*itertools.takewhile(lambda step: isinstance(step, Load), self.steps)]

    @property
    def waits(self) -> list[ir.Call]:
        """The calls in them."""
        return waits_of(self.steps)

    @property
    def tiles(self) -> list[ir.Buffer]:
        """What is loaded."""
        return [ir.region_parts(load.target)[0] for load in self.loads]

    @property
    def stages(self) -> int:
        """Tiles of a kind that there are."""
        return stages_of(self.stmt)

    @property
    def turn(self) -> Any:
        """How often it has been run through before, in terms of the loops around it; 0 without any."""
        number: Any = ir.int_node(0)
        for outer in loops_of(self.around):
            number = number * outer.extent + (outer.loop_var - outer.min)
        return number


def loops_of(around: Around) -> list[ir.For]:
    """The loops among what something stands in."""
    return [outer for outer in around if isinstance(outer, ir.For)]


def expressions(node: Any) -> list[ir.PrimExpr]:
    """What a load, a wait, the head of a loop or a condition evaluates."""
    if isinstance(node, Load):
        return [node.call]
    if isinstance(node, ir.For):
        return [node.min, node.extent]
    if isinstance(node, ir.Stmt):
        inner = [stmt for stmt in ir.statements(node) if not isinstance(stmt, ir.SeqStmt)]
        return [stmt.condition if isinstance(stmt, ir.IfThenElse) else stmt.value for stmt in inner]
    return [node]


def used_binds(binds: Sequence[ir.Bind], by: Iterable[ir.PrimExpr]) -> list[ir.Bind]:
    """The bindings that expressions need, in order."""
    needed: set[ir.Var] = set().union(*map(ir.variables, by))
    found: list[ir.Bind] = []
    for bind in reversed(binds):
        if bind.var in needed and ir.op_name(bind.value) != ops.VIEW.name:
            needed |= ir.variables(bind.value)
            found.insert(0, bind)
    return found
