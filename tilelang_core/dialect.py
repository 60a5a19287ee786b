# SPDX-License-Identifier: MIT
"""Hooks into TileLang's front end. They change nothing for programs that use none of our constructs.

TileLang rewrites a kernel's Python source with `DSLMutator`, which `mutate` looks up as a module global: one
assignment covers prim_func, macro, lazy and eager jit. Ours does two things more:

- `with Scope(...) as a, b:` binds both names, like `as (a, b)` (Python itself reads `b` as a second context manager);
  only for functions that carry `SCOPE_ATTR`, whose value is how many names they bind. The names show in the IR, and
  using one where its region has ended is TileLang's usual error.
- statements that TileLang's own macros emit (`T.reduce_sum` and others) keep the source line of the user's call.

Functions that make programs run many times, for other sizes and machines, and TileLang rewrites the source each time.
The rewrite of the same lines is cached: its only other inputs are the few names that are evaluated.
"""

from __future__ import annotations

import ast
import copy
import linecache
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from tilelang.language.eager import ast as eager_ast

from tilelang_core import upstream_errors
from tilelang_core.lru import LruCache

SCOPE_ATTR = "__tilelang_core_scope__"

_StockMutator = eager_ast.DSLMutator


@dataclass
class _Rewritten:
    """A function's source as it was rewritten.

    Attributes:
        tree: the rewritten source.
        evaluated: the expressions that were evaluated meanwhile, with their values.
        hints: types of parameters that appear in the body.
    """

    tree: ast.Module
    evaluated: list[tuple[ast.expr, Any]]
    hints: dict[str, Any]


_rewritten: LruCache[Hashable, _Rewritten] = LruCache(64)
"""The functions that were rewritten last, by their lines and the names that they close over."""


class Mutator(_StockMutator):
    """TileLang's source rewriter with the additions above."""

    def __init__(self, nonlocals: dict[str, Any], *given: Any):
        super().__init__(nonlocals, *given)
        self._evaluated: list[tuple[ast.expr, Any]] = []

    def visit_Module(self, node: ast.Module):  # noqa: N802 - ast.NodeTransformer's naming
        lines = _lines(self.filename, node)
        known = _rewritten.get(key := (self.filename, *self.nonlocals, lines))
        if known is None or any(super(Mutator, self)._try_eval(e) is not value for e, value in known.evaluated):
            known = _Rewritten(self.generic_visit(node), self._evaluated, self.extra_type_hints)
            if lines[1]:
                _rewritten[key] = known
        self.extra_type_hints = dict(known.hints)
        return known.tree

    def _try_eval(self, node: ast.expr) -> Any:
        before = copy.deepcopy(node)  # it is rewritten in place
        self._evaluated.append((before, super()._try_eval(node)))
        return self._evaluated[-1][1]

    def visit_With(self, node: ast.With):  # noqa: N802
        node.items = self._merge_targets(node.items)
        targets = [item.optional_vars for item in node.items if item.optional_vars and self._values(item) > 1]
        rewritten = super().visit_With(node)
        # TileLang tracks where a name is bound for assignments and loops only.
        node.body[:0] = [_bound(name) for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
        return rewritten

    def _merge_targets(self, items: list[ast.withitem]) -> list[ast.withitem]:
        merged: list[ast.withitem] = []
        missing = 0
        for item in items:
            if missing and _is_bare_name(item):
                name, target = item.context_expr, merged[-1].optional_vars
                names = [*(target.elts if isinstance(target, ast.Tuple) else [target]), _stored(name)]
                merged[-1].optional_vars = ast.copy_location(ast.Tuple(names, ast.Store()), target)
                missing -= 1
            else:
                merged.append(item)
                missing = self._values(item) - 1 if isinstance(item.optional_vars, ast.Name) else 0
        return merged

    def _values(self, item: ast.withitem) -> int:
        """Number of names that the context manager of an item binds."""
        call = item.context_expr
        if not isinstance(call, ast.Call) or not _is_path(call.func):
            return 1
        return getattr(self._try_eval(call.func), SCOPE_ATTR, 1)

    def visit_FunctionDef(self, node: ast.FunctionDef):  # noqa: N802
        result = super().visit_FunctionDef(node)
        if self.filename.startswith(upstream_errors.TILELANG_ROOT):
            result = _DropFileLines().visit(result)
        return result


class _DropFileLines(ast.NodeTransformer):
    """Removes `__tb.set_fileline(...)` so that the caller's line stays current."""

    def visit_Expr(self, node: ast.Expr):  # noqa: N802
        call = node.value
        is_fileline = isinstance(call, ast.Call) and getattr(call.func, "attr", None) == "set_fileline"
        return ast.copy_location(ast.Pass(), node) if is_fileline else node


def _lines(file: str, module: ast.Module) -> tuple[int, str]:
    """Position of a module's function in a file, and its lines; none if they cannot be read."""
    (function,) = module.body
    first = min(node.lineno for node in (function, *function.decorator_list))
    return first, "".join(linecache.getlines(file)[first - 1 : function.end_lineno])


def _is_path(node: ast.expr) -> bool:
    """Whether an expression is `name` or `name.attribute...`: safe to evaluate while the source is rewritten."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _is_bare_name(item: ast.withitem) -> bool:
    return item.optional_vars is None and isinstance(item.context_expr, ast.Name)


def _bound(name: ast.Name) -> ast.stmt:
    source = f"{name.id} = __tb.bind({name.id!r}, {name.id}, loop_target=True)"
    statement = ast.parse(source).body[0]
    for node in ast.walk(statement):
        ast.copy_location(node, name)
    return statement


def _stored(name: ast.Name) -> ast.Name:
    return ast.copy_location(ast.Name(name.id, ast.Store()), name)


def names_bound_at(file: str, line: int) -> list[str]:
    """The names that a `with` statement in a line of a file binds, for messages; none if there is no such statement."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return []
    found = [node for node in ast.walk(tree) if isinstance(node, ast.With)]
    here = [node for node in found if node.lineno <= line <= node.body[0].lineno]
    targets = [item.optional_vars for node in here[-1:] for item in node.items if item.optional_vars]
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def install() -> None:
    """Install the hooks; a second call does nothing."""
    if eager_ast.DSLMutator is Mutator:
        return
    eager_ast.DSLMutator = Mutator
    upstream_errors.install()
