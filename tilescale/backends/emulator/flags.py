# SPDX-License-Identifier: MIT
"""Which tensors are flags, and statements that change some by other means than signals, for the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilelang_core import ir
from tilescale.backends.emulator.expr import Closure
from tilescale.backends.emulator.frame import Frame
from tilescale.program.ops import COPY, SIGNAL, WAIT

if TYPE_CHECKING:
    from tilescale.backends.emulator.compiler import Compiler


def named(body: ir.Stmt) -> list[ir.Var]:
    """The data of all buffers that signals and waits of a program name."""
    found: list[ir.Var] = []

    def visit(node: Any) -> None:
        name = ir.op_name(node)
        if name in (SIGNAL.name, WAIT.name):
            found.append(ir.region_parts(node.args[0])[0].data)
        elif name == COPY.name and len(node.args) > 3:
            found.append(ir.region_parts(node.args[3])[0].data)

    ir.walk(body, visit)
    return found


def reaches(compiler: Compiler, node: Any) -> bool:
    """Whether a node is an access to flags."""
    return hasattr(node, "buffer") and compiler.root(compiler.slot(node.buffer.data)) in compiler.flags


def watched(compiler: Compiler, stmt: ir.Stmt, closure: Closure) -> Closure:
    """`closure`, after which the clock looks at all flags if the statement may have changed some: a store sets them, an
    atomic adds."""
    calls = isinstance(stmt, ir.Evaluate)
    stores = isinstance(stmt, ir.BufferStore) or (isinstance(stmt, ir.For) and stmt.kind == ir.ForKind.PARALLEL)
    if not (calls or stores) or not ir.contains(stmt, lambda node: reaches(compiler, node)):
        return closure
    clock, op = compiler.clock, "add" if calls and "atomic" in (ir.op_name(stmt.value) or "") else "set"

    def run(frame: Frame) -> Any:
        left = closure(frame)
        clock.written(op)
        return left

    return run
