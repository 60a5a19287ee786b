# SPDX-License-Identifier: MIT
"""The rules that stock TileLang checks of a function before it lowers it, and the statement that breaks one."""

from __future__ import annotations

import re

from tilelang.engine.semantic_check import PreLowerSemanticCheck
from tvm import IRModule, tirx
from tvm.tirx.stmt_functor import post_order_visit

__all__ = ["broken_rule"]

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


def _against(func: tirx.PrimFunc) -> str | None:
    try:
        PreLowerSemanticCheck(IRModule({"main": func}))
    except ValueError as error:
        said = str(error).rpartition(_MARK)[2].splitlines()[0]
        return _OPERATION.sub(r"\1", said)
    return None
