# SPDX-License-Identifier: MIT
"""Statements of TIR as closures: sequence, loops, branches, bindings, stores.

A closure returns None, or BREAK or CONTINUE when all active threads leave the body of the innermost loop. When only some
do, they are noted in `frame.dead` and the rest of the body runs without them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.compiler import Compiler, statement
from tilescale.backends.emulator.expr import Closure
from tilescale.backends.emulator.frame import Frame, is_vector, spread, uniform
from tilescale.backends.emulator.scales import compile_scale
from tilescale.backends.emulator.scheduler import Wait
from tilescale.backends.emulator.units import Bound
from tilescale.errors import UnsupportedError, UsageError
from tilescale.passes.structure import location
from tilescale.program.ops import SCALE

BREAK, CONTINUE = "break", "continue"
@statement(ir.SeqStmt)
def _sequence(compiler: Compiler, stmt: ir.SeqStmt) -> Closure:
    parts = [compiler.stmt(s) for s in stmt.seq]

    def run(frame: Frame) -> Any:
        for part in parts:
            left = part(frame)
            if left is not None:
                return left
            if frame.dead is not None:
                frame.mask = _without(frame.mask, frame.dead)
                if not frame.mask.any():
                    return CONTINUE
        return None

    return run


def _without(mask: np.ndarray | None, dead: np.ndarray) -> np.ndarray:
    return ~dead if mask is None else mask & ~dead


@statement(ir.SBlockRealize)
def _realize(compiler: Compiler, stmt: ir.SBlockRealize) -> Closure:
    return compiler.stmt(stmt.block)


@statement(ir.SBlock)
def _block(compiler: Compiler, stmt: ir.SBlock) -> Closure:
    if stmt.alloc_buffers:
        raise UnsupportedError("the emulator does not run allocations in nested blocks")
    return compiler.stmt(stmt.body)


@statement(ir.AttrStmt)
def _attribute(compiler: Compiler, stmt: ir.AttrStmt) -> Closure:
    return compile_scale(compiler, stmt) if str(stmt.attr_key) == SCALE else compiler.stmt(stmt.body)


@statement(ir.DeclBuffer, ir.AllocBuffer)
def _declare(compiler: Compiler, stmt: Any) -> Closure:
    raise UnsupportedError(f"the emulator does not run buffer declarations inside a kernel: {stmt.buffer.name}")


@statement(ir.Bind)
def _bind(compiler: Compiler, stmt: ir.Bind) -> Closure:
    if any(v in compiler.loop_variables and v not in compiler.open_loops for v in ir.variables(stmt.value)):
        compiler.deferred[stmt.var] = stmt.value
        return lambda frame: None
    slot, value = compiler.slot(stmt.var), compiler.expr(stmt.value)

    def run(frame: Frame) -> None:
        bound = value(frame)
        if isinstance(bound, Bound):
            frame.slots[slot] = bound.array
            return
        # A load may be a view of the buffer; the variable keeps the value of now.
        frame.slots[slot] = bound.copy() if is_vector(bound) and bound.base is not None else bound

    return run


@statement(ir.BufferStore)
def _store(compiler: Compiler, stmt: ir.BufferStore) -> Closure:
    target, value = compiler.element(stmt.buffer, stmt.indices), compiler.expr(stmt.value)
    return lambda frame: target.store(frame, value(frame))


@statement(ir.Evaluate)
def _evaluate(compiler: Compiler, stmt: ir.Evaluate) -> Closure:
    call = stmt.value
    name = ir.op_name(call)
    if name in ("tirx.break_loop", "tl.loop_break"):
        return lambda frame: BREAK
    if name == "tirx.continue_loop":
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

    def run(frame: Frame) -> None:
        holds = condition(frame)
        if not np.all(spread(holds, frame)[spread(frame.mask if frame.mask is not None else True, frame)]):
            raise UsageError(f"the program's assertion failed: {message}")

    return run


# -- branches ------------------------------------------------------------------------------------------------------------


@statement(ir.IfThenElse)
def _if(compiler: Compiler, stmt: ir.IfThenElse) -> Closure:
    condition = compiler.expr(stmt.condition)
    then = compiler.stmt(stmt.then_case)
    otherwise = compiler.stmt(stmt.else_case) if stmt.else_case is not None else None
    together = compiler.is_collective(stmt)
    where = location(stmt)

    def run(frame: Frame) -> Any:
        taken = condition(frame)
        if not is_vector(taken):
            return then(frame) if taken else otherwise and otherwise(frame)
        taken = spread(taken, frame)
        active = spread(True if frame.mask is None else frame.mask, frame)
        yes, no = taken & active, ~taken & active
        if together and otherwise is not None and yes.any() and no.any():
            return _roles(frame, [(then, yes), (otherwise, no)], where)
        for branch, mask in ((then, yes), (otherwise, no)):
            if branch is not None and mask.any():
                _masked(frame, branch, mask)
        return None

    return run


def _masked(frame: Frame, branch: Closure, mask: np.ndarray) -> None:
    saved = frame.mask
    frame.mask = mask
    left = branch(frame)
    frame.mask = saved
    if left is not None:
        frame.dead = mask if frame.dead is None else frame.dead | mask
        if left is BREAK:
            frame.broken = mask if frame.broken is None else frame.broken | mask


def _roles(frame: Frame, branches: list[tuple[Closure, np.ndarray]], where: Any) -> None:
    """Threads part ways: each side becomes a coroutine of its own; they meet again after the branch."""
    scheduler, task = frame.run.scheduler, frame.run.scheduler.current
    running = len(branches)

    def finished() -> None:
        nonlocal running
        running -= 1

    for branch, mask in branches:
        side = frame.fork(frame.unit, mask)
        first, count = int(np.argmax(mask)), int(mask.sum())
        name = f"{task.name}, threads {first}..{first + count - 1}"
        scheduler.spawn(name, lambda b=branch, s=side: b(s), finished)
    scheduler.block(Wait(lambda: running == 0, "its threads", where=where, quiet=True))


# -- loops ---------------------------------------------------------------------------------------------------------------


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

    def run(frame: Frame) -> None:
        first, count = uniform(begin(frame), frame, "where a loop begins"), extent(frame)
        last = first + _longest(count, frame)
        loop = _Loop(frame)
        for i in range(first, last):
            if is_vector(count):
                loop.leave(spread(i - first >= count, frame))
            if not loop.enter():
                break
            frame.slots[slot] = i
            if loop.left(body(frame)):
                break
        loop.close()

    return run


def _longest(count: Any, frame: Frame) -> int:
    if not is_vector(count):
        return int(count)
    values = spread(count, frame)
    active = values if frame.mask is None else values[spread(frame.mask, frame)]
    return int(active.max()) if active.size else 0


class _Loop:
    """The masks of one running loop: which elements have left it, which only this iteration."""

    def __init__(self, frame: Frame):
        self.frame = frame
        self.saved = frame.mask, frame.dead, frame.broken
        frame.dead = frame.broken = None

    def leave(self, gone: np.ndarray) -> None:
        """These elements run no further iterations."""
        frame = self.frame
        frame.broken = gone if frame.broken is None else frame.broken | gone

    def enter(self) -> bool:
        """Start an iteration; False if nobody is left."""
        frame, (mask, _, _) = self.frame, self.saved
        frame.dead = None
        frame.mask = mask if frame.broken is None else _without(mask, frame.broken)
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
    polls = ir.contains(stmt.condition, _reads_shared_memory) or ir.contains(stmt.body, _reads_shared_memory)
    where = location(stmt)

    def run(frame: Frame) -> None:
        loop, scheduler = _Loop(frame), frame.run.scheduler
        while loop.enter():
            holds = condition(frame)
            if is_vector(holds):
                loop.leave(~spread(holds, frame))
                if not loop.enter():
                    break
            elif not holds:
                break
            before = scheduler.progress
            if loop.left(body(frame)):
                break
            if polls and scheduler.progress == before:
                scheduler.block(Wait(lambda seen=before: scheduler.progress != seen, "its loop condition", where=where))
        loop.close()

    return run


def _reads_shared_memory(node: Any) -> bool:
    return isinstance(node, ir.BufferLoad) and not node.buffer.scope().startswith("local")


def _thread_loop(compiler: Compiler, stmt: ir.For) -> Closure:
    slot, extent, body = compiler.slot(stmt.loop_var), compiler.expr(stmt.extent), compiler.stmt(stmt.body)

    def run(frame: Frame) -> Any:
        frame.slots[slot] = _axis(extent(frame), 0, 1)
        return body(frame)

    return run


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
    compiler.axes = {}

    def run(frame: Frame) -> None:
        space = tuple(uniform(e(frame), frame, "a loop's extent") for e in extents)
        first = [uniform(b(frame), frame, "where a loop begins") for b in begins]
        if 0 in space:
            return
        saved = frame.space, frame.mask, frame.dead, frame.broken
        frame.space, frame.mask, frame.dead, frame.broken = space, None, None, None
        for axis, (slot, n) in enumerate(zip(slots, space, strict=True)):
            indices = _axis(n, axis, len(space))
            frame.slots[slot] = indices + np.int32(first[axis]) if first[axis] else indices
        body(frame)
        frame.space, frame.mask, frame.dead, frame.broken = saved

    return run


@cache
def _axis(extent: int, axis: int, rank: int) -> np.ndarray:
    """0..extent-1 along one axis of a space; read-only because it is shared."""
    values = np.arange(extent, dtype=np.int32).reshape([-1 if a == axis else 1 for a in range(rank)])
    values.flags.writeable = False
    return values
