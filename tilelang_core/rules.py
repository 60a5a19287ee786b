# SPDX-License-Identifier: MIT
"""What stock TileLang does with a function before it lowers it: rules that it checks, indices from the end."""

from __future__ import annotations

import re

import tilelang.transform
from tilelang.engine.semantic_check import PreLowerSemanticCheck
from tvm import IRModule, tirx
from tvm.ir import structural_equal
from tvm.tirx.stmt_functor import post_order_visit

from tilelang_core.rewrite import at

__all__ = ["broken_rule", "counted_from_the_begin"]

_MARK = "[Tilelang Semantic Check] "
_OPERATION = re.compile(r'"ir\.Op\(.*?name="([^"]*)".*\)"')
"""How its message prints an operation."""


def broken_rule(func: tirx.PrimFunc) -> tuple[str, tirx.Stmt] | None:
    """What TileLang says against a function, and the smallest loop that it says it of; None if nothing."""
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
    counted = tilelang.transform.LegalizeNegativeIndex()(IRModule({"main": func}))["main"]
    if structural_equal(func, counted):
        return func
    for old, new in zip(_statements(func), _statements(counted), strict=True):
        at(new, like=old)
    return counted


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
