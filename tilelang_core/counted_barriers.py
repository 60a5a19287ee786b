# SPDX-License-Identifier: MIT
"""Barriers between the threads of a role, without Z3 models of its threads.

Why: stock TileLang's ThreadSync inserts barriers, and asks Z3 for one thread after another that reaches each: for the
number of its threads, and again for each condition around it. Half a second for a GEMM whose 256 threads exchange tiles
five times. A range of whole warps is known from the comparisons of the thread index around a barrier.

Meanwhile the thread index is not marked as one, which leaves all barriers those of a block, and an index without
values stands for it in counts. Conflicts, which decide where barriers are, depend on neither. Under other conditions on
threads stock's pass runs as it is. Applies to functions that lowering composes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.ir import Range
from tvm.tirx import stmt_functor

from tilelang_core.ir import children, constant, integer, op_name, variables, walk
from tilelang_core.rewrite import at
from tilelang_core.stock_passes import Apply, around

_WARP = 32
_EXTENT, _THREAD, _OTHER_THREADS = "thread_extent", "threadIdx.x", ("threadIdx.y", "threadIdx.z")
_NO_THREAD, _UNCOUNTED = "blockIdx.x", "coproc_scope"
_SCOPES = ("shared", "shared.dyn")

_FIRST_BARRIER = 3
"""Barriers before this one are those of a block and of TileLang's reductions."""


@contextlib.contextmanager
def counted_barriers() -> Iterator[None]:
    """Within the block stock TileLang synchronizes the threads of functions that lowering composes."""
    with around("ThreadSync", with_counted_barriers):
        yield


def with_counted_barriers(func: tirx.PrimFunc, stock: Apply) -> tirx.PrimFunc:
    """The function with the barriers that stock's pass inserts."""
    index = _thread_index(func.body)
    if index is None:
        return stock(func)
    made, count = stock(func.with_body(_hidden(func.body, index))), integer(index.value)
    barriers = _Barriers(index.node.var, _Threads(0, count, count >= _WARP))
    barriers.visit(made.body.body, barriers.all)
    return stock(func) if barriers.is_unknown else made.with_body(_shown(made.body.body, index, barriers.found))


def _thread_index(body: tirx.Stmt) -> tirx.AttrStmt | None:
    """The statement that has the thread index of a kernel, if that is its only one."""
    found: dict[str, tirx.AttrStmt] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.AttrStmt) and node.attr_key == _EXTENT:
            found[str(node.node.thread_tag)] = node

    walk(body, visit)
    is_flat = all(constant(found[tag].value) == 1 for tag in _OTHER_THREADS if tag in found)
    return found.get(_THREAD) if is_flat else None


def _hidden(body: tirx.Stmt, index: tirx.AttrStmt) -> tirx.Stmt:
    """The body of a kernel whose thread index is not marked as one, in the scope of one without values."""
    thread, zero = index.node, tirx.IntImm("int32", 0)
    unmarked = tirx.IterVar(thread.dom, thread.var, thread.iter_type, _NO_THREAD)
    none = Range.from_min_extent(zero, zero)
    uncounted = tirx.IterVar(none, tirx.Var("uncounted", "int32"), thread.iter_type, _THREAD)
    return tirx.AttrStmt(uncounted, _UNCOUNTED, zero, _marked(body, unmarked))


def _shown(body: tirx.Stmt, index: tirx.AttrStmt, numbers: Sequence[tuple[int, int] | None]) -> tirx.Stmt:
    """The body of a kernel with its thread index, and with number and threads of each barrier of some threads."""
    left = iter(numbers)

    def leave(node: tirx.Evaluate) -> Any:
        number = next(left) if _is_barrier(node) else None
        return at(tirx.Evaluate(_numbered(node.value, *number)), node) if number is not None else None

    return stmt_functor.ir_transform(_marked(body, index.node), None, leave, ["tirx.Evaluate"])


def _marked(body: tirx.Stmt, index: tirx.IterVar) -> tirx.Stmt:
    """The body of a kernel with another mark of its thread index."""

    def leave(node: tirx.AttrStmt) -> Any:
        is_own = node.attr_key == _EXTENT and node.node.var.same_as(index.var)
        return at(tirx.AttrStmt(index, _EXTENT, node.value, node.body), node) if is_own else None

    return stmt_functor.ir_transform(body, None, leave, ["tirx.AttrStmt"])


def _is_barrier(stmt: Any) -> bool:
    """Whether a statement is a barrier that has no number yet."""
    if not isinstance(stmt, tirx.Evaluate) or op_name(stmt.value) != "tirx.tvm_storage_sync":
        return False
    return len(stmt.value.args) == 1 and str(stmt.value.args[0].value) in _SCOPES


def _numbered(call: tirx.Call, number: int, threads: int) -> tirx.Call:
    return tirx.Call(call.dtype, call.op, [call.args[0], tirx.IntImm("int32", number), tirx.IntImm("int32", threads)])


@dataclass(frozen=True)
class _Threads:
    """Threads from `first` to before `end`; not known under other conditions, and where they are not whole warps."""

    first: int
    end: int
    is_known: bool

    def within(self, first: int, end: int) -> _Threads:
        """Those of them from `first` to before `end`."""
        first, end = max(self.first, first), min(self.end, end)
        return _Threads(first, end, self.is_known and first < end and first % _WARP == end % _WARP == 0)

    def known_if(self, is_known: bool) -> _Threads:
        return replace(self, is_known=self.is_known and is_known)


class _Barriers:
    """The barriers of a kernel in program order.

    Attributes:
        all: the threads of a block.
        found: number and threads of each, as stock gives them: ranges of threads are numbered in the order in which
            they first have a barrier. None for those of all threads.
        is_unknown: whether the threads of one of them do not follow from comparisons.
    """

    def __init__(self, index: tirx.Var, threads: _Threads) -> None:
        self.all = threads
        self.found: list[tuple[int, int] | None] = []
        self.is_unknown = False
        self._index, self._varying = index, {index}
        self._numbers: dict[_Threads, int] = {}

    def visit(self, stmt: tirx.Stmt, threads: _Threads) -> None:
        """Find those of a statement that these threads execute."""
        if _is_barrier(stmt):
            self._find(threads)
        elif isinstance(stmt, tirx.IfThenElse):
            for branch, those in zip(children(stmt), self._split(stmt.condition, threads), strict=False):
                self.visit(branch, those)
            return
        elif isinstance(stmt, tirx.Bind) and not self._is_uniform(stmt.value):
            self._varying.add(stmt.var)
        conditions = _conditions(stmt)
        for inner in children(stmt):
            self.visit(inner, threads.known_if(all(map(self._is_uniform, conditions))))

    def _find(self, threads: _Threads) -> None:
        self.is_unknown |= not threads.is_known
        if threads == self.all:
            self.found.append(None)
        else:
            number = self._numbers.setdefault(threads, _FIRST_BARRIER + len(self._numbers))
            self.found.append((number, threads.end - threads.first))

    def _split(self, condition: tirx.PrimExpr, threads: _Threads) -> tuple[_Threads, _Threads]:
        """The threads for which a condition holds, and the others."""
        if isinstance(condition, tirx.LT) and self._index.same_as(condition.a) and isinstance(condition.b, tirx.IntImm):
            limit = int(condition.b.value)
            return threads.within(threads.first, limit), threads.within(limit, threads.end)
        same = threads.known_if(self._is_uniform(condition))
        return same, same

    def _is_uniform(self, expr: Any) -> bool:
        return not (self._varying & variables(expr))


def _conditions(stmt: Any) -> Sequence[tirx.PrimExpr]:
    """Expressions that decide whether what is inside a statement is executed; not those of a branch."""
    if isinstance(stmt, tirx.For):
        return stmt.min, stmt.extent
    if isinstance(stmt, tirx.While):
        return (stmt.condition,)
    return (stmt.node,) if isinstance(stmt, tirx.AttrStmt) and isinstance(stmt.node, tirx.PrimExpr) else ()
