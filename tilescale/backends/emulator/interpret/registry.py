# SPDX-License-Identifier: MIT
"""Which operations and statements the emulator knows: tables that the modules of this package fill with decorators.

A rule gets the compiler and a node of the program and returns a closure over frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilescale.backends.emulator.interpret.expr import Closure

if TYPE_CHECKING:
    from tilescale.backends.emulator.interpret.compiler import Compiler

Rule = Callable[["Compiler", Any], Closure]

STATEMENTS: dict[type, Rule] = {}
OPERATIONS: dict[str, Rule] = {}
VALUES: dict[str, Rule] = {}
COSTS: dict[str, Rule] = {}
TOGETHER: set[str] = set()
"""Operations that threads execute together."""
RUN_WITHOUT_DATA: set[str] = set()
"""Operations that have a cost and also run where tiles have no values."""
IGNORED: set[str] = set()

def statement(*types: type) -> Callable[[Rule], Rule]:
    """Register the rule of a kind of statement. Its closure returns None, or says how a loop's body was left."""

    def register(rule: Rule) -> Rule:
        STATEMENTS.update(dict.fromkeys(types, rule))
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


def cost(*names: str, runs: bool = False) -> Callable[[Rule], Rule]:
    """Register the cost of operations on tiles: a rule whose closure writes down what one execution demands.

    Args:
        names: TIR names.
        runs: whether the operation also runs without data, since it does more than to compute.
    """

    def register(rule: Rule) -> Rule:
        COSTS.update(dict.fromkeys(names, rule))
        if runs:
            RUN_WITHOUT_DATA.update(names)
        return rule

    return register


def has_cost(name: str | None) -> bool:
    """Whether an operation is one that takes time and orders nothing."""
    return name in COSTS


def orders(name: str | None) -> bool:
    """Whether an operation may order what tasks do."""
    return name in IGNORED if name in COSTS else name in OPERATIONS


def value_operation(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of operations that have a value and need more than their arguments' values."""

    def register(rule: Rule) -> Rule:
        VALUES.update(dict.fromkeys(names, rule))
        return rule

    return register


def ignore(*names: str) -> None:
    """Register hints and orderings that a sequentially consistent emulation has no use for."""
    IGNORED.update(names)
