# SPDX-License-Identifier: MIT
"""Bounds and divisors of integer expressions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm import tirx
from tvm.arith import Analyzer

from tilelang_core.ir import bits, constant, variables


def at_most(expr: Any, names: Mapping[tirx.Var, tirx.PrimExpr]) -> int | None:
    """An upper bound of an integer expression, given what variables stand for, in program order; None without one."""
    known = constant(expr)
    if known is not None:
        return known
    bound = _with_names(names, expr).const_int_bound(expr).max_value
    return bound if bound < (1 << bits(expr.dtype) - 1) - 1 else None


def divisor(expr: Any, names: Mapping[tirx.Var, tirx.PrimExpr]) -> int:
    """The largest number known to divide an integer expression, given what variables stand for; 0 where that is 0."""
    known = constant(expr)
    if known is not None:
        return abs(known)
    return divisor_by(_with_names(names, expr), expr)


def divisor_by(analyzer: Analyzer, expr: tirx.PrimExpr) -> int:
    """The same, given an analyzer that knows the variables."""
    found = analyzer.modular_set(expr)
    return math.gcd(found.coeff, found.base)


def _with_names(names: Mapping[tirx.Var, tirx.PrimExpr], expr: tirx.PrimExpr) -> Analyzer:
    """An analyzer that knows what the variables of an expression stand for."""
    analyzer, read = Analyzer(), variables(expr)
    for var, value in reversed([*names.items()]):
        read |= variables(value) if var in read else set()
    for var, value in names.items():
        if var in read:
            analyzer.bind(var, value)
    return analyzer
