# SPDX-License-Identifier: MIT
"""A Python function on expressions that asks whether some of them hold: `and`, `or`, `not`, `if`, chained comparisons.

TVM refuses the truth of an expression. Here the function is called once for each path through it, and its results are
selected by the conditions that it asked for. Conditions inside TileLang and TVM keep their meaning.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tvm import tirx
from tvm.ir import structural_equal
from tvm.tirx.expr import EqualOp, ExprOp, NotEqualOp

from tilelang_core import tl

LIMIT = 8
"""Conditions on one path through a function; its power of two bounds the number of calls."""

_ASKED = (ExprOp, EqualOp, NotEqualOp)


class TooManyCasesError(ValueError):
    """A function that asks for more conditions than that."""


def by_cases(function: Callable[[], tuple[Any, ...]], known: tuple[tuple[Any, bool], ...] = ()) -> tuple[Any, ...]:
    """The results of a function, chosen by the conditions that it asks for beyond the known ones."""
    with _answers(known) as asked:
        results = function()
    if not asked:
        return results
    if len(known) == LIMIT:
        raise TooManyCasesError(f"more than {LIMIT} conditions")
    condition = asked[0]
    then, otherwise = (by_cases(function, (*known, (condition, holds))) for holds in (True, False))
    return tuple(_chosen(condition, *pair) for pair in zip(then, otherwise, strict=True))


def _chosen(condition: Any, then: Any, otherwise: Any) -> Any:
    return then if structural_equal(then, otherwise) else tirx.if_then_else(condition, then, otherwise)


@contextlib.contextmanager
def _answers(known: tuple[tuple[Any, bool], ...]) -> Iterator[list[Any]]:
    """Answer conditions of a function; unknown ones are listed, and assumed to hold."""
    asked: list[Any] = []

    def answer(expr: Any) -> bool:
        expr = expr.asobject() if hasattr(expr, "asobject") else expr
        for condition, holds in known:
            if structural_equal(condition, expr):
                return holds
        asked.append(expr)
        return True

    before = {kind: kind.__bool__ for kind in _ASKED}

    def hook(kind: type) -> Callable[[Any], bool]:
        def truth(expr: Any) -> bool:
            module = str(sys._getframe(1).f_globals.get("__name__"))
            is_users = module.partition(".")[0] not in ("tvm", "tvm_ffi", "tilelang", tl.__package__)
            return answer(expr) if is_users else before[kind](expr)

        return truth

    try:
        for kind in _ASKED:
            kind.__bool__ = hook(kind)
        yield asked
    finally:
        for kind, truth in before.items():
            kind.__bool__ = truth
