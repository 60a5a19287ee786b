# SPDX-License-Identifier: MIT
"""Reducers: results that each iteration of a parallel loop contributes a part to."""

from __future__ import annotations

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.tiles import Reducer
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.execute.frame import Frame, uniform
from tilescale.backends.emulator.interpret.access import element
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.reducers import UPDATES, combine
from tilescale.backends.emulator.interpret.regions import Region
from tilescale.backends.emulator.interpret.registry import operation


@operation(tl.REDUCER_INIT)
def _reducer_init(compiler: Compiler, call: ir.Call) -> Closure:
    begin = Reducer.of(call)
    reducer = Region(compiler, begin.reducer)
    op = compiler.reducer_op(reducer.home.buffer)
    initial = None if begin.other is None else compiler.expr(begin.other)

    def run(frame: Frame) -> None:
        with reducer.target(frame) as array:
            array[...] = numerics.identity(op, array.dtype)
            if initial is not None:
                value = np.full(array.shape, uniform(initial(frame), frame, "the initial value of a reducer"))
                numerics.atomic_update(array, (), value, UPDATES[op])

    return run


@operation(tl.REDUCER_UPDATE)
def _reducer_update(compiler: Compiler, call: ir.Call) -> Closure:
    update = Reducer.of(call)
    load = update.reducer
    target, value = element(compiler, load.buffer, load.indices), compiler.expr(update.other)
    op = compiler.reducer_op(load.buffer)
    return lambda frame: combine(target, value(frame), op, frame)


@operation(tl.FINALIZE_REDUCER_V2)
def _finalize(compiler: Compiler, call: ir.Call) -> Closure:
    end = Reducer.of(call)
    reducer, target = Region(compiler, end.reducer), Region(compiler, end.other)
    return lambda frame: target.write(frame, reducer.read(frame))


@operation(tl.FINALIZE_REDUCER_V1)
def _finalize_in_place(compiler: Compiler, call: ir.Call) -> Closure:
    """No operation: iterations have added their parts to the fragment already."""
    return lambda frame: None
