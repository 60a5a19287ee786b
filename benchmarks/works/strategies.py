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


def taken(call: Callable[[], Any]) -> dict[bool, str]:
    """Call an operator, and return the strategies that it chooses: in eager calls, and when captured (False)."""
    choose, found = strategy.overlaps, {}

    def noted(*given: Any) -> bool:
        for is_eager in (True, False):
            is_overlapped = strategy.is_overlapped(*given, is_eager)
            one_launch = is_overlapped and strategy.takes_one_launch(*given)
            found[is_eager] = ONE_LAUNCH if one_launch else NAMES[is_overlapped]
        return choose(*given)

    strategy.overlaps = noted
    try:
        call()
    finally:
        strategy.overlaps = choose
    return found


def contender(name: str, make: Callable[[], Runner]) -> Contender:
    """Return a strategy of an operator; overlapped kernels are compiled beforehand."""

    def made() -> Runner:
        runner = make()
        assert runner.check is not None
        return Runner(fixed(runner.call, name), fixed(runner.check, name))

    return Contender(name, made, (lambda: made().call()) if STRATEGIES[name] else None)
