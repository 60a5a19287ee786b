# SPDX-License-Identifier: MIT
"""Recording of flags: changes by means other than signals, and polling loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame, is_vector
from tilescale.backends.emulator.interpret.access import element
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.passes.structure import location
from tilescale.program.operations import Operation, operation, signalled, waited


def _named_by(found: Operation | None) -> list[ir.Call]:
    """The flags that an operation of the language names."""
    waits = waited(found)
    return [*signalled(found), *([waits.flag] if waits is not None else [])]


def _loads(node: Any) -> list[ir.BufferLoad]:
    found: list[ir.BufferLoad] = []
    ir.walk(node, lambda inner: found.append(inner) if isinstance(inner, ir.BufferLoad) else None)
    return found


class _Places:
    """The flags of the accesses in a statement, where each is a single flag."""

    def __init__(self, compiler: Compiler, accesses: list[Any]):
        self._elements = [element(compiler, a.buffer, a.indices) for a in accesses if compiler.reaches_flags(a)]

    def of(self, frame: Frame) -> list[np.ndarray]:
        """Arrays of one element."""
        found = []
        for place in self._elements:
            index = [i(frame) for i in place.indices]
            array = place.home.array(frame)
            if any(is_vector(i) for i in index):
                continue
            if all(0 <= i < n for i, n in zip(index, array.shape, strict=True)):
                found.append(array[tuple(slice(i, i + 1) for i in index)])
        return found


def _without_own_flags(stmt: ir.Stmt) -> Sequence[Any]:
    """A statement without the flags that an operation of the language names, which are recorded anyway."""
    call = stmt.value if isinstance(stmt, ir.Evaluate) else None
    own = _named_by(operation(call))
    return [argument for argument in call.args if not any(argument.same_as(flag) for flag in own)] if own else [stmt]


def watched(compiler: Compiler, stmt: ir.Stmt, closure: Closure) -> Closure:
    """`closure`, followed by recording: if the statement may have changed flags, by a store or an atomic, all flags are
    read; if it is a loop that polls some, the values it saw are recorded.
    """
    if not any(ir.contains(part, lambda node: compiler.reaches_flags(node)) for part in _without_own_flags(stmt)):
        return closure
    recorder, where = compiler.instrumentation.recorder, location(stmt)
    if isinstance(stmt, ir.While):
        looks = _Places(compiler, _loads(stmt))

        def over(frame: Frame) -> Any:
            left = closure(frame)
            for flag in looks.of(frame):
                recorder.looked(flag, where)
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
        for flag in targets.of(frame):
            recorder.flag(flag)
        left = closure(frame)
        recorder.written(op)
        return left

    return run
