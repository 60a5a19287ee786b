# SPDX-License-Identifier: MIT
"""Products of parameters, half of them at night."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

__all__ = ["half_at_night"]


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
