# SPDX-License-Identifier: MIT
"""Loop-invariant index arithmetic that nvcc leaves inside the loop.

Why: TileLang's Simplify inlines a name into all of its uses. nvcc hoists additions and products again. It does not
hoist the conversion of a quotient in floating point, nor a quotient of integers, out of a branch in a loop: a producer
would compute the coordinates of its tile at each step that it loads. Before: a kernel as the code generator gets it.
After: the same one, in which the largest invariants of a loop have names, bound before the loop.

Applies to functions that lowering composes; plain programs keep the text of stock TileLang.
Declines expressions that read memory, call functions or bind names, and unrolled loops.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.tirx import stmt_functor

from tilelang_core.ir import constant, contains, instances, op_name
from tilelang_core.rewrite import relooped, rewrite, sequence

_ARITHMETIC = (
    tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max, tirx.EQ,
    tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.And, tirx.Or, tirx.Not, tirx.Select, tirx.Cast,
)  # fmt: skip
_INVARIANT = frozenset((*_ARITHMETIC, tirx.IntImm, tirx.FloatImm))
_BITS = "tirx.shift_right", "tirx.shift_left", "tirx.bitwise_and", "tirx.bitwise_or"
_DIVISIONS = tirx.Div, tirx.Mod, tirx.FloorDiv, tirx.FloorMod


def with_hoisted_invariants(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if nvcc would leave such arithmetic in a loop one that computes the same."""
    body = _hoisted(func.body)
    return func if body.same_as(func.body) else func.with_body(body)


def _hoisted(stmt: tirx.Stmt) -> tirx.Stmt:
    """A statement with the invariants of its loops in front of them, those of the outermost loops first."""

    def enter(node: Any) -> Any:
        if not isinstance(node, tirx.For) or node.kind != tirx.ForKind.SERIAL:
            return None
        names: dict[str, tirx.Bind] = {}
        body = _named(node.body, _defined(node), names)
        inner = _hoisted(body)
        if inner.same_as(node.body):
            return node
        return sequence([*names.values(), relooped(node, body=inner)])

    return rewrite(stmt, enter=enter)


def _defined(loop: tirx.For) -> set[tirx.Var]:
    """Variables that have another value in each iteration of a loop."""
    bound = {node.var for node in instances(loop.body, tirx.Bind, tirx.Let)}
    return bound | {inner.loop_var for inner in instances(loop, tirx.For)}


def _named(body: tirx.Stmt, varying: set[tirx.Var], names: dict[str, tirx.Bind]) -> tirx.Stmt:
    """The body of a loop with names in the places of its largest invariants; adds these to `names`, by their text."""

    def enter(node: Any) -> Any:
        if isinstance(node, tirx.Let):
            return node
        if not _is_invariant(node, varying) or not contains(node, _stays):
            return None
        bind = names.setdefault(str(node), tirx.Bind(tirx.Var("invariant", node.dtype), node))
        return bind.var

    return stmt_functor.ir_transform(body, enter, None, [f"tirx.{kind.__name__}" for kind in (*_ARITHMETIC, tirx.Let)])


def _is_invariant(node: Any, varying: set[tirx.Var]) -> bool:
    def varies(inner: Any) -> bool:
        if type(inner) in _INVARIANT:  # isinstance of TVM's abstract classes takes longer than the visit
            return False
        if isinstance(inner, tirx.Var):
            return inner in varying or inner.dtype == "handle"
        if isinstance(inner, tirx.Call):
            return op_name(inner) not in _BITS
        return isinstance(inner, tirx.PrimExpr)

    return not contains(node, varies)


def _stays(node: Any) -> bool:
    """Whether nvcc leaves an expression where it is: it divides by what only a call knows, or converts to integers."""
    if isinstance(node, tirx.Cast):
        return str(node.dtype).startswith("int") and str(node.value.dtype).startswith("float")
    return isinstance(node, _DIVISIONS) and str(node.dtype).startswith("int") and constant(node.b) is None
