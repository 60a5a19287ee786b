# SPDX-License-Identifier: MIT
"""Flags of a program: the tensors that are flags, and the statements that signal them."""

from __future__ import annotations

from tilelang_core import ir
from tilescale.program.effects import ProgramNames, statements
from tilescale.program.model import Program
from tilescale.program.operations import operation, signalled


def signals(stmt: ir.Stmt) -> bool:
    """Whether a statement is a signal, or an operation with one."""
    call = stmt.value if isinstance(stmt, ir.Evaluate) else None
    return bool(signalled(operation(call)))


def named(program: Program, names: ProgramNames) -> set[ir.Var]:
    """The data variables of all flags: those that signals and waits name, and integers that loops poll and other
    statements write."""
    found: set[ir.Var] = set()
    polled: set[ir.Var] = set()
    written: set[ir.Var] = set()
    for stmt, _, _ in statements(program.body):
        effects = names.effects(stmt)
        found.update(effects.flags)
        if isinstance(stmt, ir.While):
            polled.update(a.root for a in names.all_effects(stmt).accesses if a.reads and _could_be_flag(a.buffer))
        elif isinstance(stmt, ir.BufferStore) or any(access.atomic for access in effects.writes):
            written.update(access.root for access in effects.writes)
    return found | polled & written


def _could_be_flag(buffer: ir.Buffer) -> bool:
    return not buffer.scope().startswith("local") and "int" in str(buffer.dtype)
