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
It is made at a function's first use: most macros that a module defines are never used.
"""

from __future__ import annotations

import ast
import copy
import inspect
import linecache
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import Any

from tilelang.language.eager import ast as eager_ast
from tilelang.language.eager import builder, utils

from tilelang_core import upstream_errors
from tilelang_core.lru import LruCache

SCOPE_ATTR = "__tilelang_core_scope__"



@dataclass
class _Rewritten:
    """A function's source as it was rewritten.

    Attributes:
        code: defines `make_closure`, which makes the function from the names that it closes over.
        evaluated: the expressions that were evaluated meanwhile, as functions of those names, with their values.
        hints: types of parameters that appear in the body.
    """

    code: CodeType
    evaluated: list[tuple[CodeType, Any]]
    hints: dict[str, Any]


_rewritten: LruCache[Hashable, _Rewritten] = LruCache(256)
"""The functions that were rewritten last, by their lines and the names that they close over."""


class Generator(eager_ast.IRGenerator):
    """Build the IR of a user's function, from its current source lines and the current values of its names."""

    def __init__(self, func: Callable[..., Any]):
        self._globals = func.__globals__
        self._nonlocals = utils.get_func_nonlocals(func)
        self._file = str(Path(inspect.getsourcefile(func) or inspect.getfile(func)).absolute())
        linecache.checkcache(self._file)
        self._lines = linecache.getlines(self._file)
        self._code = func.__code__
        self._unread = None if self._lines else utils.get_ast(func)

    @cached_property
    def gen(self) -> Callable[[eager_ast.BaseBuilder], Callable[..., Any]]:
        made: dict[str, Any] = {}
        exec(self._made.code, self._globals, made)
        make = made["make_closure"](**self._nonlocals)
        return lambda builder: upstream_errors.explaining(make(builder), builder)

    @property
    def source(self) -> str:
        return ast.unparse(self._mutator().visited(self._tree()))

    @cached_property
    def extra_type_hints(self) -> dict[str, Any]:
        return dict(self._made.hints)

    @cached_property
    def _made(self) -> _Rewritten:
        first = self._code.co_firstlineno
        last = max(line for each in _nested(self._code) for *_, line in each.co_lines() if line)
        key = (self._file, *self._nonlocals, first, "".join(self._lines[first - 1 : last]))
        known = _rewritten.get(key)
        if known is None or any(_value(e, self._nonlocals, self._globals) is not value for e, value in known.evaluated):
            known = self._mutator().rewritten(self._tree())
            if self._lines:
                _rewritten[key] = known
        return known

    def _mutator(self) -> Mutator:
        return Mutator(self._nonlocals, self._globals, self._file)

    def _tree(self) -> ast.Module:
        if self._unread is not None:
            return copy.deepcopy(self._unread)
        return parsed(self._lines, self._code.co_firstlineno, self._file)


def parsed(lines: list[str], first: int, file: str) -> ast.Module:
    """The function that begins in a line of a file."""
    text = utils._remove_leading_ident("".join(inspect.getblock(lines[first - 1 :])))
    return ast.parse("\n" * (first - 1) + text, file)


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


class Mutator(eager_ast.DSLMutator):
    """TileLang's source rewriter with the additions above."""

    def __init__(self, nonlocals: dict[str, Any], *given: Any):
        super().__init__(nonlocals, *given)
        self._evaluated: list[tuple[CodeType, Any]] = []

    def rewritten(self, tree: ast.Module) -> _Rewritten:
        code = compile(self.visited(tree), self.filename, "exec")
        return _Rewritten(code, self._evaluated, self.extra_type_hints)

    def visited(self, tree: ast.Module) -> ast.Module:
        """The rewritten form of a parsed function, changed in place."""
        return ast.fix_missing_locations(self.visit(tree))

    def _try_eval(self, node: ast.expr) -> Any:
        text = f"lambda {', '.join(self.nonlocals)}: {ast.unparse(node)}"
        expression = compile(text, self.filename, "eval")
        value = _value(expression, self.nonlocals, self.globals)
        self._evaluated.append((expression, value))
        return value

    def visit_With(self, node: ast.With) -> Any:  # noqa: N802
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
            name, target = item.context_expr, merged[-1].optional_vars if missing else None
            if target is not None and item.optional_vars is None and isinstance(name, ast.Name):
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

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:  # noqa: N802
        result = super().visit_FunctionDef(node)
        if self.filename.startswith(upstream_errors.TILELANG_ROOT):
            result = _DropFileLines().visit(result)
        return result


class _DropFileLines(ast.NodeTransformer):
    """Removes `__tb.set_fileline(...)` so that the caller's line stays current."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:  # noqa: N802
        call = node.value
        is_fileline = isinstance(call, ast.Call) and getattr(call.func, "attr", None) == "set_fileline"
        return ast.copy_location(ast.Pass(), node) if is_fileline else node


def _is_path(node: ast.expr) -> bool:
    """Whether an expression is `name` or `name.attribute...`: safe to evaluate while the source is rewritten."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


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
    if builder.mutate is Generator:
        return
    builder.mutate = Generator
    upstream_errors.install()
