# SPDX-License-Identifier: MIT
"""Statements of TIR as closures: loops, bindings, stores; sequences and branches are in branches.py.

A closure returns None, or BREAK or CONTINUE when all active threads leave the innermost loop's body. When only some do,
they are recorded in `frame.dead` and the rest of the body runs without them.
"""

from __future__ import annotations

import functools
from functools import cache
from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.scalars import operand_of
from tilescale.backends.emulator.execute.frame import BREAK, CONTINUE, Frame, check, is_vector, spread, uniform, without
from tilescale.backends.emulator.interpret import abstract, vectors
from tilescale.backends.emulator.interpret.access import element
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.reducers import accumulation
from tilescale.backends.emulator.interpret.registry import statement
from tilescale.backends.emulator.interpret.scales import Bound, compile_scale
from tilescale.backends.emulator.interpret.symbols import POINTERS
from tilescale.errors import UnsupportedError
from tilescale.passes.structure import location
from tilescale.program.expressions import as_written
from tilescale.program.model import Launch
from tilescale.program.ops import SCALE
from tilescale.program.pointers import is_address

_BREAKS = (tl.BREAK_LOOP, tl.LOOP_BREAK)


@statement(ir.SBlockRealize)
def _realize(compiler: Compiler, stmt: ir.SBlockRealize) -> Closure:
    return compiler.stmt(stmt.block)


@statement(ir.SBlock)
def _block(compiler: Compiler, stmt: ir.SBlock) -> Closure:
    if stmt.alloc_buffers:
        raise UnsupportedError("the emulator does not run allocations in nested blocks")
    with compiler.inside_block(stmt.annotations):
        return compiler.stmt(stmt.body)


@statement(ir.AttrStmt)
def _attribute(compiler: Compiler, stmt: ir.AttrStmt) -> Closure:
    if str(stmt.attr_key) == SCALE:
        return compile_scale(compiler, stmt)
    if str(stmt.attr_key) == "reduce_scope":
        compiler.reduction = stmt.node
    return compiler.stmt(stmt.body)


@statement(ir.DeclBuffer, ir.AllocBuffer)
def _declare(compiler: Compiler, stmt: ir.Stmt) -> Closure:
    raise UnsupportedError(f"the emulator does not run buffer declarations inside a kernel: {stmt.buffer.name}")


@statement(ir.Bind)
def _bind(compiler: Compiler, stmt: ir.Bind) -> Closure:
    if compiler.is_alias_only(stmt):
        return lambda frame: None
    elsewhere = any(v in compiler.loop_variables and v not in compiler.open_loops for v in ir.variables(stmt.value))
    if elsewhere or ir.op_name(stmt.value) in POINTERS:
        compiler.deferred[stmt.var] = stmt.value
        return lambda frame: None
    slot = compiler.slot(stmt.var)
    if is_address(stmt.value):
        number, memory = compiler.expr(operand_of(stmt.value)), compiler.host_memory
        return lambda frame: frame.slots.__setitem__(slot, memory.at(uniform(number(frame), frame, "an address")))
    value = (vectors.kept if vectors.is_of_vectors(stmt.value) else Compiler.expr)(compiler, stmt.value)
    if not compiler.data:
        value = abstract.known_or_not(value)
    compiler.bindings[stmt.var] = value

    def run(frame: Frame) -> None:
        bound = value(frame)
        if isinstance(bound, Bound):
            frame.slots[slot] = bound.array
            return
        # The value may be a view of the buffer; the variable keeps the current value.
        frame.slots[slot] = bound.copy() if is_vector(bound) and bound.base is not None else bound

    return run


@statement(ir.BufferStore)
def _store(compiler: Compiler, stmt: ir.BufferStore) -> Closure:
    store = (vectors.store if vectors.is_of_vectors(stmt.value) else _store_scalar)(compiler, stmt)
    if compiler.instrumentation is None or compiler.axes:
        return store
    return compiler.instrumentation.store(compiler, stmt, store)


def _store_scalar(compiler: Compiler, stmt: ir.BufferStore) -> Closure:
    op = compiler.accumulates(stmt) if compiler.axes and compiler.data else None
    if op is not None:
        return accumulation(compiler, stmt, op)
    target, value = element(compiler, stmt.buffer, stmt.indices), compiler.expr(stmt.value)
    return (lambda frame: target.store(frame, value(frame))) if compiler.data else abstract.store(target, value)


@statement(ir.Evaluate)
def _evaluate(compiler: Compiler, stmt: ir.Evaluate) -> Closure:
    call = stmt.value
    name = ir.op_name(call)
    if name in _BREAKS:
        return lambda frame: BREAK
    if name == tl.CONTINUE_LOOP:
        return lambda frame: CONTINUE
    closure = compiler.evaluate(call) if isinstance(call, ir.Call) else None
    if closure is None:
        return lambda frame: None

    def run(frame: Frame) -> None:
        closure(frame)

    return run


@statement(ir.AssertStmt)
def _assert(compiler: Compiler, stmt: ir.AssertStmt) -> Closure:
    condition = compiler.expr(stmt.condition)
    message = " ".join(str(part) for part in (stmt.message_parts if hasattr(stmt, "message_parts") else [stmt.message]))

    return lambda frame: check(condition(frame), message, frame)


# -- loops -------------------------------------------------------------------------------------------------------------


@statement(ir.For)
def _for(compiler: Compiler, stmt: ir.For) -> Closure:
    compiler.open_loops.append(stmt.loop_var)
    try:
        if stmt.kind == ir.ForKind.THREAD_BINDING:
            return _thread_loop(compiler, stmt)
        if stmt.kind == ir.ForKind.PARALLEL and not compiler.axes:
            return _parallel(compiler, stmt)
        return _serial(compiler, stmt)
    finally:
        compiler.open_loops.pop()


def _serial(compiler: Compiler, stmt: ir.For) -> Closure:
    slot, begin, extent = compiler.slot(stmt.loop_var), compiler.expr(stmt.min), compiler.expr(stmt.extent)
    body = compiler.stmt(stmt.body)
    # A loop that may exit after a read of memory yields to the tasks that write it.
    polls = ir.contains(stmt.body, _is_break) and ir.contains(stmt.body, _reads_shared_memory)

    def over(body: Closure) -> Closure:
        def run(frame: Frame) -> None:
            first, count = begin(frame), extent(frame)
            loop = _Loop(frame)
            for i in range(_longest(count, frame)):
                if is_vector(count):
                    loop.leave(spread(i >= count, frame))
                if not loop.enter():
                    break
                frame.slots[slot] = first + i
                if loop.left(body(frame)):
                    break
                if polls:
                    frame.run.scheduler.yield_control()
            loop.close()

        return run

    if compiler.instrumentation is None or compiler.axes:
        return over(body)
    return compiler.instrumentation.loop(compiler, stmt, body, over)


def _longest(count: Any, frame: Frame) -> int:
    if not is_vector(count):
        return int(count)
    values = spread(count, frame)
    active = values if frame.mask is None else values[spread(frame.mask, frame)]
    return int(active.max()) if active.size else 0


class _Loop:
    """The masks of one running loop: the elements that have left it, and those that left only this iteration."""

    def __init__(self, frame: Frame):
        self.frame = frame
        self.saved = frame.mask, frame.dead, frame.broken
        frame.dead = frame.broken = None

    def leave(self, gone: np.ndarray) -> None:
        """These elements run no further iterations."""
        frame = self.frame
        frame.broken = gone if frame.broken is None else frame.broken | gone

    def enter(self) -> bool:
        """Start an iteration; False if no element is left."""
        frame, (mask, _, _) = self.frame, self.saved
        frame.dead = None
        frame.mask = mask if frame.broken is None else without(mask, frame.broken)
        return frame.broken is None or bool(frame.mask.any())

    def left(self, result: Any) -> bool:
        """After an iteration that returned `result`: whether the loop is over for all."""
        if result is not BREAK:
            return False
        if self.frame.dead is None:
            return True
        self.leave(spread(self.frame.mask, self.frame))
        return False

    def close(self) -> None:
        """Give the frame back its masks."""
        self.frame.mask, self.frame.dead, self.frame.broken = self.saved


@statement(ir.While)
def _while(compiler: Compiler, stmt: ir.While) -> Closure:
    condition, body = compiler.expr(stmt.condition), compiler.stmt(stmt.body)
    polls = _Polls(compiler, stmt)

    def run(frame: Frame) -> None:
        loop, looked = _Loop(frame), None
        variables: tuple[bytes, ...] = ()
        while loop.enter():
            now, holds = frame.run.scheduler.progress, condition(frame)
            if is_vector(holds):
                loop.leave(~spread(holds, frame))
                if not loop.enter():
                    break
            elif not holds:
                break
            if looked is not None and polls.looks:
                polls.wait(frame, looked, variables)
                looked = None
                continue
            looked, variables = now, polls.variables(frame)
            if loop.left(body(frame)):
                break
        if polls.looks:
            frame.run.scheduler.changes()
        loop.close()

    return run


def _reads_shared_memory(node: ir.Node) -> bool:
    return isinstance(node, ir.BufferLoad) and not node.buffer.scope().startswith("local")


def _is_break(node: ir.Node) -> bool:
    return isinstance(node, ir.Evaluate) and ir.op_name(node.value) in _BREAKS


class _Polls:
    """A loop that may wait for others: it polls memory that they write, and yields between two reads."""

    def __init__(self, compiler: Compiler, stmt: ir.While):
        loads = ir.nodes(stmt, _reads_shared_memory)
        self.looks = [(str(load), compiler.expr(load)) for load in loads]
        decisive = ir.instances(stmt.condition, ir.BufferLoad)
        self.decisive = [compiler.expr(load) for load in decisive or loads]
        self.own = [compiler.expr(load) for load in decisive if not _reads_shared_memory(load)]
        polled = ", ".join(_polled(stmt))
        of = f"{polled}, which its loop polls" if polled else "the end of its loop"
        self.what = f"{of}, while {as_written(stmt.condition)}"
        self.where = location(stmt)

    def variables(self, frame: Frame) -> tuple[bytes, ...]:
        """The variables of the unit that decide whether the loop ends."""
        return tuple(np.asarray(load(frame)).tobytes() for load in self.own)

    def wait(self, frame: Frame, looked: int, variables: tuple[bytes, ...]) -> None:
        """Let the others run; if nothing was written since it `looked`, until one of them writes.

        A loop that depends on variables, and has changed them since, continues.
        """
        gets_on = self.variables(frame) != variables
        seen, values = (lambda: self._seen(frame)), (lambda: self._values(frame))
        frame.run.scheduler.spin(looked, self.what, seen, self.where, values, gets_on)

    def _seen(self, frame: Frame) -> str:
        return ", ".join(f"{text} = {load(frame)}" for text, load in self.looks[:4])

    def _values(self, frame: Frame) -> tuple[bytes, ...]:
        """The values that decide whether the loop ends: the loads of its condition, or of its body where the condition
        has none."""
        return tuple(np.asarray(load(frame)).tobytes() for load in self.decisive)


def _polled(loop: ir.While) -> list[str]:
    """The atomic loads of a loop, in the user's spelling."""
    loads = ir.nodes(loop, lambda node: ir.op_name(node) == tl.atomic("load"))
    return list(dict.fromkeys(map(as_written, loads)))


def _thread_loop(compiler: Compiler, stmt: ir.For) -> Closure:
    slot, body = compiler.slot(stmt.loop_var), compiler.stmt(stmt.body)
    index = thread_index(compiler.launch, "xyz".index(str(stmt.thread_binding.thread_tag)[-1]))

    def run(frame: Frame) -> Any:
        frame.slots[slot] = index
        return body(frame)

    return run


def thread_index(launch: Launch, axis: int) -> Any:
    """The number of each thread of a program along an axis."""
    x, y, _ = launch.threads
    extent = launch.threads[axis]
    linear = np.arange(launch.thread_count, dtype=np.int32)
    return linear // (1, x, x * y)[axis] % extent if extent > 1 else 0


def _parallel(compiler: Compiler, stmt: ir.For) -> Closure:
    """A nest of parallel loops as one evaluation over the space of all its iterations."""
    nest = [stmt]
    while isinstance(nest[-1].body, ir.For) and nest[-1].body.kind == ir.ForKind.PARALLEL:
        nest.append(nest[-1].body)
    slots = [compiler.slot(loop.loop_var) for loop in nest]
    begins = [compiler.expr(loop.min) for loop in nest]
    extents = [compiler.expr(loop.extent) for loop in nest]
    compiler.axes = {loop.loop_var: axis for axis, loop in enumerate(nest)}
    compiler.open_loops += compiler.axes
    # Slices count from zero; a nest that begins elsewhere is evaluated by index arrays.
    compiler.sliceable = all(ir.constant(loop.min) == 0 for loop in nest)
    body = compiler.stmt(nest[-1].body)
    del compiler.open_loops[-len(nest) :]
    hook = compiler.instrumentation.nest(compiler, nest[-1].body) if compiler.instrumentation is not None else None
    compiler.axes = {}
    draws, compiler.draws = compiler.draws, None
    over_all = functools.partial(draws.run, body) if draws is not None else body

    def run(frame: Frame) -> None:
        space = tuple(uniform(e(frame), frame, "a loop's extent") for e in extents)
        first = [uniform(b(frame), frame, "where a loop begins") for b in begins]
        if min(space) <= 0 or (hook is not None and not hook(frame, space)):
            return
        saved = frame.space, frame.mask, frame.dead, frame.broken
        frame.space, frame.mask, frame.dead, frame.broken = space, None, None, None
        for axis, (slot, n) in enumerate(zip(slots, space, strict=True)):
            indices = _axis(n, axis, len(space))
            frame.slots[slot] = indices + np.int32(first[axis]) if first[axis] else indices
        for observer in frame.run.observers:
            observer.iterates(frame)
        over_all(frame)
        frame.space, frame.mask, frame.dead, frame.broken = saved

    return run


@cache
def _axis(extent: int, axis: int, rank: int) -> np.ndarray:
    """0..extent-1 along one axis of a space; read-only because it is shared."""
    values = np.arange(extent, dtype=np.int32).reshape([-1 if a == axis else 1 for a in range(rank)])
    values.flags.writeable = False
    return values
