# SPDX-License-Identifier: MIT
"""Which tensors are flags, statements that change some by other means than signals, and loops that look at some."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame, is_vector
from tilescale.backends.emulator.interpret.expr import Closure
from tilescale.passes.structure import location
from tilescale.program.effects import Surroundings, statements
from tilescale.program.model import Program
from tilescale.program.operations import Operation, operation, signalled, waited

if TYPE_CHECKING:
    from tilescale.backends.emulator.interpret.compiler import Compiler


def signals(stmt: ir.Stmt) -> bool:
    """Whether a statement is a signal, or an operation with one."""
    call = stmt.value if isinstance(stmt, ir.Evaluate) else None
    return bool(signalled(operation(call)))


def named(program: Program, names: Surroundings) -> set[ir.Var]:
    """The data of all flags: what signals and waits name, and numbers that loops look at and other statements write."""
    found: set[ir.Var] = set()
    polled: set[ir.Var] = set()
    written: set[ir.Var] = set()
    for stmt, _, _ in statements(program.body):
        effects = names.effects(stmt)
        found.update(event.flag.root for event in (*effects.tells, *effects.awaits))
        if isinstance(stmt, ir.While):
            polled.update(a.root for a in names.all_effects(stmt).accesses if a.reads and _could_be_flag(a.buffer))
        elif isinstance(stmt, ir.BufferStore) or any(access.atomic for access in effects.writes):
            written.update(access.root for access in effects.writes)
    return found | polled & written


def _named_by(found: Operation | None) -> list[ir.Call]:
    """The flags that an operation of ours names."""
    waits = waited(found)
    return [*signalled(found), *([waits.flag] if waits is not None else [])]


def _could_be_flag(buffer: ir.Buffer) -> bool:
    return not buffer.scope().startswith("local") and "int" in str(buffer.dtype)


def _loads(node: Any) -> list[ir.BufferLoad]:
    found: list[ir.BufferLoad] = []
    ir.walk(node, lambda inner: found.append(inner) if isinstance(inner, ir.BufferLoad) else None)
    return found


def reaches(compiler: Compiler, node: Any) -> bool:
    """Whether a node is an access to flags."""
    return hasattr(node, "buffer") and compiler.root(compiler.slot(node.buffer.data)) in compiler.flags


class _Places:
    """The flags that the accesses in a statement name, where that is one each."""

    def __init__(self, compiler: Compiler, accesses: list[Any]):
        self._elements = [compiler.element(a.buffer, a.indices) for a in accesses if reaches(compiler, a)]

    def of(self, frame: Frame) -> list[np.ndarray]:
        """Arrays of one element."""
        found = []
        for element in self._elements:
            index = [i(frame) for i in element.indices]
            array = element.home.array(frame)
            if any(is_vector(i) for i in index):
                continue
            if all(0 <= i < n for i, n in zip(index, array.shape, strict=True)):
                found.append(array[tuple(slice(i, i + 1) for i in index)])
        return found


def _without_own_flags(stmt: ir.Stmt) -> Sequence[Any]:
    """A statement without the flags that an operation of ours names, of which the clock hears anyway."""
    call = stmt.value if isinstance(stmt, ir.Evaluate) else None
    own = _named_by(operation(call))
    return [argument for argument in call.args if not any(argument.same_as(flag) for flag in own)] if own else [stmt]


def watched(compiler: Compiler, stmt: ir.Stmt, closure: Closure) -> Closure:
    """`closure`, after which the clock looks at all flags if the statement may have changed some: a store sets them, an
    atomic adds; or, if it is a loop that looked at some, hears of what it saw."""
    if not any(ir.contains(part, lambda node: reaches(compiler, node)) for part in _without_own_flags(stmt)):
        return closure
    clock, where = compiler.clock, location(stmt)
    if isinstance(stmt, ir.While):
        looks = _Places(compiler, _loads(stmt))

        def over(frame: Frame) -> Any:
            left = closure(frame)
            for element in looks.of(frame):
                clock.looked(element, where)
            return left

        return over
    if isinstance(stmt, ir.BufferStore):
        targets, op = _Places(compiler, [stmt]), "set"
    elif isinstance(stmt, ir.Evaluate):
        targets, op = _Places(compiler, _loads(stmt)), "add" if "atomic" in (ir.op_name(stmt.value) or "") else "set"
    elif isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL:
        targets, op = _Places(compiler, []), "set"
    else:
        return closure

    def run(frame: Frame) -> Any:
        for element in targets.of(frame):
            clock.flag(element)
        left = closure(frame)
        clock.written(op)
        return left

    return run
