# SPDX-License-Identifier: MIT
"""Rules of the lowering: one table, by operation, kind of level, and mechanism or implementation.

A rule takes the stage that lowers at this kind of level, or the part of it that is at work, and the call:

    kind of level   stage                       rules in
    "unit"          devices.py                  signals.py, exchange.py, hierarchical.py, peer_atomics.py, copies/
    "program"       clusters/stage.py           clusters/collectives.py
    "cluster"       clusters/stage.py           clusters/stage.py: operations that a cluster executes as one
    "thread_group"  groups/clones.py            groups/collectives.py, and groups/shares.py for tile operations
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from tilescale.backends.tilelang.lowering import copies

Rule: TypeAlias = Callable[..., Any]

_RULES: dict[tuple[str, str, str | None], Rule] = {}


def lowers(name: str, kind: str = "unit", impl: str | None = None) -> Callable[[Rule], Rule]:
    """Register the rule of an operation for levels of a kind, for one mechanism or implementation if it is named."""

    def register(rule: Rule) -> Rule:
        key = (name, kind, impl)
        assert key not in _RULES, f"{key} has two rules"
        _RULES[key] = rule
        return rule

    return register


def rule_for(name: str | None, kind: str, impl: str | None = None) -> Rule | None:
    """The rule of an operation, None if it has no lowering.

    Without a requested implementation: the rule for all implementations, or that for the only one.
    """
    copies.register()
    rules = {known: rule for (of, of_kind, known), rule in _RULES.items() if (of, of_kind) == (name, kind)}
    if impl is None and None not in rules:
        return next(iter(rules.values())) if len(rules) == 1 else None
    return rules.get(impl) or rules.get(None)
