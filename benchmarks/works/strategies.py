# SPDX-License-Identifier: MIT
"""Strategies of operators, fixed or noted: overlapped with their communication, or sequential."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tilescale.ops import strategy
from tilescale.tuning.race import Contender, Runner

STRATEGIES = {"beside": True, "in order": False}
"""Contender -> whether its operator overlaps."""

NAMES = {is_overlapped: name for name, is_overlapped in STRATEGIES.items()}
ONE_LAUNCH = "one launch"
"""An overlapped GEMM and all-reduce of few rows."""


def fixed(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the call of an operator, with a strategy."""

    @functools.wraps(call)
    def with_strategy(*given: Any) -> Any:
        strategy.overlaps = lambda job, team: STRATEGIES[name]
        return call(*given)

    return with_strategy


def taken(call: Callable[[], Any]) -> str:
    """Call an operator, and return the strategy that it chooses."""
    choose, found = strategy.overlaps, []

    def noted(*given: Any) -> bool:
        is_overlapped = choose(*given)
        found.append(ONE_LAUNCH if is_overlapped and strategy.takes_one_launch(*given) else NAMES[is_overlapped])
        return is_overlapped

    strategy.overlaps = noted
    try:
        call()
    finally:
        strategy.overlaps = choose
    return found[-1]


def contender(name: str, make: Callable[[], Runner]) -> Contender:
    """Return a strategy of an operator; overlapped kernels are compiled beforehand."""

    def made() -> Runner:
        runner = make()
        assert runner.check is not None
        return Runner(fixed(runner.call, name), fixed(runner.check, name))

    return Contender(name, made, (lambda: made().call()) if STRATEGIES[name] else None)
