# SPDX-License-Identifier: MIT
"""Word accesses of threads: loads and stores of up to 256 bits, cp.async, ldmatrix (PTX ISA, "Data Movement")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import AsyncCopy, LoadMatrix, WordLoad, WordStore
from tilescale.backends.emulator.execute.frame import Frame, is_vector, spread
from tilescale.backends.emulator.interpret.abstract import forgotten
from tilescale.backends.emulator.interpret.access import Element
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.expr import under
from tilescale.backends.emulator.interpret.registry import operation, value_operation, vector_operation
from tilescale.backends.emulator.interpret.vectors import bits, element_dtype, vector
from tilescale.backends.emulator.numerics import element_type, numpy_dtype
from tilescale.backends.emulator.operations.pointers import buffer_of, elements
from tilescale.errors import UnsupportedError

_WORD = np.dtype(np.uint32)
_WIDTHS = (32, 64, 128, 256)


def _within(compiler: Compiler, pointer: ir.PrimExpr, nbytes: int) -> list[Element]:
    """The `nbytes` bytes of elements at a pointer."""
    dtype = numpy_dtype(element_type(str(buffer_of(compiler, pointer).dtype)))
    if nbytes % dtype.itemsize:
        raise UnsupportedError(f"the emulator does not access {nbytes} bytes of elements of {dtype.itemsize}")
    return elements(compiler, pointer, nbytes // dtype.itemsize)


def _closure(compiler: Compiler, predicate: ir.PrimExpr | None) -> Closure | None:
    return None if predicate is None else compiler.expr(predicate)


def _read(sources: list[Element], predicate: Closure | None, frame: Frame) -> list[Any]:
    """The elements' values, zero where a predicate is false."""
    if predicate is None:
        return [source.load(frame) for source in sources]
    taken = predicate(frame)
    if not is_vector(taken):
        return [source.load(frame) if taken else source.home.dtype.type(0) for source in sources]
    zero = sources[0].home.dtype.type(0)
    return [np.where(taken, spread(under(frame, taken, source.load), frame), zero) for source in sources]


def _write(targets: list[Element], values: Any, predicate: Closure | None, frame: Frame) -> None:
    def store(side: Frame) -> None:
        for target, value in zip(targets, values, strict=True):
            target.store(side, value)

    taken = None if predicate is None else predicate(frame)
    if is_vector(taken):
        under(frame, taken, store)
    elif taken is None or taken:
        store(frame)


def _load(width: int) -> Callable[[Compiler, ir.Call], Closure]:
    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        load = WordLoad.of(call)
        sources, predicate = _within(compiler, load.pointer, width // 8), _closure(compiler, load.predicate)
        dtype = sources[0].home.dtype
        return lambda frame: bits(_read(sources, predicate, frame), dtype, _WORD, frame)

    return rule


def _first(rule: Callable[[Compiler, ir.Call], Closure]) -> Callable[[Compiler, ir.Call], Closure]:
    """The rule for a scalar: that of a vector, of which it takes the first lane."""

    def scalar(compiler: Compiler, call: ir.Call) -> Closure:
        values = rule(compiler, call)
        return lambda frame: values(frame)[0]

    return scalar


def _store(width: int) -> Callable[[Compiler, ir.Call], Closure]:
    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        store = WordStore.of(call)
        targets, values = _within(compiler, store.pointer, width // 8), vector(compiler, store.value)
        predicate = _closure(compiler, store.predicate)
        given, wanted = element_dtype(store.value), targets[0].home.dtype
        if not compiler.data:
            return forgotten(targets)
        return lambda frame: _write(targets, bits(values(frame), given, wanted, frame), predicate, frame)

    return rule


for _width in _WIDTHS:
    _names = [f"{tl.TL}{kind}{_width}" for kind in ("ldg", "lds")]
    if _width == _WORD.itemsize * 8:
        value_operation(*_names)(_first(_load(_width)))
    else:
        vector_operation(*_names)(_load(_width))
    operation(*(f"{tl.TL}{kind}{_width}" for kind in ("stg", "sts")), collective=False)(_store(_width))


@operation(tl.PTX_CP_ASYNC, collective=False)
def _async_copy(compiler: Compiler, call: ir.Call) -> Closure:
    """Complete at once, as all asynchronous copies; zeros where its predicate does not hold."""
    copy = AsyncCopy.of(call)
    targets, sources = (elements(compiler, pointer, copy.count) for pointer in (copy.target, copy.source))
    predicate = _closure(compiler, copy.predicate)
    if not compiler.data:
        return forgotten(targets)
    return lambda frame: _write(targets, _read(sources, predicate, frame), None, frame)


@operation(tl.PTX_LDMATRIX)
def _load_matrix(compiler: Compiler, call: ir.Call) -> Closure:
    """Matrices of 8 x 8 elements of 16 bits: thread r of eight points to row r, and gets two neighbours of each."""
    made = LoadMatrix.of(call)
    transpose, count = made.transpose, made.count
    rows, targets = _within(compiler, made.row, 16), _within(compiler, made.target, 4 * count)
    given, wanted = rows[0].home.dtype, targets[0].home.dtype
    half = np.dtype(np.uint16)
    if not compiler.data:
        return forgotten(targets)

    def run(frame: Frame) -> None:
        row = np.stack([spread(v, frame) for v in bits(_read(rows, None, frame), given, half, frame)], axis=-1)
        warps = row.reshape(-1, 32, 8)
        parts = []
        for first in range(0, 8 * count, 8):
            matrix = warps[:, first : first + 8]
            parts.append((matrix.swapaxes(1, 2) if transpose else matrix).reshape(-1, 2))
        values = np.concatenate(parts, axis=1)
        _write(targets, bits(list(values.T), half, wanted, frame), None, frame)

    return run
