# SPDX-License-Identifier: MIT
"""A call of a device function at the begin of a kernel, which passes that look for the form of statements do not see.

Before: a function with a mark. After: its threads first call the function that the mark names, with the marked
parameters and a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from tilelang_core.ir import contains
from tilelang_core.rewrite import at, evaluate, extern, rewrite, sequence

_MARK = "tilescale.first_call"
_THREADS = "thread_extent"


def marked(func: tirx.PrimFunc, name: str, parameters: Sequence[int], number: int) -> tirx.PrimFunc:
    """The function with a mark: the device function's name, positions of scalars and tensors, and a number."""
    return func.with_attr(_MARK, [name, list(parameters), number])


def with_first_call(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function itself, or if it has a mark, one with the call."""
    if not func.attrs or _MARK not in func.attrs:
        return func
    name, parameters, number = func.attrs[_MARK]
    variables = [func.params[int(i)] for i in parameters]
    given = [func.buffer_map[var].data if var in func.buffer_map else var for var in variables]
    first = evaluate(extern(str(name), *given, int(number)))

    def enter(node: Any) -> Any:
        if not _binds_threads(node) or contains(node.body, _binds_threads):
            return None
        body = sequence([first, node.body])
        return at(tirx.AttrStmt(node.node, node.attr_key, node.value, body), node)

    return func.with_body(rewrite(func.body, enter=enter))


def _binds_threads(node: Any) -> bool:
    return isinstance(node, tirx.AttrStmt) and str(node.attr_key) == _THREADS
