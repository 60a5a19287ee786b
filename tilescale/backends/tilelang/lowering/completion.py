# SPDX-License-Identifier: MIT
"""Completion of a program's writes, with its signals; completion of its threads' asynchronous loads.

Bulk stores are completed by the thread that issued them. Where this is always the same thread, it alone waits, and
publishes the other threads' writes too, as they have synchronized before (causality order is transitive: PTX ISA,
memory consistency model). Elsewhere every thread completes its own.
"""

from __future__ import annotations

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.deferred_stores import COMPLETE, FLUSH, LOADED, DeferredSignal
from tilescale.backends.tilelang.lowering.devices import DeviceStage
from tilescale.backends.tilelang.lowering.markers import sync
from tilescale.backends.tilelang.lowering.registry import lowers

C_TYPES = {"int32": "int", "uint32": "unsigned", "int64": "long", "uint64": "unsigned long"}
"""Types of flags, and their names in the prelude."""


def signal_kind(flag: ir.Buffer, op: str) -> str:
    """Template arguments of a signal: whether it sets or adds, and the type of the flag."""
    return f"{1 if op == 'set' else 0}, {C_TYPES[str(flag.dtype)]}"


def published(stage: DeviceStage, body: ir.Stmt, drains: bool = False) -> ir.Stmt:
    """`body`, which releases at system scope, run by one thread after all writes of the program are complete.

    `drains`: it begins with its own drain().
    """
    if stage.is_complete:
        return body
    completed = tir.evaluate(tir.extern("tilescale::complete_stores"))
    if stage.roles.elects:
        whole = body if drains else tir.sequence([completed, body])
        return tir.sequence([sync(), _elected(stage, whole)])
    return tir.sequence([completed, sync(), stage.one_thread(body)])


@lowers(COMPLETE)
def _complete(stage: DeviceStage, marker: ir.AttrStmt) -> ir.Stmt:
    return complete(stage, ir.integer(marker.value), marker.body)


def complete(stage: DeviceStage, left: int, signals: ir.Stmt) -> ir.Stmt:
    """Complete all bulk stores but the last `left`, and send signals; without signals, their tiles are free."""
    stage.is_complete = True
    sent = stage.stmt(signals)
    stage.is_complete = False
    if tir.is_nothing(sent):
        free = tir.evaluate(tir.call(tl.WAIT_TMA_STORES, left, 1))
        return tir.sequence([_elected(stage, free), sync()])
    completed = tir.evaluate(tir.extern(f"tilescale::complete_stores<{left}>"))
    return tir.sequence([sync(), _elected(stage, tir.sequence([completed, sent])), sync()])


@lowers(LOADED)
def _loaded(stage: DeviceStage, marker: ir.AttrStmt) -> ir.Stmt:
    return tir.sequence([tir.evaluate(tir.call(tl.PTX_WAIT_GROUP, ir.integer(marker.value))), sync()])


@lowers(FLUSH)
def _flush(stage: DeviceStage, marker: ir.AttrStmt) -> ir.Stmt:
    """Complete pending bulk stores, and send deferred signals, in order."""
    kept = list(reversed(stage.roles.kept))
    loads = [ir.BufferLoad(signal.variable, [ir.IntImm("int32", 0)]) for signal in kept]
    sent = [_release(*pair) for pair in zip(kept, loads, strict=True)]
    none = [ir.BufferStore(load.buffer, ir.IntImm("int64", 0), load.indices) for load in loads]
    return tir.sequence([complete(stage, 0, tir.sequence(sent)), *none])


def _elected(stage: DeviceStage, body: ir.Stmt) -> ir.Stmt:
    threads = stage.launch.thread_count if stage.executing is None else stage.executing.threads
    return ir.IfThenElse(tir.elected(threads), body, None)


def _release(kept: DeferredSignal, address: ir.PrimExpr) -> ir.Stmt:
    kind = signal_kind(ir.region_parts(kept.flag)[0], kept.op)
    return tir.evaluate(tir.extern(f"tilescale::release<{kind}>", address, ir.IntImm("int64", kept.value)))
