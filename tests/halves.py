# SPDX-License-Identifier: MIT
"""Parameters, half of which run at night: products, and lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

__all__ = ["every_second_at_night", "half_at_night"]


def every_second_at_night(values: Iterable[Any], first: int = 1) -> list[Any]:
    """The values of one parameter: each second one from `first` on runs at night."""
    return [
        pytest.param(value, marks=[pytest.mark.nightly] * (at >= first and (at - first) % 2 == 0))
        for at, value in enumerate(values)
    ]


def half_at_night(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of values: of two that differ in one value only, by its position, one runs at night.

    The values of an axis of several parameters are tuples.
    """
    made = []
    for at in product(*map(range, map(len, axes))):
        values = [axis[i] for axis, i in zip(axes, at, strict=True)]
        flat = [each for value in values for each in (value if isinstance(value, tuple) else (value,))]
        made.append(pytest.param(*flat, marks=[pytest.mark.nightly] * (sum(at) % 2)))
    return made
