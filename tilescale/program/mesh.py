# SPDX-License-Identifier: MIT
"""Numbers of units of several levels: row-major, the coarsest level slowest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mesh:
    """Units of several levels. `sizes`: units of each level inside one of the level before, coarsest first."""

    sizes: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Units of all levels together."""
        return math.prod(n for _, n in self.sizes)

    def count(self, level: str) -> int:
        """Siblings of a level."""
        return dict(self.sizes)[level]

    def step(self, level: str) -> int:
        """The difference of the numbers of two neighbours of a level."""
        names = [name for name, _ in self.sizes]
        return math.prod(n for _, n in self.sizes[names.index(level) + 1 :])

    def number(self, rank: Callable[[str], Any]) -> Any:
        """Linear number of the unit with rank `rank(level)` at each level, as an integer or an expression."""
        found: Any = 0
        for level, size in self.sizes:
            found = found * size + rank(level)
        return found

    def rank(self, number: int, level: str) -> int:
        return number // self.step(level) % self.count(level)

    def ranks(self, number: int) -> dict[str, int]:
        """The rank of a unit at each level."""
        return {level: self.rank(number, level) for level, _ in self.sizes}

    def sibling(self, number: int, level: str, rank: int) -> int:
        """The number of the sibling of a unit that has another rank at a level; ranks wrap around."""
        return number + (rank % self.count(level) - self.rank(number, level)) * self.step(level)

    def groups(self, level: str) -> tuple[tuple[int, ...], ...]:
        """The numbers of siblings of a level, group by group, in the order of their ranks."""
        firsts = [number for number in range(self.size) if self.rank(number, level) == 0]
        return tuple(tuple(self.sibling(first, level, r) for r in range(self.count(level))) for first in firsts)
