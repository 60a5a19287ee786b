# SPDX-License-Identifier: MIT
"""Where what a program wrote is complete, and who tells others.

Bulk stores are completed by the thread that issued them. Where that is always the same one, it alone waits, and
publishes what the other threads wrote too, as they have met before (causality order is transitive: PTX ISA, memory
consistency model). Elsewhere every thread completes its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering.deferred import Kept

if TYPE_CHECKING:
    from tilescale.backends.cuda.lowering.lower import GridLowering

BULK = "tma"
"""The mechanism of copies that are begun and completed apart."""

C_TYPES = {"int32": "int", "uint32": "unsigned", "int64": "long", "uint64": "unsigned long"}
"""Types of flags, and what the prelude calls them."""


def signal_kind(flag: ir.Buffer, op: str) -> str:
    """Template arguments of a signal: whether it sets or adds, and the type of the flag."""
    return f"{1 if op == 'set' else 0}, {C_TYPES[str(flag.dtype)]}"


def published(lowering: GridLowering, body: ir.Stmt, drains: bool = False) -> ir.Stmt:
    """`body`, which releases at system scope, run by one thread after all that the program wrote is complete.

    `drains`: it begins with a drain() of its own thread.
    """
    if lowering.is_complete:
        return body
    completed = tir.evaluate(tir.extern("tilescale::complete_stores"))
    if lowering.roles.elects:
        whole = body if drains else tir.sequence([completed, body])
        return tir.sequence([lowering.sync(), _elected(lowering, whole)])
    return tir.sequence([completed, lowering.sync(), lowering.one_thread(body)])


def complete(lowering: GridLowering, left: int, signals: ir.Stmt) -> ir.Stmt:
    """All bulk stores but the last `left` are complete, and signals are sent; without any, their tiles are free."""
    lowering.is_complete = True
    sent = lowering.stmt(signals)
    lowering.is_complete = False
    if tir.is_nothing(sent):
        free = tir.evaluate(tir.call("tl.tma_store_wait", left, 1))
        return tir.sequence([_elected(lowering, free), lowering.sync()])
    completed = tir.evaluate(tir.extern(f"tilescale::complete_stores<{left}>"))
    return tir.sequence([lowering.sync(), _elected(lowering, tir.sequence([completed, sent])), lowering.sync()])


def flush(lowering: GridLowering) -> ir.Stmt:
    """Bulk stores that were begun are complete, and signals that were kept back are sent, in their order."""
    kept = list(reversed(lowering.roles.kept))
    loads = [ir.BufferLoad(signal.variable, [ir.IntImm("int32", 0)]) for signal in kept]
    sent = [_release(*pair) for pair in zip(kept, loads, strict=True)]
    none = [ir.BufferStore(load.buffer, ir.IntImm("int64", 0), load.indices) for load in loads]
    return tir.sequence([complete(lowering, 0, tir.sequence(sent)), *none])


def _elected(lowering: GridLowering, body: ir.Stmt) -> ir.Stmt:
    return ir.IfThenElse(tir.elected(lowering.launch.thread_count), body, None)


def _release(kept: Kept, address: ir.PrimExpr) -> ir.Stmt:
    kind = signal_kind(ir.region_parts(kept.flag)[0], kept.op)
    return tir.evaluate(tir.extern(f"tilescale::release<{kind}>", address, ir.IntImm("int64", kept.value)))
