# SPDX-License-Identifier: MIT
"""Index expressions with quotients in floating point, opaque while stock TileLang lowers a function.

Why: TileLang inlines a name into all of its uses. A coordinate of a tile in a rasterized, persistent grid has some
hundred nodes, and each pass simplifies, bounds and proves all of them at each access: more than half of the passes of a
GEMM and reduce-scatter. Analyses of integers do not look into the conversion of a quotient, so they lose nothing by a
call. Before: `row = ...`, the same for all threads. Meanwhile: a call of a pure function of the same variables, within
the bounds of the value. After, when only the code generator is left: the value.

The trip count of a persistent loop is a call, too, until threads are synchronized: passes bound it at each access in
the loop, and prove that it is positive.

Applies to functions that lowering composes; plain programs keep the text of stock TileLang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.arith import Analyzer
from tvm.tirx import stmt_functor

from tilelang_core.ir import constant, contains, op_name, substitute, variables, walk
from tilelang_core.loop_ranges import analyzer_of, loop_ranges
from tilelang_core.rewrite import at, relooped
from tilelang_core.stock_passes import rewriting

_TYPE, _LEAST, _MOST = "int32", -(1 << 31), (1 << 31) - 1
_CALL, _NAME, _EXTENT = "tirx.call_pure_extern", "opaque_value_", "opaque_extent_"
_BITS = {f"tirx.{name}" for name in "shift_left shift_right bitwise_and bitwise_or bitwise_xor bitwise_not".split()}


@dataclass(frozen=True)
class _Value:
    """An expression of some variables, and the bounds of its value as far as they are known."""

    variables: tuple[tirx.Var, ...]
    expr: tirx.PrimExpr
    least: int
    most: int

    def of(self, given: Sequence[Any]) -> Any:
        """The expression of other values of its variables."""
        return substitute(self.expr, {var: _typed(x, var) for var, x in zip(self.variables, given, strict=True)})


@contextlib.contextmanager
def opaque_values() -> Iterator[None]:
    """Within the block stock TileLang lowers one function, whose passes do not see such expressions."""
    values = OpaqueValues()
    extents = rewriting("MergeSharedMemoryAllocations", values.with_extents)
    with rewriting("LegalizeNegativeIndex", values.hidden), extents, rewriting("LowerIntrin", values.shown):
        yield


class OpaqueValues:
    """Such expressions of a function during one lowering."""

    def __init__(self) -> None:
        self._values: list[_Value] = []

    def hidden(self, func: tirx.PrimFunc) -> tirx.PrimFunc:
        """The function with calls in place of such expressions."""
        varying, analyzer = _varying(func.body), analyzer_of(loop_ranges(func.body))

        def leave(node: Any) -> Any:
            if isinstance(node, tirx.For):
                is_long = _is_trip_count(node) and not varying & variables(node.extent)
                return relooped(node, extent=self._opaque(_EXTENT, node.extent, analyzer)) if is_long else None
            if str(node.var.dtype) != _TYPE or node.var in varying:
                return None
            if not contains(node.value, _is_conversion):
                analyzer.bind(node.var, node.value)
                return None
            return at(tirx.Bind(node.var, self._opaque(_NAME, node.value, analyzer)), node)

        body = stmt_functor.ir_transform(func.body, None, leave, ["tirx.Bind", "tirx.For"])
        return func.with_body(body) if self._values else func

    def with_extents(self, func: tirx.PrimFunc) -> tirx.PrimFunc:
        """The function with its trip counts again."""
        return self._shown(func, _EXTENT)

    def shown(self, func: tirx.PrimFunc) -> tirx.PrimFunc:
        """The function with its named values again."""
        return self._shown(func, _NAME)

    def _shown(self, func: tirx.PrimFunc, prefix: str) -> tirx.PrimFunc:
        def enter(node: Any) -> Any:
            found = self._found(node, prefix)
            return None if found is None else found[0].of([shown(x) for x in found[1]])

        def shown(expr: Any) -> Any:
            return within(tirx.Evaluate(expr)).value

        def within(stmt: tirx.Stmt) -> Any:
            return stmt_functor.ir_transform(stmt, enter, None, ["tirx.Call", "tirx.Max", "tirx.Min"])

        return func.with_body(within(func.body)) if self._values else func

    def _opaque(self, prefix: str, expr: tirx.PrimExpr, analyzer: Analyzer) -> tirx.PrimExpr:
        """A call that stands for an expression from now on, between its bounds."""
        bound = analyzer.const_int_bound(expr)
        given = tuple(sorted(variables(expr), key=lambda var: str(var.name)))
        value = _Value(given, expr, max(bound.min_value, _LEAST), min(bound.max_value, _MOST))
        number = len(self._values)
        self._values.append(value)
        call = tirx.call_pure_extern(_TYPE, f"{prefix}{number}", *value.variables)
        above = call if value.least == _LEAST else tirx.Max(call, tirx.IntImm(_TYPE, value.least))
        return above if value.most == _MOST else tirx.Min(above, tirx.IntImm(_TYPE, value.most))

    def _found(self, node: Any, prefix: str) -> tuple[_Value, Sequence[Any]] | None:
        """The value, and its arguments, that a call stands for, or its bounds around a call; None for other nodes."""
        if isinstance(node, tirx.Max | tirx.Min):
            found, limit = self._found(node.a, prefix), constant(node.b)
            if found is None or limit is None:
                return None
            holds = limit <= found[0].least if isinstance(node, tirx.Max) else limit >= found[0].most
            return found if holds else None
        if not isinstance(node, tirx.Call) or op_name(node) != _CALL:
            return None
        name = str(node.args[0].value)
        return (self._values[int(name.removeprefix(prefix))], node.args[1:]) if name.startswith(prefix) else None


def _typed(given: Any, var: tirx.Var) -> Any:
    """An argument in the type of its variable: passes widen the indices of large tensors."""
    if given.dtype == var.dtype:
        return given
    inner = given.value if isinstance(given, tirx.Cast) else given
    return inner if inner.dtype == var.dtype else tirx.Cast(str(var.dtype), given)


def _varying(body: tirx.Stmt) -> set[tirx.Var]:
    """Variables that differ between threads or elements of a tile, and those whose value is not plain arithmetic."""
    found: set[tirx.Var] = set()

    def visit(node: Any) -> None:
        if isinstance(node, tirx.For) and node.kind != tirx.ForKind.SERIAL:
            found.add(node.loop_var)
        elif isinstance(node, tirx.AttrStmt) and node.attr_key == "thread_extent":
            found.update([node.node.var] if str(node.node.thread_tag).startswith("threadIdx") else ())
        elif isinstance(node, tirx.Bind) and (found & variables(node.value) or contains(node.value, _is_other)):
            found.add(node.var)

    walk(body, visit)
    return found


def _is_conversion(node: Any) -> bool:
    """Whether a node converts a number in floating point to an integer."""
    return isinstance(node, tirx.Cast) and str(node.value.dtype).startswith("float") and str(node.dtype) == _TYPE


def _is_trip_count(loop: tirx.For) -> bool:
    """Whether a block's number of tiles bounds a loop without stages: truncated quotients of what may be negative."""
    return (
        loop.kind == tirx.ForKind.SERIAL
        and "num_stages" not in loop.annotations
        and str(loop.extent.dtype) == _TYPE
        and contains(loop.extent, lambda node: isinstance(node, tirx.Div | tirx.Mod))
    )


def _is_other(node: Any) -> bool:
    if isinstance(node, tirx.Call):
        return op_name(node) not in _BITS
    return isinstance(node, tirx.BufferLoad | tirx.Let)
