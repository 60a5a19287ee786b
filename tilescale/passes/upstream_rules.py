# SPDX-License-Identifier: MIT
"""Loops that TileLang refuses: a parallel loop inside another one, a tile operation in a parallel loop, and the like;
and operations with one result for a unit, in loops whose elements are independent.

It changes nothing. TileLang's own message, at compilation, lacks the line.
"""

from __future__ import annotations

from tilelang_core import ir
from tilelang_core.rules import broken_rule
from tilescale.errors import UsageError
from tilescale.program.effects import statements
from tilescale.program.model import Program, location
from tilescale.program.operations import AtomicAdd, InvokeOne, Wait, operation


def check_rules(program: Program) -> None:
    """Check a whole program. Raises UsageError: it breaks a rule of TileLang's."""
    broken = broken_rule(program.func)
    if broken is not None:
        said, stmt = broken
        raise UsageError(
            f"{program.name}: {said[0].lower()}{said[1:]}",
            hint="it is a rule of TileLang, which compiles no such program",
            where=location(stmt) or program.launches[0].where,
        )
    for loop, _, _ in statements(program.body):
        if isinstance(loop, ir.For) and loop.kind == ir.ForKind.PARALLEL:
            for stmt in ir.statements(loop.body):
                _check_element(stmt)


def _check_element(stmt: ir.Stmt) -> None:
    """Check a statement that each element of a parallel loop executes."""
    made = operation(stmt.value) if isinstance(stmt, ir.Evaluate) else None
    of_unit = {InvokeOne: "T.invoke_one", Wait: "T.wait"}.get(type(made))
    if isinstance(made, AtomicAdd) and made.previous is not None:
        of_unit = "T.atomic_add(return_prev=True)"
    if of_unit is not None:
        raise UsageError(
            f"{of_unit} in T.Parallel: the unit executes it once, and the loop's elements have no value of their own",
            hint="move it out of the loop; T.Scale('thread') gives each thread a value of its own",
            where=location(stmt),
        )
