# SPDX-License-Identifier: MIT
"""Atomics on elements: every active element of the space makes its own update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import Atomic
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.execute.frame import Frame, active, spread
from tilescale.backends.emulator.execute.observe import ATOMIC_LOAD, ATOMIC_STORE, DEVICE_ATOMIC
from tilescale.backends.emulator.interpret.abstract import known_or_not
from tilescale.backends.emulator.interpret.access import Element
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.registry import value_operation, vector_operation
from tilescale.backends.emulator.interpret.selections import located
from tilescale.backends.emulator.operations.pointers import elements, neighbours, pointed
from tilescale.errors import UnsupportedError


def _atomic(op: str, returns: bool, width: int = 1) -> Callable[[Compiler, ir.Call], Closure]:
    """An update of `width` neighbouring elements by every active element of the space."""

    def rule(compiler: Compiler, call: ir.Call) -> Closure:
        made = Atomic.of(call)
        target = pointed(compiler, made.pointer)
        if target.home.private:
            raise UnsupportedError(f"the emulator does not run atomics on thread-private memory ({target.home.name!r})")
        if width > 1:
            targets, values = elements(compiler, made.pointer, width), neighbours(compiler, made.value, width)
            return lambda frame: _wide_atomic(targets, values, op, returns, frame)
        value = compiler.expr(made.value) if made.value is not None else lambda frame: 0
        order = _ORDERS[made.order]
        if not compiler.data:
            value = known_or_not(value)
        return lambda frame: _update(target, value(frame), op, order, returns, frame)

    return rule


_ORDERS = ("relaxed", "consume", "acquire", "release", "acq_rel", "seq_cst")
"""Memory orders by TileLang's numbers."""


def _update(target: Element, value: Any, op: str, order: str, returns: bool, frame: Frame) -> Any:
    array = target.home.array(frame)
    if not array.flags.writeable:  # a run without data
        return target.load(frame) if returns else None
    # Adding zero is an atomic load: it must not wake tasks that wait for a change.
    if op != "load" and (op not in ("add", "or") or np.any(value)):
        target.home.written(frame)
    index = tuple(i(frame) for i in target.indices)
    result = _update_at(target, array, index, value, op, frame, returns)
    if frame.run.observers:
        taken = active(frame) & target.inside(index, array.shape, frame)
        array, touched = located(array, tuple(spread(i, frame)[taken] for i in index))
        for observer in frame.run.observers:
            observer.orders(frame, array, touched, op, order)
    return result


def _update_at(
    target: Element, array: np.ndarray, index: tuple, value: Any, op: str, frame: Frame, returns: bool = False
) -> Any:
    taken = active(frame) & target.inside(index, array.shape, frame)
    target.touched(frame, {"store": ATOMIC_STORE, "load": ATOMIC_LOAD}.get(op, DEVICE_ATOMIC), array, index, taken)
    if not taken.all():
        index = tuple(np.where(taken, i, 0) for i in index)
    index = tuple(spread(i, frame) for i in index)
    return numerics.atomic_update(*located(array, index), value, op, mask=taken, return_prev=returns)


def _wide_atomic(targets: list[Element], values: Closure, op: str, returns: bool, frame: Frame) -> tuple[Any, ...]:
    """Update neighbouring elements; returns the old values if `returns`."""
    array = targets[0].home.array(frame)
    if not array.flags.writeable:
        return tuple(target.load(frame) for target in targets) if returns else ()
    targets[0].home.written(frame)
    return tuple(
        _update_at(target, array, tuple(i(frame) for i in target.indices), value, op, frame, returns)
        for target, value in zip(targets, values(frame), strict=True)
    )


for _op in ("add", "max", "min"):
    value_operation(tl.atomic(_op))(_atomic(_op, False))
    value_operation(tl.atomic(_op, returns=True))(_atomic(_op, True))
value_operation(tl.atomic("or"))(_atomic("or", False))
value_operation(tl.atomic("store"))(_atomic("store", False))
value_operation(tl.atomic("load"))(_atomic("load", True))
for _width in (2, 4):
    value_operation(tl.atomic(f"addx{_width}"))(_atomic("add", False, _width))
    vector_operation(tl.atomic(f"addx{_width}", returns=True))(_atomic("add", True, _width))
