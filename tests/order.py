# SPDX-License-Identifier: MIT
"""The order of tests in which several workers end at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["dealt"]

Test = TypeVar("Test")


def dealt(slow: Sequence[Test], others: Sequence[Test], workers: int) -> list[Test]:
    """Consecutive parts of the same length, one for each worker (the last has the remainder): slow tests first.

    pytest-xdist gives such parts to its workers, and takes tests back from the ends of those that are behind.
    """
    length = (len(slow) + len(others)) // workers
    parts = [list(slow[worker::workers]) for worker in range(workers)]
    taken = 0
    for part in parts[:-1]:
        added = max(0, length - len(part))
        part += others[taken : taken + added]
        taken += added
    parts[-1] += others[taken:]
    return [test for part in parts for test in part]
