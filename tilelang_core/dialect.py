# SPDX-License-Identifier: MIT
"""Hooks into TileLang's front end. They change nothing for programs that use none of our constructs.

TileLang's `mutate` rewrites a kernel's Python source with `DSLMutator`. The builder looks it up as a module global: one
assignment covers prim_func, macro, lazy and eager jit. Our rewriter does two things more:

- `with Scope(...) as a, b:` binds both names, like `as (a, b)` (Python itself reads `b` as a second context manager);
  only for functions that carry `SCOPE_ATTR`, whose value is how many names they bind. The names show in the IR, and
  using one where its region has ended is TileLang's usual error.
- statements that TileLang's own macros emit (`T.reduce_sum` and others) keep the source line of the user's call.

Functions that make programs run many times, for other sizes and machines, and TileLang parses, rewrites and compiles
the source each time. The code of the same lines is cached: its only other inputs are the few names that are evaluated.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from tilelang.language.eager import ast as eager_ast
from tilelang.language.eager import builder, utils

from tilelang_core import upstream_errors
from tilelang_core.lru import LruCache

SCOPE_ATTR = "__tilelang_core_scope__"

_StockMutator = eager_ast.DSLMutator


@dataclass
class _Rewritten:
    """A function's source as it was rewritten.

    Attributes:
        code: defines `make_closure`, which makes the function from the names that it closes over.
        source: the rewritten lines.
        evaluated: the expressions that were evaluated meanwhile, as functions of those names, with their values.
        hints: types of parameters that appear in the body.
    """

    code: CodeType
    source: str
    evaluated: list[tuple[CodeType, Any]]
    hints: dict[str, Any]


_rewritten: LruCache[Hashable, _Rewritten] = LruCache(256)
"""The functions that were rewritten last, by their lines and the names that they close over."""


def mutate(func: Callable[..., Any]) -> eager_ast.IRGenerator[..., Any]:
    """The function that builds the IR of a function of the user's."""
    nonlocals = utils.get_func_nonlocals(func)
    file = str(Path(inspect.getsourcefile(func) or inspect.getfile(func)).absolute())
    lines = _lines(file, func.__code__)
    known = _rewritten.get(key := (file, *nonlocals, func.__code__.co_firstlineno, lines))
    if known is None or any(_value(e, nonlocals, func.__globals__) is not value for e, value in known.evaluated):
        known = Mutator(nonlocals, func.__globals__, file).rewritten(utils.get_ast(func))
        if lines:
            _rewritten[key] = known
    made: dict[str, Any] = {}
    exec(known.code, func.__globals__, made)
    return eager_ast.IRGenerator(made["make_closure"](**nonlocals), known.source, dict(known.hints))


def _lines(file: str, code: CodeType) -> str:
    """The lines of a function in a file, empty if they cannot be read."""
    linecache.checkcache(file)
    last = max(line for each in _nested(code) for *_, line in each.co_lines() if line)
    return "".join(linecache.getlines(file)[code.co_firstlineno - 1 : last])


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _value(expression: CodeType, nonlocals: dict[str, Any], names: dict[str, Any]) -> Any:
    try:
        return eval(expression, names)(**nonlocals)
    except Exception:
        return eager_ast._empty  # as TileLang has it


class Mutator(_StockMutator):
    """TileLang's source rewriter with the additions above."""

    def __init__(self, nonlocals: dict[str, Any], *given: Any):
        super().__init__(nonlocals, *given)
        self._evaluated: list[tuple[CodeType, Any]] = []

    def rewritten(self, tree: ast.Module) -> _Rewritten:
        """The rewritten form of a parsed function, changed in place."""
        tree = ast.fix_missing_locations(self.visit(tree))
        code = compile(tree, self.filename, "exec")
        return _Rewritten(code, ast.unparse(tree), self._evaluated, self.extra_type_hints)

    def _try_eval(self, node: ast.expr) -> Any:
        text = f"lambda {', '.join(self.nonlocals)}: {ast.unparse(node)}"
        expression = compile(text, self.filename, "eval")
        value = _value(expression, self.nonlocals, self.globals)
        self._evaluated.append((expression, value))
        return value

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
    if builder.mutate is mutate:
        return
    builder.mutate = mutate
    upstream_errors.install()
