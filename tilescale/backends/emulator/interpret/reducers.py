# SPDX-License-Identifier: MIT
"""Contributions to reducers: elements of the space with the same result index are combined."""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.execute.frame import Frame, spread
from tilescale.backends.emulator.execute.observe import ATOMIC
from tilescale.backends.emulator.interpret.access import Element, element
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.selections import located

UPDATES = {"sum": "add", "max": "max", "min": "min", "bitand": "and", "bitor": "or", "bitxor": "xor"}
"""Combining operation of a reducer -> the equivalent atomic update."""


def combine(target: Element, value: Any, op: str, frame: Frame) -> None:
    """Each active element of the space contributes its value to its result."""
    array, index = target.home.array(frame), tuple(spread(i(frame), frame) for i in target.indices)
    target.inside(index, array.shape, frame)
    target.touched(frame, ATOMIC, array, index)
    numerics.atomic_update(*located(array, index), value, UPDATES[op], mask=frame.mask)


def accumulation(compiler: Compiler, stmt: ir.BufferStore, op: str) -> Closure:
    """`r[i] = r[i] + part` for a fragment that is a reducer: the other operand is the part."""
    own, part = stmt.value.a, stmt.value.b
    if not (isinstance(own, ir.BufferLoad) and own.buffer.same_as(stmt.buffer)):
        own, part = part, own
    target, value = element(compiler, stmt.buffer, stmt.indices), compiler.expr(part)
    return lambda frame: combine(target, value(frame), op, frame)
