# SPDX-License-Identifier: MIT
"""Hooks into TileLang's front end. They change nothing for programs that use none of our constructs.

TileLang rewrites a kernel's Python source with `DSLMutator`, which `mutate` looks up as a module global: one
assignment covers prim_func, macro, lazy and eager jit. Ours does two things more:

- `with Scope(...) as a, b:` binds both names, like `as (a, b)` (Python itself reads `b` as a second context manager);
  only for context managers that carry `SCOPE_ATTR`.
- statements that TileLang's own macros emit (`T.reduce_sum` and others) keep the source line of the user's call.

A builder failure is logged by TileLang with the whole rewritten source; for errors that already name the user's line
(`QUIET_ATTR` on the exception) that record is dropped.
"""

from __future__ import annotations

import ast
import logging
import sys
from pathlib import Path

import tilelang
from tilelang.language.eager import ast as eager_ast

SCOPE_ATTR = "__tilelang_core_scope__"
QUIET_ATTR = "__tilelang_core_located__"

_TILELANG_ROOT = str(Path(tilelang.__file__).parent)
_StockMutator = eager_ast.DSLMutator


class Mutator(_StockMutator):
    """TileLang's source rewriter with the two additions above."""

    def visit_With(self, node: ast.With):  # noqa: N802 - ast.NodeTransformer's naming
        node.items = self._merge_targets(node.items)
        return super().visit_With(node)

    def _merge_targets(self, items: list[ast.withitem]) -> list[ast.withitem]:
        merged: list[ast.withitem] = []
        for item in items:
            previous = merged[-1] if merged else None
            if previous is not None and self._is_scope(previous) and _is_bare_name(item):
                name = item.context_expr
                target = ast.copy_location(ast.Name(name.id, ast.Store()), name)
                old = previous.optional_vars
                names = [*old.elts, target] if isinstance(old, ast.Tuple) else [old, target]
                previous.optional_vars = ast.copy_location(ast.Tuple(names, ast.Store()), old)
            else:
                merged.append(item)
        return merged

    def _is_scope(self, item: ast.withitem) -> bool:
        call = item.context_expr
        return (
            isinstance(call, ast.Call)
            and item.optional_vars is not None
            and getattr(self._try_eval(call.func), SCOPE_ATTR, False)
        )

    def visit_FunctionDef(self, node: ast.FunctionDef):  # noqa: N802
        result = super().visit_FunctionDef(node)
        if self.filename.startswith(_TILELANG_ROOT):
            result = _DropFileLines().visit(result)
        return result


class _DropFileLines(ast.NodeTransformer):
    """Removes `__tb.set_fileline(...)` so that the caller's line stays current."""

    def visit_Expr(self, node: ast.Expr):  # noqa: N802
        call = node.value
        is_fileline = isinstance(call, ast.Call) and getattr(call.func, "attr", None) == "set_fileline"
        return ast.copy_location(ast.Pass(), node) if is_fileline else node


def _is_bare_name(item: ast.withitem) -> bool:
    return item.optional_vars is None and isinstance(item.context_expr, ast.Name)


class _DropLocatedErrors(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(sys.exc_info()[1], QUIET_ATTR, False)


def install() -> None:
    """Install the hooks; a second call does nothing."""
    if eager_ast.DSLMutator is Mutator:
        return
    eager_ast.DSLMutator = Mutator
    logging.getLogger("tilelang.language.eager.builder").addFilter(_DropLocatedErrors())
