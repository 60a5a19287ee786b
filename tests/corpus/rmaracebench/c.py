# SPDX-License-Identifier: MIT
"""Parser of the subset of C in which the benchmark is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

DTYPES = {"int": "int32", "long": "int64", "uint64_t": "int64", "float": "float32", "double": "float64"}
"""Types of numbers, as elements of tensors."""

_TYPES = (*DTYPES, "void", "char", "shmem_ctx_t", "shmem_team_t")

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/|\#(?!pragma|define)[^\n]*|__attribute__\(\(\w+\)\))
    |\#define[ ](?P<defined>\w+)[ ](?P<value>\d+)
    |\#pragma[ ]omp[ ](?P<omp>[^\n]*)
    |(?P<number>\d+(?:\.\d+)?)\w*
    |(?P<string>"(?:\\.|[^"])*")
    |(?P<name>\w+)
    |(?P<sign>&&|\|\||[=!<>]=|\+\+|.)""",
    re.VERBOSE | re.DOTALL,
)

_BINARY = {"||": 1, "&&": 2, "==": 3, "!=": 3, "<": 4, ">": 4, "<=": 4, ">=": 4, "+": 5, "-": 5, "*": 6, "/": 6}


@dataclass(frozen=True)
class Node:
    """A statement or an expression, and its line."""

    kind: str
    line: int
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Function:
    """A function: the names of its parameters and its statements."""

    parameters: list[str]
    body: Node


def parse(text: str) -> dict[str, Function]:
    """The functions of a source file, by name.

    Raises:
        SyntaxError: C beyond the part that is known here.
    """
    return _Parser(text).functions()


class _Parser:
    def __init__(self, text: str):
        self._tokens: list[tuple[str, str, int]] = []
        self._at = 0
        constants: dict[str, str] = {}
        for found in _TOKEN.finditer(text):
            kind, line = found.lastgroup, text.count("\n", 0, found.start()) + 1
            if kind == "value":
                constants[found["defined"]] = found["value"]
            elif kind == "name" and found["name"] in constants:
                self._tokens.append(("number", constants[found["name"]], line))
            elif kind != "skip":
                self._tokens.append((kind, found[kind], line))
        self._tokens.append(("end", "", 0))

    # -- tokens --------------------------------------------------------------------------------------------------------

    def _peek(self, ahead: int = 0) -> str:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)][1]

    @property
    def _kind(self) -> str:
        return self._tokens[self._at][0]

    @property
    def _line(self) -> int:
        return self._tokens[self._at][2]

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1][1]

    def _accept(self, text: str) -> bool:
        found = self._peek() == text
        self._at += found
        return found

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise SyntaxError(f"line {self._line}: expected {text!r}, found {self._peek()!r}")

    def _node(self, kind: str, line: int, *parts: Any) -> Node:
        return Node(kind, line, parts)

    # -- declarations --------------------------------------------------------------------------------------------------

    def functions(self) -> dict[str, Function]:
        found = {}
        while self._kind != "end":
            self._type()
            name = self._next()
            self._expect("(")
            parameters = []
            while not self._accept(")"):
                self._type()
                parameters.append(self._next())
                self._accept(",")
            found[name] = Function(parameters, self._statement())
        return found

    def _type(self) -> str:
        name = self._next()
        if name not in _TYPES:
            raise SyntaxError(f"line {self._line}: {name!r} is no type")
        return name + self._stars()

    def _stars(self) -> str:
        found = ""
        while self._accept("*"):
            found += "*"
        return found

    def _declaration(self) -> Node:
        line = self._line
        self._accept("static")
        first = self._type()
        declared = [self._declarator(first)]
        while self._accept(","):
            declared.append(self._declarator(first.rstrip("*") + self._stars()))
        self._expect(";")
        return self._node("block", line, declared, False)

    def _declarator(self, of: str) -> Node:
        line = self._line
        if self._accept("("):  # A pointer to a function.
            self._expect("*")
            name = self._next()
            self._expect(")")
            while self._next() != ")":
                pass
            return self._node("declare", line, "void*", name, None, None)
        name, size = self._next(), None
        if self._accept("["):
            size = self._expression()
            self._expect("]")
        return self._node("declare", line, of, name, size, self._expression() if self._accept("=") else None)

    # -- statements ----------------------------------------------------------------------------------------------------

    def _statement(self) -> Node:
        line = self._line
        if self._kind == "omp":
            return self._directive()
        if self._accept("{"):
            inner = []
            while not self._accept("}"):
                inner.append(self._statement())
            return self._node("block", line, inner, True)
        if self._peek() in ("static", *_TYPES):
            return self._declaration()
        if self._accept("if"):
            return self._node(
                "if", line, self._condition(), self._statement(), self._accept("else") and self._statement()
            )
        if self._accept("for"):
            return self._for(line)
        if self._accept("while"):
            return self._node("while", line, self._condition(), self._statement())
        if self._accept("do"):
            body = self._statement()
            self._expect("while")
            return self._ended(self._node("do", line, self._condition(), body))
        if self._accept("return"):
            return self._ended(self._node("return", line, self._expression()))
        if self._accept("continue"):
            return self._ended(self._node("block", line, [], True))
        return self._ended(self._node("evaluate", line, self._expression()))

    def _ended(self, node: Node) -> Node:
        self._expect(";")
        return node

    def _directive(self) -> Node:
        line, words = self._line, self._next().split()
        alone = words[0] in ("barrier", "taskwait")
        return self._node("omp", line, words, None if alone else self._statement())

    def _condition(self) -> Node:
        self._expect("(")
        found = self._expression()
        self._expect(")")
        return found

    def _for(self, line: int) -> Node:
        self._expect("(")
        first = self._declaration()
        condition = self._expression()
        self._expect(";")
        step = self._expression()
        self._expect(")")
        return self._node("for", line, first, condition, step, self._statement())

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _expression(self) -> Node:
        left, line = self._operation(1), self._line
        return self._node("assign", line, left, self._expression()) if self._accept("=") else left

    def _operation(self, lowest: int) -> Node:
        left = self._unary()
        while (strength := _BINARY.get(self._peek(), 0)) >= lowest:
            line, sign = self._line, self._next()
            left = self._node("binary", line, sign, left, self._operation(strength + 1))
        return left

    def _unary(self) -> Node:
        line = self._line
        if self._accept("++"):
            return self._node("increment", line, self._unary())
        if self._peek() in ("&", "*", "!", "-"):
            return self._node(
                {"&": "address", "*": "pointed"}.get(self._peek(), "unary"), line, self._next(), self._unary()
            )
        if self._peek() == "(" and self._peek(1) in _TYPES:
            self._expect("(")
            of = self._type()
            self._expect(")")
            return self._node("cast", line, of, self._unary())
        return self._postfix()

    def _postfix(self) -> Node:
        line, kind = self._line, self._kind
        if self._accept("("):
            left = self._expression()
            self._expect(")")
        elif kind in ("number", "string"):
            left = self._node(kind, line, self._next())
        else:
            left = self._node("name", line, self._next())
        while self._peek() in ("(", "[", "++"):
            sign = self._next()
            if sign == "(":
                left = self._node("call", line, left, self._arguments())
            elif sign == "[":
                left = self._node("element", line, left, self._expression())
                self._expect("]")
            else:
                left = self._node("increment", line, left)
        return left

    def _arguments(self) -> list[Node]:
        found = []
        while not self._accept(")"):
            if self._peek() in _TYPES:  # sizeof(type): how large a type is has no meaning here.
                found.append(self._node("string", self._line, self._type()))
            else:
                found.append(self._expression())
            self._accept(",")
        return found
