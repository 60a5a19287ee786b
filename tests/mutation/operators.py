# SPDX-License-Identifier: MIT
"""Small mistakes in synchronisation: for a text of Python or of CUDA C++, all that can be made at one place each.

Most are those of Offutt and others ("An Experimental Determination of Sufficient Mutant Operators", TOSEM 1996): a
statement is deleted, a comparison or a connector replaced, a value made constant. Those for CUDA weaken an order.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A text that differs from the original at one place.

    Attributes:
        line: of the place, from 1.
        what: what was changed into what.
        text: all of it.
    """

    line: int
    what: str
    text: str


# -- Python ------------------------------------------------------------------------------------------------------------

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip

SWAPPED = {"max": "min", "min": "max", "any": "all", "all": "any"}

CONSTANTS = {"bool": ("True", "False"), "int": ("0",)}
"""Constant to return from a function, by its annotated return type."""


def python_mutants(text: str, functions: Collection[str] = ()) -> Iterator[Mutant]:
    """The mutants of a module, or of some of its functions."""
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef) and (not functions or function.name in functions):
            for node in ast.walk(function):
                for place, new in _changes(node, function, text):
                    if new != _source(text, place):
                        yield _replaced(text, place, new)


def _changes(node: ast.AST, function: ast.FunctionDef, text: str) -> Iterator[tuple[ast.AST, str]]:
    """Nodes and their replacements."""
    match node:
        case ast.Expr(value=ast.Call()):
            yield node, "pass"
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield node, f"{_operand(text, left)} {COMPARISONS[type(op)]} {_operand(text, right)}"
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield node, f"({word.join(_operand(text, value) for value in values)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, _operand(text, operand)
        case ast.BinOp(op=ast.Add(), left=left, right=right) if not _is_text(node):
            yield node, f"max({_source(text, left)}, {_source(text, right)})"
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED:
            yield node.func, SWAPPED[name]
        case ast.Return(value=ast.expr() as value) if isinstance(function.returns, ast.Name):
            for constant in CONSTANTS.get(function.returns.id, ()):
                yield value, constant


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(part, ast.JoinedStr | ast.Tuple | ast.List) for part in ast.walk(node))


def _operand(text: str, node: ast.AST) -> str:
    """The text of an operand, in parentheses if it could bind less tightly than the operator."""
    source = _source(text, node)
    return f"({source})" if isinstance(node, ast.BoolOp | ast.NamedExpr | ast.IfExp | ast.Lambda) else source


def _source(text: str, node: ast.AST) -> str:
    return ast.get_source_segment(text, node) or ""


def _replaced(text: str, node: ast.AST, new: str) -> Mutant:
    lines = text.splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + len(lines[node.lineno - 1].encode()[: node.col_offset].decode())
    old = _source(text, node)
    return Mutant(node.lineno, f"{_short(old)} -> {new}", text[:begin] + new + text[begin + len(old) :])


def _short(text: str) -> str:
    return " ".join(text.split())


# -- CUDA C++ ----------------------------------------------------------------------------------------------------------

WEAKENED = (
    (re.compile(r"(?<=\.)(?:release|acquire)(?=\.)"), "relaxed"),
    (re.compile(r"(?<=\.)sys(?=[.;])"), "gpu"),
    (re.compile(r"wait_group(?! *\.)"), "wait_group.read"),
)
"""Qualifiers of PTX, and what is weaker."""

DELETED = re.compile(
    r"^ *(?:asm volatile\(\"(?:fence|cp\.async|barrier)[^;]*;.*|__threadfence_system\(\);|__syncwarp\(\);"
    r"|(?:complete_stores|drain|acquired)\(\);)$",
    re.MULTILINE,
)
"""Statements that synchronize."""


def cuda_mutants(text: str) -> Iterator[Mutant]:
    """The mutants of a header, comments aside."""
    for pattern, weaker in WEAKENED:
        for found in pattern.finditer(text):
            if "asm" in _line_of(text, found.start()):
                yield _cut(text, found, weaker)
    for found in DELETED.finditer(text):
        yield _cut(text, found, "")


def _line_of(text: str, place: int) -> str:
    return text[text.rfind("\n", 0, place) + 1 : text.find("\n", place)]


def _cut(text: str, found: re.Match, new: str) -> Mutant:
    line = text.count("\n", 0, found.start()) + 1
    what = f"{_short(_line_of(text, found.start()))}: {_short(found.group())} -> {new or 'nothing'}"
    return Mutant(
        line, what if new else f"{_short(found.group())} -> nothing", text[: found.start()] + new + text[found.end() :]
    )
