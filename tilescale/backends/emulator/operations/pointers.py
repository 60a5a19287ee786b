# SPDX-License-Identifier: MIT
"""Arguments that point to elements: `T.access_ptr(x[i], ...)`, `T.address_of(x[i])`, `T.tvm_access_ptr(...)`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tilelang_core import ir, scalars, tl
from tilescale.backends.emulator.execute.frame import Frame, spread
from tilescale.backends.emulator.interpret.access import Element, element
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.symbols import POINTERS
from tilescale.backends.emulator.numerics import lanes_of
from tilescale.errors import UnsupportedError


def pointed(compiler: Compiler, pointer: ir.PrimExpr) -> Element:
    """The element that an argument points to. Raises UnsupportedError: another kind of pointer."""
    return elements(compiler, pointer, 1)[0]


def elements(compiler: Compiler, pointer: ir.PrimExpr, count: int) -> list[Element]:
    """The consecutive elements in memory from the one that an argument points to. Raises as `pointed`."""
    buffer, indices = _target(compiler, pointer)
    shape, lanes = list(buffer.shape), lanes_of(str(buffer.dtype))
    if lanes > 1:
        shape, indices = [*shape, lanes], [*indices, 0]
    return [element(compiler, buffer, _moved(shape, indices, step)) for step in range(count)]


def elements_at(compiler: Compiler, data: ir.Var, position: ir.PrimExpr | int, count: int) -> list[Element]:
    """The consecutive elements from a position in the buffer of a data variable. Raises as `pointed`."""
    buffer = compiler.buffer_named(data)
    if buffer is None:
        raise UnsupportedError(f"the emulator does not follow the pointer {data}")
    shape = list(buffer.shape)
    return [element(compiler, buffer, _indices(shape, position + step)) for step in range(count)]


def buffer_of(compiler: Compiler, pointer: ir.PrimExpr) -> ir.Buffer:
    """The buffer that an argument points into. Raises as `pointed`."""
    return _target(compiler, pointer)[0]


def is_pointer(compiler: Compiler, arg: ir.PrimExpr) -> bool:
    """Whether an argument is a pointer to elements, or a variable that holds one."""
    return ir.op_name(compiler.deferred.get(arg, arg) if isinstance(arg, ir.Var) else arg) in POINTERS


def _target(compiler: Compiler, pointer: ir.PrimExpr) -> tuple[ir.Buffer, list[Any]]:
    if isinstance(pointer, ir.Var):
        pointer = compiler.deferred.get(pointer, pointer)
    pointer = scalars.pointed(pointer)
    if isinstance(pointer, ir.BufferLoad):
        return pointer.buffer, [i.base if isinstance(i, ir.Ramp) else i for i in pointer.indices]
    if ir.op_name(pointer) == tl.ACCESS_PTR:
        made = scalars.OffsetPointer.of(pointer)
        buffer = compiler.buffer_named(made.data)
        if buffer is not None and str(buffer.dtype) == made.dtype:
            return buffer, _indices(list(buffer.shape), made.position)
    raise UnsupportedError(f"the emulator does not follow the pointer {pointer}")


def _moved(shape: list[Any], indices: list[Any], step: int) -> list[Any]:
    if step == 0 or len(indices) == 1:
        return [*indices[:-1], indices[-1] + step]
    position = step
    for axis, index in enumerate(indices):
        position = position + index * math.prod(shape[axis + 1 :])
    return _indices(shape, position)


def _indices(shape: list[Any], position: ir.PrimExpr | int) -> list[Any]:
    """The indices of the element at a position in memory order."""
    found = []
    for extent in reversed(shape[1:]):
        found.append(position % extent)
        position = position // extent
    return [position, *reversed(found)]


def neighbours(compiler: Compiler, pointer: ir.PrimExpr, count: int) -> Any:
    """The closure of the values of `count` elements from the one pointed to, as arrays over the space."""
    loads = [e.load for e in elements(compiler, pointer, count)]

    def run(frame: Frame) -> list[np.ndarray]:
        return [spread(load(frame), frame) for load in loads]

    return run
