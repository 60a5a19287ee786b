# SPDX-License-Identifier: MIT
"""Peers, values and flag indices in memory: read once, before their operation.

Why: the stock compiler guards the statement around a load that may be out of bounds, and a signal or wait that some
thread skips hangs. Before: `T.signal(F[0], count[rank, p], dst=p)`. After: a variable for `count[rank, p]`, and the
signal with it. Tiles are unchanged, including the indices of a copied one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilescale.program import ops
from tilescale.program.operations import AtomicAdd, Copy, operation

READING = {ops.SIGNAL.name: "signal", ops.WAIT.name: "wait", ops.COPY.name: "copy", ops.ATOMIC_ADD.name: "atomic"}
"""Operations with such operands, and the names of their variables."""


def read_before(call: ir.Call) -> tuple[list[ir.Stmt], ir.Call]:
    """The loads of the operands of a signal, wait or remote copy that lie in memory, and the operation with the
    variables."""
    reads: list[ir.Stmt] = []

    def settled(expr: ir.PrimExpr) -> ir.PrimExpr:
        if not _reads_memory(expr):
            return expr
        var = ir.Var(f"{READING[call.op.name]}_{len(reads)}", str(expr.dtype))
        reads.append(ir.Bind(var, expr))
        return var

    tiles = _tiles(call)
    args = [arg if any(arg.same_as(tile) for tile in tiles) else _operand(arg, settled) for arg in call.args]
    return reads, tir.recall(call, args) if reads else call


def _tiles(call: ir.Call) -> Sequence[ir.Call]:
    made = operation(call)
    if isinstance(made, Copy):
        return made.source, made.target
    return (made.value, made.target) if isinstance(made, AtomicAdd) and made.is_of_tiles else ()


def _operand(arg: Any, settled: Any) -> Any:
    if ir.op_name(arg) == tl.REGION:
        return tir.beginning(arg, [settled(begin) for begin in ir.region_parts(arg)[1]])
    return settled(arg)


def _reads_memory(expr: ir.PrimExpr) -> bool:
    """Whether an expression has a load that may be guarded: any except that of a variable."""
    return isinstance(expr, ir.PrimExpr) and ir.contains(
        expr, lambda node: isinstance(node, ir.BufferLoad) and node.buffer.scope() != ir.VARIABLE
    )
