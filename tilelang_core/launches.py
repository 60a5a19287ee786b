# SPDX-License-Identifier: MIT
"""Launches in one form: loops over the grid, thread indices, the root block, as `T.Kernel` with a grid traces them.

TileLang takes two more: `T.Kernel()` without a grid, which is one program, and loops that `T.thread_binding` binds.
"""

from __future__ import annotations

from typing import Any

from tvm import ir, tirx

from tilelang_core import tl
from tilelang_core.ir import contains
from tilelang_core.rewrite import LAUNCH, at, launch_nest, relooped, rewrite, sequence

_AXES = "xyz"


def in_one_form(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function that launches the same, all in the form of `T.Kernel` with a grid."""

    def enter(node: Any) -> Any:
        if _bound_axis(node) is not None:
            return node if contains(node, _is_launch) else _from_loops(node)
        if isinstance(node, tirx.SeqStmt) and any(map(_is_launch, node.seq)):
            return _with_grids(node, enter)
        return None

    return func.with_body(rewrite(func.body, enter=enter))


def _bound_axis(node: Any) -> str | None:
    """The thread axis that a loop is bound to, such as "blockIdx.x"."""
    bound = isinstance(node, tirx.For) and node.thread_binding is not None
    return str(node.thread_binding.thread_tag) if bound else None


def _is_launch(node: Any) -> bool:
    return isinstance(node, tirx.SBlockRealize) and node.block.name_hint == LAUNCH


def _with_grids(seq: tirx.SeqStmt, enter: Any) -> tirx.Stmt:
    """Statements with a grid of one program around each launch, and around the thread indices before it."""
    done: list[tirx.Stmt] = []
    indices: list[tuple[tirx.Var, int]] = []
    for stmt in seq.seq:
        if _is_thread_index(stmt):
            indices.append((stmt.var, int(stmt.value.args[0])))
        elif _is_launch(stmt):
            block = stmt.block
            grid = [(tirx.Var("bx", "int32"), tirx.IntImm("int32", 1))]
            nest = launch_nest(grid, indices, block.alloc_buffers, block.annotations, block.body)
            done.append(at(nest, like=block.body))
            indices = []
        else:
            done.append(rewrite(stmt, enter=enter))
    return sequence(done)


def binds_threads(node: Any) -> bool:
    """Whether a statement gives a variable the index of a thread: a loop that is bound to threads, or a binding."""
    return _is_thread_index(node) or (_bound_axis(node) or "").startswith("threadIdx")


def _is_thread_index(node: Any) -> bool:
    value = node.value if isinstance(node, tirx.Bind) else None
    return isinstance(value, tirx.Call) and isinstance(value.op, ir.Op) and value.op.name == tl.THREAD_INDEX


def _from_loops(loop: tirx.For) -> tirx.Stmt:
    """A launch from a nest of bound loops; its loops over threads stay, inside of it."""
    blocks: dict[str, tirx.For] = {}
    threads: list[tirx.For] = []
    body: tirx.Stmt = loop
    while (axis := _bound_axis(body)) is not None:
        if axis.startswith("blockIdx"):
            blocks[axis[-1]] = body
        else:
            threads.append(body)
        body = body.body
    for each in reversed(threads):
        body = relooped(each, body=body, annotations={})
    grid = [(blocks[axis].loop_var, blocks[axis].extent) for axis in _AXES if axis in blocks]
    indices = [(tirx.Var(f"t{axis}", "int32"), number) for number, axis in enumerate(_AXES)]
    annotations = {tl.LAUNCH_THREADS: _thread_extents(body)}
    nest = launch_nest(grid or [(tirx.Var("bx", "int32"), tirx.IntImm("int32", 1))], indices, [], annotations, body)
    return at(nest, like=loop)


def _thread_extents(body: tirx.Stmt) -> list[tirx.PrimExpr]:
    """Threads along each axis: as many as the loops say that are bound to it."""
    extents = dict.fromkeys(_AXES, tirx.IntImm("int32", 1))

    def visit(node: Any) -> None:
        axis = _bound_axis(node)
        if axis is not None and axis.startswith("threadIdx"):
            extents[axis[-1]] = node.extent

    tirx.stmt_functor.post_order_visit(body, visit)
    return list(extents.values())
