# SPDX-License-Identifier: MIT
"""Quotients and remainders of decreasing numbers in loops, in a form that stock TileLang simplifies correctly.

TVM's simplifiers, as TileLang 0.1.15 has them, make another value of `(base - i) % n`, `(base - i) // n` as an index
with one loop or thread variable in it (IterMapSimplify, in FlattenBuffer, divides the base by -1 and drops what that
leaves), and of `-(i // m) % n` anywhere. Written with a dividend that rises, as here, they keep their values.
`(rank - turn) % ranks`, the order in which ranks go round, is such a number.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from tilelang_core.ir import constant, contains, simplify, substitute, variables, walk
from tilelang_core.rewrite import at, rewrite

_DIVISIONS = tirx.FloorMod, tirx.FloorDiv
_ARITHMETIC = tirx.Add, tirx.Sub, tirx.Mul, *_DIVISIONS, tirx.Min, tirx.Max


def with_rising_dividends(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if it has such numbers one that computes the same without them."""
    loops, names = loops_and_names(func.body)
    changed = False

    def risen(value: tirx.PrimExpr) -> tirx.PrimExpr:
        nonlocal changed
        if not isinstance(value, _ARITHMETIC):
            return value
        a, b = risen(value.a), risen(value.b)
        divisor = constant(b) if isinstance(value, _DIVISIONS) else None
        if divisor is not None and divisor > 0 and _falls(spelled_out(a, names), divisor, loops):
            changed = True
            before = -1 * a - 1  # -y % n = n - 1 - (y - 1) % n, and -y // n = -1 - (y - 1) // n
            if isinstance(value, tirx.FloorMod):
                return divisor - 1 - tirx.floormod(before, b)
            return -1 - tirx.floordiv(before, b)
        return value if a.same_as(value.a) and b.same_as(value.b) else type(value)(a, b)

    def leave(node: Any) -> Any:
        if isinstance(node, tirx.BufferLoad):
            return tirx.BufferLoad(node.buffer, [risen(index) for index in node.indices], node.predicate)
        if isinstance(node, tirx.BufferStore):
            indices = [risen(index) for index in node.indices]
            return at(tirx.BufferStore(node.buffer, node.value, indices, node.predicate), like=node)
        if isinstance(node, tirx.Bind):  # it may be an index somewhere
            return at(tirx.Bind(node.var, risen(node.value)), like=node)
        if isinstance(node, _DIVISIONS) and contains(node.a, lambda inner: isinstance(inner, _DIVISIONS)):
            return risen(node)
        return None

    body = rewrite(func.body, leave=leave)
    return func.with_body(body) if changed else func


def loops_and_names(body: tirx.Stmt) -> tuple[set[tirx.Var], dict[tirx.Var, tirx.PrimExpr]]:
    """Variables of loops and threads, and names of numbers, with their values, which TileLang puts in their places."""
    loops: set[tirx.Var] = set()
    names: dict[tirx.Var, tirx.PrimExpr] = {}

    def visit(node: Any) -> None:
        if isinstance(node, tirx.For):
            loops.add(node.loop_var)
        elif isinstance(node, tirx.AttrStmt) and isinstance(node.node, tirx.IterVar):
            loops.add(node.node.var)
        elif isinstance(node, tirx.Bind) and isinstance(node.value, (*_ARITHMETIC, tirx.Var)):
            names[node.var] = spelled_out(node.value, names)

    walk(body, visit)
    return loops, names


def spelled_out(value: tirx.PrimExpr, names: dict[tirx.Var, tirx.PrimExpr]) -> tirx.PrimExpr:
    """A number with names of other expressions replaced by these."""
    return substitute(value, names) if variables(value) & names.keys() else value


def _falls(dividend: tirx.PrimExpr, divisor: int, loops: set[tirx.Var]) -> bool:
    """Whether every term that goes with a loop is taken away; of a dividend without loops, every term.

    Multiples of the divisor do not count: they come out of the quotient, and vanish from the remainder.
    """
    of_loops: set[bool] = set()
    of_others: set[bool] = set()

    def add(value: tirx.PrimExpr, times: int) -> None:
        if isinstance(value, tirx.Add | tirx.Sub):
            add(value.a, times)
            add(value.b, times if isinstance(value, tirx.Add) else -times)
        elif isinstance(value, tirx.Mul) and (factor := constant(value.b)) is not None:
            add(value.a, times * factor)
        elif times % divisor and (found := variables(value)):
            (of_loops if found & loops else of_others).add(times > 0)

    add(simplify(dividend, {}), 1)
    return (of_loops or of_others) == {False}
