# SPDX-License-Identifier: MIT
"""Products of parameters, half of them at night."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

__all__ = ["half_at_night"]


def half_at_night(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of values: of two that differ in one value only, by its position, one runs at night."""
    return [
        pytest.param(*(axis[i] for axis, i in zip(axes, at, strict=True)), marks=[pytest.mark.nightly] * (sum(at) % 2))
        for at in product(*map(range, map(len, axes)))
    ]
