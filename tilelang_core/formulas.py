# SPDX-License-Identifier: MIT
"""Integer expressions as Python functions, made once: each call evaluates the same ones, with other numbers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tilelang_core import ir, tl
from tilelang_core.scalars import IfThenElse

Function = Callable[[Mapping[ir.Var, float]], Any]

ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ir.Add: operator.add,
    ir.Sub: operator.sub,
    ir.Mul: operator.mul,
    ir.FloorDiv: operator.floordiv,
    ir.FloorMod: operator.mod,
    ir.EQ: operator.eq,
    ir.NE: operator.ne,
    ir.LT: operator.lt,
    ir.LE: operator.le,
    ir.GT: operator.gt,
    ir.GE: operator.ge,
}
"""Functions of two-operand operations, on numbers and on arrays of numbers."""

_OF_NUMBERS: dict[type, Callable[[Any, Any], Any]] = {**ARITHMETIC, ir.Min: min, ir.Max: max}

KEPT = 4096
"""Formulas that are kept."""


class _Unsupported(Exception):
    """An expression that has no function here."""


@dataclass(frozen=True)
class Formula:
    """A compiled expression and its constant properties.

    Attributes:
        expr: the expression.
        variables: that it reads.
        divides: whether there is a quotient in it, whose rest is lost.
        function: its value, None if there is more in it than whole numbers. Raises ZeroDivisionError where the
            expression divides by zero.
        constant: its value, if it reads no variables and has one.
    """

    expr: ir.PrimExpr | int
    variables: frozenset[ir.Var]
    divides: bool
    function: Function | None

    def __str__(self) -> str:
        return str(self.expr)

    @cached_property
    def constant(self) -> int | None:
        return None if self.variables else self._value({})

    def value(self, known: Mapping[ir.Var, float]) -> int | None:
        """Its value; None if it has no function, reads variables that are not known, or divides by zero."""
        return self._value(known) if self.constant is None else self.constant

    def _value(self, known: Mapping[ir.Var, float]) -> int | None:
        if self.function is None or not self.variables <= known.keys():
            return None
        try:
            return int(self.function(known))
        except ZeroDivisionError:
            return None


@lru_cache(KEPT)
def formula(expr: ir.PrimExpr | int) -> Formula:
    try:
        function = _function(expr)
    except _Unsupported:
        function = None
    divides = not isinstance(expr, int) and ir.contains(expr, lambda node: isinstance(node, ir.FloorDiv))
    return Formula(expr, frozenset(map(one, ir.variables(expr))), divides, function)


@lru_cache(KEPT)
def one(var: ir.Var) -> ir.Var:
    """The canonical Python object of a variable: comparing several would be slow at every look-up."""
    return var


def _function(expr: Any) -> Function:
    if isinstance(expr, int | ir.IntImm):
        number = int(expr)
        return lambda known: number
    if not isinstance(expr, ir.PrimExpr) or not str(expr.dtype).startswith(("int", "uint", "bool")):
        raise _Unsupported
    if isinstance(expr, ir.Var):
        var = one(expr)
        return lambda known: known[var]
    if isinstance(expr, ir.Cast) and str(expr.dtype) != "bool":
        return _function(expr.value)
    if isinstance(expr, ir.Not):
        given = _function(expr.a)
        return lambda known: not given(known)
    if isinstance(expr, ir.And | ir.Or):
        left, right = _function(expr.a), _function(expr.b)
        if isinstance(expr, ir.And):
            return lambda known: left(known) and right(known)
        return lambda known: left(known) or right(known)
    if ir.op_name(expr) == tl.IF_THEN_ELSE:
        choice = IfThenElse.of(expr)
        condition, then, otherwise = map(_function, (choice.condition, choice.then, choice.otherwise))
        return lambda known: then(known) if condition(known) else otherwise(known)
    return _of_two(expr)


def _of_two(expr: Any) -> Function:
    rule = _OF_NUMBERS.get(type(expr))
    if rule is None:
        raise _Unsupported
    left, right = _function(expr.a), _function(expr.b)
    return lambda known: rule(left(known), right(known))
