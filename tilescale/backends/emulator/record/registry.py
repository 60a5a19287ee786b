# SPDX-License-Identifier: MIT
"""Table of operations with costs, which costs.py fills; separate from the tables of their semantics."""

from __future__ import annotations

from collections.abc import Callable

from tilelang_core import ir
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.registry import IGNORED, OPERATIONS
from tilescale.backends.emulator.record.recorder import Recorder

CostRule = Callable[[Recorder, Compiler, ir.Call], Closure]
"""Makes the closure that records what one execution of an operation demands."""

COSTS: dict[str, CostRule] = {}
RUN_WITHOUT_DATA: set[str] = set()
"""Operations that have a cost and also run where tiles have no values."""


def cost(*names: str, runs: bool = False) -> Callable[[CostRule], CostRule]:
    """Register the cost of operations on tiles: a rule whose closure writes down what one execution demands.

    Args:
        names: TIR names.
        runs: whether the operation also runs without data, because it has other effects.
    """

    def register(rule: CostRule) -> CostRule:
        COSTS.update(dict.fromkeys(names, rule))
        if runs:
            RUN_WITHOUT_DATA.update(names)
        return rule

    return register


def has_cost(name: str | None) -> bool:
    """Whether an operation takes time and orders nothing."""
    return name in COSTS


def orders(name: str | None) -> bool:
    """Whether an operation may order what tasks do."""
    return name in IGNORED if name in COSTS else name in OPERATIONS
