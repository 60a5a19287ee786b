# SPDX-License-Identifier: MIT
"""Atomic additions at another unit, and operations that one thread of a unit executes for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.execute.frame import Frame, active, is_vector, spread, uniform
from tilescale.backends.emulator.execute.observe import ATOMIC
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.abstract import forgotten
from tilescale.backends.emulator.interpret.access import element
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Region
from tilescale.backends.emulator.interpret.registry import operation
from tilescale.backends.emulator.interpret.scales import instance
from tilescale.backends.emulator.interpret.selections import located
from tilescale.backends.emulator.operations.remote import NOTHING_INSIDE, Peer
from tilescale.backends.emulator.operations.tiles import fitted
from tilescale.errors import NoDataError
from tilescale.program import operations, ops


@operation(ops.ATOMIC_ADD.name)
def _atomic_add(compiler: Compiler, call: ir.Call) -> Closure:
    made = operations.AtomicAdd.of(call)
    if made.is_of_tiles:
        return _tile(compiler, made)
    return _each_element(compiler, made) if compiler.axes else _element(compiler, made)


def _tile(compiler: Compiler, made: operations.AtomicAdd) -> Closure:
    source, target, peer = Region(compiler, made.value), Region(compiler, made.target), _reached(compiler, made)

    def run(frame: Frame) -> None:
        unit = peer.unit(frame)
        block = target.block(frame, instance(compiler, target.home.slot, frame, unit))
        if block.outside:
            raise target.home.out_of_bounds(frame, block.begins, block.array.shape, NOTHING_INSIDE)
        if compiler.data:
            tile = fitted(source.read(frame), block.extents)
            target.home.written(frame, unit)
            view = block.view()
            target.home.touched(frame, ATOMIC, view)
            numerics.atomic_update(*located(view), tile if block.within else tile[block.clip()], "add")
        frame.run.moved(frame.unit, unit, block.nbytes, True)

    return run


def _element(compiler: Compiler, made: operations.AtomicAdd) -> Closure:
    """One update for the unit: all its threads get the old value."""
    target, value, peer = Region(compiler, made.target), compiler.expr(made.value), _reached(compiler, made)
    previous = Region(compiler, made.previous) if made.previous is not None else None

    def run(frame: Frame) -> None:
        unit = peer.unit(frame)
        block = target.block(frame, instance(compiler, target.home.slot, frame, unit))
        if not block.within:
            raise target.home.out_of_bounds(frame, block.begins, block.array.shape)
        array = block.view().reshape(-1)
        if not array.flags.writeable:  # a run without data
            forgotten([previous] if previous is not None else [])(frame)
            return
        target.home.written(frame, unit)
        target.home.touched(frame, ATOMIC, array)
        added = uniform(value(frame), frame, "what is added")
        held = numerics.atomic_update(array, (0,), added, "add", return_prev=True)
        for observer in frame.run.observers:
            observer.orders(frame, array, (np.zeros(1, int),), "add", made.order)
        frame.run.moved(frame.unit, unit, array.nbytes, True)
        if previous is not None:
            previous.write(frame, np.asarray(held).reshape(1))

    return run


def _each_element(compiler: Compiler, made: operations.AtomicAdd) -> Closure:
    """One update for each element of a parallel loop."""
    buffer, indices, _ = ir.region_parts(made.target)
    target, value = element(compiler, buffer, indices), compiler.expr(made.value)
    there = _reached(compiler, made)

    def run(frame: Frame) -> None:
        ranks, taken = spread(there.rank(frame), frame), active(frame)
        index = [spread(i(frame), frame) for i in target.indices]
        values = spread(value(frame), frame)
        for rank in np.unique(ranks[taken]):
            unit = there.at(frame, int(rank))
            mine = taken & (ranks == rank)
            array = target.home.seen(frame, instance(compiler, target.home.slot, frame, unit))
            _update(frame, target, array, unit, index, values, mine)

    def _update(
        frame: Frame, target: Any, array: np.ndarray, unit: Unit, index: Sequence[Any], values: Any, mine: np.ndarray
    ) -> None:
        places = tuple(i[mine] for i in index)
        for position in zip(*places, strict=True):
            if not all(0 <= i < n for i, n in zip(position, array.shape, strict=True)):
                raise target.home.out_of_bounds(frame, position, array.shape)
        if not array.flags.writeable:
            return
        target.home.written(frame, unit)
        array, where = located(array, places)
        target.home.touched(frame, ATOMIC, array, where)
        numerics.atomic_update(array, where, values[mine], "add")
        for observer in frame.run.observers:
            observer.orders(frame, array, where, "add", made.order)
        frame.run.moved(frame.unit, unit, int(mine.sum()) * array.itemsize, True)

    return run


def _reached(compiler: Compiler, made: operations.AtomicAdd) -> Peer:
    """The target unit; the compiler records that other units reach the tensor."""
    compiler.reached.add(compiler.root(compiler.slot(ir.region_parts(made.target)[0].data)))
    return Peer(compiler, made.peer, made.level)


@operation(ops.INVOKE_ONE.name)
def _invoke_one(compiler: Compiler, call: ir.Call) -> Closure:
    made = operations.InvokeOne.of(call)
    result = Region(compiler, made.result) if made.result is not None else None
    value = compiler.expr(made.value) if result is not None else compiler.evaluate(made.value)

    def run(frame: Frame) -> None:
        thread = np.flatnonzero(active(frame))
        if not thread.size or value is None:
            return
        alone = np.zeros(frame.space, bool)
        alone.reshape(-1)[thread[0]] = True
        saved, frame.mask = frame.mask, alone
        try:
            found = value(frame)
        except NoDataError:
            frame.mask = saved
            forgotten([result] if result is not None else [])(frame)
            return
        finally:
            frame.mask = saved
        if result is not None:
            one = spread(found, frame).reshape(-1)[thread[0]] if is_vector(found) else found
            result.write(frame, np.asarray(one).reshape(1))

    return run
