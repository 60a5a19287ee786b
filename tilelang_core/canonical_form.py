# SPDX-License-Identifier: MIT
"""Expressions of which TVM's canonical form may have another value.

CanonicalSimplify, as TileLang 0.1.15 has it, takes negative factors out of floor divisions: `(8 - i % 4) % 8` becomes
`-(i % 4)`. That goes wrong where a quotient or remainder is divided again and one of the two dividends has a negative
term. Such expressions are simplified by TVM's rewrite rules alone.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.arith import Analyzer

__all__ = ["may_change", "simplified"]

_DIVISIONS = tirx.FloorDiv, tirx.FloorMod
_OTHERS = tirx.Add, tirx.Sub, tirx.Mul, tirx.Min, tirx.Max


def simplified(expr: tirx.PrimExpr, analyzer: Analyzer) -> tirx.PrimExpr:
    """An expression, simplified with what the analyzer knows of its variables; it has the same value."""
    return analyzer.rewrite_simplify(expr) if may_change(expr) else analyzer.simplify(expr)


def may_change(expr: tirx.PrimExpr) -> bool:
    """Whether the canonical form of an expression may have another value."""
    found = False

    def visit(node: Any) -> bool:
        nonlocal found
        found = found or isinstance(node, _DIVISIONS) and _divides_again(node.a, 1)
        return not found

    tirx.stmt_functor.pre_order_visit(expr, visit)
    return found


def _divides_again(dividend: Any, sign: int) -> bool:
    """Whether there is a quotient or remainder in a dividend, and a negative term in either's dividend."""
    if isinstance(dividend, _DIVISIONS):
        return sign < 0 or _falls(dividend.a)
    if isinstance(dividend, tirx.Mul) and isinstance(dividend.b, tirx.IntImm):
        return _divides_again(dividend.a, sign if dividend.b.value >= 0 else -sign)
    if isinstance(dividend, tirx.Sub):
        return _divides_again(dividend.a, sign) or _divides_again(dividend.b, -sign)
    if isinstance(dividend, _OTHERS):
        return _divides_again(dividend.a, sign) or _divides_again(dividend.b, sign)
    return False


def _falls(expr: Any) -> bool:
    """Whether something is taken away in an expression."""
    if isinstance(expr, tirx.Sub):
        return not isinstance(expr.b, tirx.IntImm) or _falls(expr.a)
    if isinstance(expr, tirx.IntImm):
        return expr.value < 0
    return isinstance(expr, _OTHERS + _DIVISIONS) and (_falls(expr.a) or _falls(expr.b))
