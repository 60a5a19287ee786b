# SPDX-License-Identifier: MIT
"""The tree of emulated units: machine, nodes, devices, programs, warpgroups, ... and the buffers that each of them
owns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

Path = tuple[tuple[str, int], ...]


@dataclass(eq=False)
class Unit:
    """One unit of one level.

    Attributes:
        level: its level's name; "" for the machine as a whole.
        rank: its number among its siblings, of which there are `siblings`.
        parent: the unit of the next launched level around it.
        storage: slot of a buffer -> the instance that this unit owns.
        replicas: slot of a tile -> this unit's own copy and the tile's version it was taken from.
        index: its name in messages where this is not the rank, e.g. a grid index.
    """

    level: str
    rank: int
    parent: Unit | None = None
    index: tuple[int, ...] | None = None
    siblings: int = 1
    storage: dict[int, Any] = field(default_factory=dict)
    replicas: dict[int, Replica] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    children: dict[tuple[str, int], Unit] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)

    def child(self, level: str, rank: int) -> Unit:
        """The unit of `level` with that rank inside this one; made at the first request."""
        key = (level, rank)
        if key not in self.children:
            self.children[key] = Unit(level, rank, self)
        return self.children[key]

    def path(self) -> Path:
        """Levels and ranks from the coarsest unit down to this one."""
        above = self.parent.path() if self.parent is not None else ()
        return (*above, (self.level, self.rank)) if self.level else above

    @property
    def outer(self) -> Unit:
        """The unit around this one, which is not the machine."""
        assert self.parent is not None, "no unit is around the machine"
        return self.parent

    def around(self, level: str) -> Unit:
        """This unit or the one around it that is of `level`, of which there must be one."""
        unit = self
        while unit.level != level:
            unit = unit.outer
        return unit

    def find(self, level: str) -> Unit | None:
        """`around`, or None where no unit of the level is."""
        return self if self.level == level else self.parent and self.parent.find(level)

    @property
    def place_in_grid(self) -> tuple[int, ...]:
        """The indices of the program that contains this unit; () outside of programs."""
        unit: Unit | None = self
        while unit is not None and unit.index is None:
            unit = unit.parent
        return () if unit is None else unit.index or ()

    def counterpart(self, level: str, rank: int) -> Unit:
        """The unit with this one's position in sibling `rank` of `level`."""
        if self.level == level:
            return self.outer.child(level, rank)
        return self.outer.counterpart(level, rank).child(self.level, self.rank)

    def owner(self, slot: int) -> Unit:
        """The unit, this one or one around it, that owns an instance of a buffer, which is allocated."""
        unit = self
        while slot not in unit.storage:
            unit = unit.outer
        return unit

    def has_owner(self, slot: int) -> bool:
        """Whether this unit or one around it owns an instance of a buffer: it has reached the allocation."""
        return slot in self.storage or self.parent is not None and self.parent.has_owner(slot)

    def siblings_named(self, ranks: list[int]) -> str:
        """Some of this unit's siblings, for a message."""
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        return f"{self.level} {shown}" if self.index is None else f"{self.level} of rank {shown}"

    def __str__(self) -> str:
        parts = []
        unit: Unit | None = self
        while unit is not None and unit.level:
            name = unit.rank if unit.index is None else unit.index if len(unit.index) > 1 else unit.index[0]
            parts.append(f"{unit.level} {name}")
            unit = unit.parent
        return ", ".join(reversed(parts)) or "the program"


@dataclass
class Replica:
    """One unit's copy of a tile that is viewed with `T.Replica`."""

    array: np.ndarray
    version: int
