# SPDX-License-Identifier: MIT
"""Rules of stock TileLang for functions before lowering: the checks, and indices from the end."""

from __future__ import annotations

import re
from typing import Any

import tilelang.transform
from tilelang.engine.semantic_check import PreLowerSemanticCheck
from tvm import IRModule, tirx
from tvm.ir import structural_equal
from tvm.tirx.stmt_functor import post_order_visit

from tilelang_core.rewrite import at

__all__ = ["broken_rule", "counted_from_the_begin"]

_MARK = "[Tilelang Semantic Check] "
_OPERATION = re.compile(r'"ir\.Op\(.*?name="([^"]*)".*\)"')
"""The form in which its message prints an operation."""


def broken_rule(func: tirx.PrimFunc) -> tuple[str, tirx.Stmt] | None:
    """TileLang's objection to a function, and the smallest loop that it applies to; None if nothing."""
    said = _against(func)
    if said is None:
        return None
    loops: list[tirx.Stmt] = []
    post_order_visit(func.body, lambda node: loops.append(node) if isinstance(node, tirx.For) else None)
    for loop in loops:
        of_loop = _against(func.with_body(loop))
        if of_loop is not None:
            return of_loop, loop
    return said, func.body


def counted_from_the_begin(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with indices that are always negative counted from the end, as TileLang has them."""
    if not _may_count_from_the_end(func):
        return func  # TileLang's pass can take a second to try to prove that they are
    counted = tilelang.transform.LegalizeNegativeIndex()(IRModule({"main": func}))["main"]
    if structural_equal(func, counted):
        return func
    for old, new in zip(_statements(func), _statements(counted), strict=True):
        at(new, like=old)
    return counted


def _may_count_from_the_end(func: tirx.PrimFunc) -> bool:
    """Whether an index is made of something that can be below zero."""
    indices: list[tirx.PrimExpr] = []
    values: dict[tirx.Var, tirx.PrimExpr] = {}

    def collect(node: Any) -> None:
        if isinstance(node, tirx.BufferLoad | tirx.BufferStore):
            indices.extend(node.indices)
        elif isinstance(node, tirx.For):
            values[node.loop_var] = node.min
        elif isinstance(node, tirx.Bind | tirx.Let):
            values[node.var] = node.value

    post_order_visit(func.body, collect)
    return any(_may_be_negative(index, values) for index in indices)


def _may_be_negative(value: tirx.PrimExpr, values: dict[tirx.Var, tirx.PrimExpr]) -> bool:
    """False if no negative number goes into it; values that a program reads or is given may be negative.

    Args:
        values: of variables; each that was looked at is taken out.
    """
    if isinstance(value, tirx.IntImm):
        return value.value < 0
    if isinstance(value, tirx.Var):
        known = values.pop(value, None)
        return known is not None and _may_be_negative(known, values)
    if isinstance(value, tirx.FloorMod):
        return _may_be_negative(value.b, values)
    if isinstance(value, tirx.Add | tirx.Mul | tirx.FloorDiv | tirx.Min | tirx.Max):
        return _may_be_negative(value.a, values) or _may_be_negative(value.b, values)
    if isinstance(value, tirx.Cast):
        return _may_be_negative(value.value, values)
    if isinstance(value, tirx.Call):
        return any(_may_be_negative(arg, values) for arg in value.args)
    return not isinstance(value, tirx.BufferLoad | tirx.StringImm)


def _statements(func: tirx.PrimFunc) -> list[tirx.Stmt]:
    found: list[tirx.Stmt] = []
    post_order_visit(func.body, lambda node: found.append(node) if isinstance(node, tirx.Stmt) else None)
    return found


def _against(func: tirx.PrimFunc) -> str | None:
    try:
        PreLowerSemanticCheck(IRModule({"main": func}))
    except ValueError as error:
        said = str(error).rpartition(_MARK)[2].splitlines()[0]
        return _OPERATION.sub(r"\1", said)
    return None
