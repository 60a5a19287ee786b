# SPDX-License-Identifier: MIT
"""Recording of serial loops: as a whole where nothing in the loop orders tasks.

A loop with equal iterations is recorded once and counted; without data it is also run only once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tilelang_core import ir, tl
from tilelang_core.tiles import Gemm, regions_of
from tilescale.backends.emulator.execute.frame import Frame, is_vector
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.symbols import PRIVATE
from tilescale.backends.emulator.record.recorder import Recorder
from tilescale.backends.emulator.record.registry import has_cost, orders
from tilescale.program.footprint import stages_of
from tilescale.program.operations import Copy, operation
from tilescale.program.ops import SCALE
from tilescale.program.persistent_loops import ROLES
from tilescale.timing.record import HiddenLatency


def timed(
    recorder: Recorder, compiler: Compiler, stmt: ir.For, body: Closure, loop: Callable[[Closure], Closure]
) -> Closure:
    """The closure of a serial loop, with recording.

    Args:
        body: the closure of its body.
        loop: makes the closure that repeats a body by the loop's trip count.
    """
    depth = max(stages_of(stmt), 1)
    free = not ir.contains(stmt.body, lambda node: _orders(compiler, node, depth))
    hidden = _hidden(recorder, compiler) if free and _loads_at_once(compiler, stmt) else None
    if free and _is_uniform(stmt):
        return _counted(recorder, compiler, stmt, body, loop, depth, hidden)
    if hidden is not None:
        return _collected(recorder, compiler, stmt, loop(body), depth, hidden)
    if depth == 1:
        return _by_parts(recorder, compiler, stmt, loop(body)) if stages_of(stmt) else loop(body)
    return _collected(recorder, compiler, stmt, loop(body), depth) if free else _ahead(recorder, loop(body), depth)


def _loads_at_once(compiler: Compiler, stmt: ir.For) -> bool:
    """Whether loads of an unrolled loop wait for no other iteration: it stores in registers alone, and its addresses do
    not follow from loaded values."""
    if stmt.kind != ir.ForKind.UNROLLED or not compiler.is_in_launch:
        return False
    written = [a for leaf in ir.statements(stmt.body) for a in compiler.surroundings.effects(leaf).writes]
    return all(ir.scope_kind(a.buffer) == "fragment" for a in written) and not ir.contains(stmt.body, _is_gather)


def _is_gather(node: ir.Node) -> bool:
    return isinstance(node, ir.BufferLoad) and any(
        ir.contains(index, lambda inner: isinstance(inner, ir.BufferLoad)) for index in node.indices
    )


def _hidden(recorder: Recorder, compiler: Compiler) -> Callable[[int, float], float]:
    """The latencies of loads that are in flight together, as many as registers hold."""
    rates, layer = recorder.rates, compiler.machine.layer_for("fragment")
    room = compiler.machine.capacity(layer.name, compiler.launch.thread_count)
    return lambda loads, nbytes: max(loads - math.ceil(nbytes / room), 0) * rates.latency("global")


def _counted(
    recorder: Recorder,
    compiler: Compiler,
    stmt: ir.For,
    body: Closure,
    loop: Callable[[Closure], Closure],
    depth: int,
    hidden: HiddenLatency,
) -> Closure:
    slot = compiler.slot(stmt.loop_var)
    begin, extent = compiler.expr(stmt.min), compiler.expr(stmt.extent)

    def first_only(frame: Frame) -> Any:
        left = body(frame)
        recorder.log.muted = True
        return left

    plain, whole = loop(body), loop(first_only)

    def run(frame: Frame) -> Any:
        count = extent(frame)
        if is_vector(count) or count < 1:
            return plain(frame)
        log = recorder.log
        muted = log.muted
        log.begin_loop(count)
        if compiler.data:
            whole(frame)
        else:
            frame.slots[slot] = begin(frame)
            body(frame)
        log.muted = muted
        log.end_loop(count, depth, hidden=hidden)
        return None

    return run


def _collected(
    recorder: Recorder, compiler: Compiler, stmt: ir.For, plain: Closure, depth: int, hidden: HiddenLatency = None
) -> Closure:
    """A loop with differing iterations: recorded as equal ones with the same sum, or one where loads overlap."""
    extent = compiler.expr(stmt.extent)

    def run(frame: Frame) -> Any:
        count = extent(frame)
        if is_vector(count) or count < 1:
            return plain(frame)
        recorder.log.begin_loop(1)
        plain(frame)
        is_summed = hidden is None
        recorder.log.end_loop(count if is_summed else 1, depth, is_summed, hidden)
        return None

    return run


def _by_parts(recorder: Recorder, compiler: Compiler, stmt: ir.For, plain: Closure) -> Closure:
    """A loop with one buffer for each tile: its loads are concurrent. Where thread groups share the work, tiles are
    handed over in parts, each of which is reloaded once all groups have used it."""
    parts = _parts(compiler, stmt)

    def run(frame: Frame) -> Any:
        log = recorder.log
        before, log.parts = log.parts, parts
        left = plain(frame)
        log.flush()
        log.parts = before
        return left

    return run


def _parts(compiler: Compiler, stmt: ir.For) -> int:
    """Number of parts, along their rows, of a loop's tiles: one for each thread group that shares the work, or one
    where tiles have different rows."""
    groups: list[int] = []
    rows: set[Any] = set()

    def visit(node: ir.Node) -> None:
        if isinstance(node, ir.AttrStmt) and str(node.attr_key) == SCALE:
            level = compiler.machine.level(str(node.value.value))
            if level.kind == "thread_group":
                groups.append(compiler.launch.thread_count // level.width)
        elif ir.op_name(node) == tl.COPY:
            source, target = (ir.region_parts(region)[0] for region in regions_of(node)[:2])
            if source.scope() == "global" and ir.scope_kind(target) == "shared":
                rows.add(ir.constant(target.shape[0]))

    ir.walk(stmt, visit)
    return min(groups, default=1) if compiler.machine.has(ROLES) and len(rows) == 1 else 1


def _ahead(recorder: Recorder, plain: Closure, depth: int) -> Closure:
    """A pipelined loop that synchronizes: each load overlaps the previous iterations."""

    def run(frame: Frame) -> Any:
        log = recorder.log
        before, log.ahead = log.ahead, depth - 1
        plain(frame)
        log.ahead = before
        if not log.muted:
            recorder.settle(0)
        return None

    return run


def _orders(compiler: Compiler, node: ir.Node, stages: int) -> bool:
    """Whether a node orders tasks, or may leave the enclosing loop of `stages` stages.

    If a cluster executes the loop, its programs load ahead into several buffers, without a barrier at each load.
    """
    if isinstance(node, ir.While) or compiler.reaches_flags(node):
        return True
    if isinstance(node, ir.AttrStmt) and str(node.attr_key) == SCALE:
        kind = compiler.machine.level(str(node.value.value)).kind
        return kind == "cluster" or kind == "program" and stages == 1
    name, ours = ir.op_name(node), operation(node)
    if isinstance(ours, Copy):
        return ours.signal is not None
    return orders(name) or (has_cost(name) and _arrives(node))


def _arrives(call: ir.Call) -> bool:
    """Whether an operation on tiles arrives at a barrier on completion."""
    notes = call.annotations or {}
    return "barrier" in notes or "gemm" in call.op.name and Gemm.of(call).done is not None


def _is_uniform(stmt: ir.For) -> bool:
    """Whether all iterations take the same steps."""
    bound = {bind.var for bind in ir.instances(stmt.body, ir.Bind)}
    return _same(stmt.body, bound | {loop.loop_var for loop in ir.instances(stmt, ir.For)})


def _same(stmt: ir.Stmt, inner: set[ir.Var]) -> bool:
    if isinstance(stmt, ir.IfThenElse):
        return False
    if isinstance(stmt, ir.BufferStore):
        return stmt.buffer.scope() not in PRIVATE
    if isinstance(stmt, ir.For):
        if ir.constant(stmt.extent) is None:
            return False
        if stmt.kind == ir.ForKind.PARALLEL:
            return not ir.contains(stmt, lambda n: isinstance(n, ir.BufferStore) and n.buffer.scope() in PRIVATE)
    if isinstance(stmt, ir.Evaluate) and isinstance(stmt.value, ir.Call):
        return _same_call(stmt.value, inner)
    return all(_same(part, inner) for part in ir.children(stmt))


def _same_call(call: ir.Call, inner: set[ir.Var]) -> bool:
    copy = operation(call)
    if isinstance(copy, Copy) and any(var in inner for var in ir.variables(copy.peer)):
        return False
    if not isinstance(copy, Copy) and not has_cost(ir.op_name(call)):
        return True
    return all(ir.constant(n) is not None for region in regions_of(call) for n in ir.region_parts(region)[2])
