# SPDX-License-Identifier: MIT
"""Tables of the supported statements, expressions and operations, which modules fill by decorators.

A rule gets the compiler and a node of the program and returns a closure over frames.
"""

from __future__ import annotations

from collections.abc import Callable

from tilescale.backends.emulator.interpret.closures import Closure

Rule = Callable[..., Closure]

STATEMENTS: dict[type, Rule] = {}
EXPRESSIONS: dict[type, Rule] = {}
OPERATIONS: dict[str, Rule] = {}
VALUES: dict[str, Rule] = {}
VECTORS: dict[str, Rule] = {}
TOGETHER: set[str] = set()
"""Operations that threads execute together."""
IGNORED: set[str] = set()


def statement(*types: type) -> Callable[[Rule], Rule]:
    """Register the rule of a kind of statement. Its closure returns None, BREAK or CONTINUE."""

    def register(rule: Rule) -> Rule:
        STATEMENTS.update(dict.fromkeys(types, rule))
        return rule

    return register


def expression(*types: type) -> Callable[[Rule], Rule]:
    """Register the rule of a kind of expression."""

    def register(rule: Rule) -> Rule:
        EXPRESSIONS.update(dict.fromkeys(types, rule))
        return rule

    return register


def operation(*names: str, collective: bool = True) -> Callable[[Rule], Rule]:
    """Register the rule of operations that are statements.

    Args:
        names: TIR names.
        collective: whether threads execute it together, so that a branch in which only some do becomes a coroutine.
    """

    def register(rule: Rule) -> Rule:
        for name in names:
            if name in OPERATIONS:
                raise ValueError(f"{name} is registered twice")
            OPERATIONS[name] = rule
            if collective:
                TOGETHER.add(name)
        return rule

    return register


def value_operation(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of operations that have a value and need more than their arguments' values."""

    def register(rule: Rule) -> Rule:
        VALUES.update(dict.fromkeys(names, rule))
        return rule

    return register


def vector_operation(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of operations whose value is a vector. Its closure returns a tuple of lanes."""

    def register(rule: Rule) -> Rule:
        VECTORS.update(dict.fromkeys(names, rule))
        return rule

    return register


def ignore(*names: str) -> None:
    """Register hints and fences that have no effect in a sequentially consistent emulation."""
    IGNORED.update(names)
