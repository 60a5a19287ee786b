# SPDX-License-Identifier: MIT
"""Quotients and remainders of decreasing numbers, in a form that stock TileLang does not simplify to another value.

TVM's simplifiers, as TileLang 0.1.15 has them, get two kinds wrong:

- `(base - i) % n` and `(base - i) // n` as an index with one loop or thread variable in it: IterMapSimplify, in
  FlattenBuffer, divides the base by -1 and drops what that leaves. `(rank - turn) % ranks`, the order in which ranks
  go round, is such a number.
- `-(i // m) % n` and `-(i % m) // n` anywhere, and each sum that becomes one: of `(8 - i // m) % n` where n divides 8,
  or of a parallel loop's variable, which becomes a quotient of the thread's index. The canonical form takes the factor
  -1 out of the division, which is right for truncated division alone.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

from tilelang_core.ir import constant, contains, simplify, substitute, variables, walk
from tilelang_core.loop_ranges import analyzer_of, loop_ranges
from tilelang_core.opaque_divisions import opaque_quotient, opaque_remainder, shift
from tilelang_core.rewrite import at, rewrite

_DIVISIONS = tirx.FloorMod, tirx.FloorDiv
_ARITHMETIC = tirx.Add, tirx.Sub, tirx.Mul, *_DIVISIONS, tirx.Min, tirx.Max


def with_kept_divisions(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if it has such numbers one with these in an opaque form."""
    loops, names = loops_and_names(func.body)
    analyzer = analyzer_of(loop_ranges(func.body))
    changed = False

    def kept(value: tirx.PrimExpr) -> tirx.PrimExpr:
        nonlocal changed
        if not isinstance(value, _ARITHMETIC):
            return value
        a, b = kept(value.a), kept(value.b)
        divisor = constant(b) if isinstance(value, _DIVISIONS) else None
        if divisor is not None and divisor > 0 and _falls(dividend := spelled_out(value.a, names), divisor, loops):
            changed = True
            made = opaque_remainder if isinstance(value, tirx.FloorMod) else opaque_quotient
            return made(a, divisor, shift(dividend, divisor, analyzer))
        return value if a.same_as(value.a) and b.same_as(value.b) else type(value)(a, b)

    def leave(node: Any) -> Any:
        if isinstance(node, tirx.BufferLoad):
            return tirx.BufferLoad(node.buffer, [kept(index) for index in node.indices], node.predicate)
        if isinstance(node, tirx.BufferStore):
            indices = [kept(index) for index in node.indices]
            return at(tirx.BufferStore(node.buffer, node.value, indices, node.predicate), like=node)
        if isinstance(node, tirx.Bind):  # it may be an index somewhere
            return at(tirx.Bind(node.var, kept(node.value)), like=node)
        if isinstance(node, _DIVISIONS) and contains(node.a, _is_division):
            return kept(node)
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
        elif isinstance(node, tirx.Bind) and isinstance(node.value, (*_ARITHMETIC, tirx.Var, tirx.IntImm)):
            names[node.var] = spelled_out(node.value, names)

    walk(body, visit)
    return loops, names


def spelled_out(value: tirx.PrimExpr, names: dict[tirx.Var, tirx.PrimExpr]) -> tirx.PrimExpr:
    """A number with names of other expressions replaced by these."""
    return substitute(value, names) if variables(value) & names.keys() else value


def _falls(dividend: tirx.PrimExpr, divisor: int, loops: set[tirx.Var]) -> bool:
    """Whether a term that goes with a loop, or a quotient or remainder, is taken away; or every term is.

    Multiples of the divisor do not count: they come out of the quotient, and vanish from the remainder.
    """
    signs: set[bool] = set()
    falls = False

    def add(value: tirx.PrimExpr, times: int) -> None:
        nonlocal falls
        if isinstance(value, tirx.Add | tirx.Sub):
            add(value.a, times)
            add(value.b, times if isinstance(value, tirx.Add) else -times)
        elif isinstance(value, tirx.Mul) and (factor := constant(value.b)) is not None:
            add(value.a, times * factor)
        elif times % divisor and (found := variables(value)):
            signs.add(times > 0)
            falls |= times < 0 and (bool(found & loops) or contains(value, _is_division))

    add(simplify(dividend, {}), 1)
    return falls or signs == {False}


def _is_division(node: Any) -> bool:
    return isinstance(node, _DIVISIONS)
