# SPDX-License-Identifier: MIT
"""Buffers of a random program: what they hold, and expressions that read and name their elements."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

SLOTS = 3
"""Tiles of an input that a block may load."""
SMALL = 32
"""Bound of values that were wrapped."""
EXACT = 1 << 22
"""Bound of sums that float32 holds exactly."""
DTYPES = ("int32", "float32", "float16", "bfloat16", "int8")


@dataclass
class Buffer:
    """A tile, or a block's part of a tensor.

    Attributes:
        kind: "input" and "global" (tensors), "device", "shared" and "fragment" (tiles).
        prefix: indices in front of the tile's own, where it is part of a larger one.
        bound: of the magnitude of its values.
        defined: whether all of it has been written.
        inner: whether each unit of a group has one of its own.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    prefix: str = ""
    bound: int = SMALL
    defined: bool = False
    inner: bool = False

    @property
    def is_tile(self) -> bool:
        """Whether a copy takes its name for all of it."""
        return not self.prefix

    def at(self, *indices: object) -> str:
        """An element, or where a copy begins."""
        return f"{self.name}[{self.prefix}{', '.join(map(str, indices))}]"

    def region(self, ranges: list[tuple[int, int]]) -> str:
        """Some of its rows and columns."""
        return self.at(*(f"{low}:{high}" for low, high in ranges))

    @property
    def whole(self) -> str:
        """The whole buffer, as a copy to or from a tile names it."""
        return self.name if self.is_tile else self.at(*[0] * len(self.shape))


@dataclass
class Group:
    """Units inside a block that execute a part of it: rows `rank * share` and following are a unit's.

    Attributes:
        written, crossed: names of buffers that units have written, or read beyond their rows, since the last barrier.
    """

    rank: str
    units: int
    threads: int
    written: set[str] = field(default_factory=set)
    crossed: set[str] = field(default_factory=set)


@dataclass
class Scope:
    """Context of a statement.

    Attributes:
        loops: variables of the loops around it, and their trip counts.
        branched: whether it is conditional: its targets must be initialized before.
    """

    loops: tuple[tuple[str, int], ...] = ()
    branched: bool = False
    group: Group | None = None

    def inside(self, **changes: object) -> Scope:
        return replace(self, **changes)


class Expressions:
    """Random expressions over elements of buffers."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def coordinate(self, extent: int, variable: str, run: int, scope: Scope) -> str:
        """Some index of a dimension, of a variable that runs up to `run`; many may be equal."""
        step, shift = self.rng.choice((1, 1, 3)), self.rng.randrange(extent)
        names = [f"({variable} * {step} + {shift}) % {extent}", str(shift)]
        names.append(f"({shift} - {variable} // {step + 1}) % {extent}")
        names.append(f"({extent} - {variable} % {step + 1}) % {extent}")
        names += [f"({variable} + {name}) % {extent}" for name, _ in scope.loops]
        if run <= extent:
            names += [variable, variable, f"{extent - 1} - {variable}", f"{extent - 1} - {variable}"]
        return self.rng.choice(names)

    def own(self, extent: int, variable: str) -> str:
        """An index that is another one for each value of a variable that runs over a dimension."""
        shift = self.rng.randrange(extent)
        moved = f"({variable} + {shift}) % {extent}", f"({shift} - {variable}) % {extent}"
        return self.rng.choice((variable, variable, f"{extent - 1} - {variable}", *moved))

    def value(self, buffer: Buffer, element: str) -> str:
        """An element as a number of int32."""
        return element if buffer.dtype == "int32" else f'T.cast({element}, "int32")'

    def wrapped(self, terms: list[str], dtype: str) -> str:
        """A sum of terms as a value of a type, in -32 .. 31."""
        total = " + ".join(terms)
        if self.rng.random() < 0.3:
            wide = f'T.cast({total}, "float32")'
            result = f"({wide} - T.floor({wide} * 0.015625) * 64.0 - 32.0)"
            return result if dtype == "float32" else f'T.cast({result}, "{dtype}")'
        result = f"((({total}) & 63) - 32)"
        return result if dtype == "int32" else f'T.cast({result}, "{dtype}")'
