# SPDX-License-Identifier: MIT
"""A unit's tile: the one record of a region argument that rules of all levels work with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir


def _same(expr: ir.PrimExpr) -> Any:
    return expr


@dataclass(frozen=True)
class TileRegion:
    """A region of a buffer.

    Attributes:
        name: the user's name of the buffer.
        begins: its first indices.
        extents: numbers where they are constant.
    """

    buffer: ir.Buffer
    name: str
    begins: list[Any]
    extents: list[Any]

    @classmethod
    def of(cls, region: ir.Call, value: Callable[[Any], Any] = _same) -> TileRegion:
        """A region argument, `value` of its begins and extents."""
        buffer, begins, extents = ir.region_parts(region)
        return cls(buffer, buffer.name, list(map(value, begins)), [ir.plain(value(n)) for n in extents])

    @classmethod
    def whole(cls, buffer: ir.Buffer) -> TileRegion:
        """All of a buffer of constant extents."""
        shape = [ir.integer(n) for n in buffer.shape]
        return cls(buffer, buffer.name, [0] * len(shape), shape)

    @property
    def dtype(self) -> str:
        """Type of its elements."""
        return str(self.buffer.dtype)

    @property
    def is_static(self) -> bool:
        """Whether all of its extents are constant."""
        return all(isinstance(n, int) for n in self.extents)

    @property
    def in_registers(self) -> bool:
        """Whether the tile is a fragment, which a loop may only access as a whole: see `whole_loops`."""
        return bool(self.buffer.scope() == "local.fragment")

    @property
    def in_memory(self) -> bool:
        """Whether units other than its holder can access it."""
        return not self.buffer.scope().startswith("local")

    def region(self, access: str, begins: Sequence[Any] | None = None, extents: Sequence[Any] | None = None) -> ir.Call:
        """The tile, or a part of it, as an argument of a tile operation."""
        offset = [0] * len(self.begins) if begins is None else begins
        at = [b + o for b, o in zip(self.begins, offset, strict=True)]
        return tir.region(self.buffer, at, self.extents if extents is None else extents, access)

    def at(self, index: Sequence[Any]) -> list[Any]:
        """Indices of an element of the tile in its buffer."""
        return [b + i for b, i in zip(self.begins, index, strict=True)]

    def store(self, value: Callable[[list[ir.Var]], Any]) -> ir.Stmt:
        """Set every element."""
        loops = tir.loop_variables(self.extents)
        return tir.parallel(loops, self.extents, ir.BufferStore(self.buffer, value(loops), self.at(loops)))


def parts(whole: TileRegion, axis: int, count: int) -> tuple[list[int], list[list[int]]]:
    """Extents of one of `count` parts along an axis, and the begin of each."""
    part = [n // count if a == axis else n for a, n in enumerate(whole.extents)]
    return part, [[i * part[a] if a == axis else 0 for a in range(len(part))] for i in range(count)]


def take_parts(
    target: TileRegion,
    axis: int,
    count: int,
    element: Callable[[Any, list[Any]], ir.PrimExpr],
    copied: Callable[[int, ir.Call], ir.Stmt],
) -> list[ir.Stmt]:
    """Set `count` parts of a tile along an axis: of a fragment by `element`, from the number of a part and the indices
    in it; of other tiles each by `copied`, from its number and its region."""
    part, begins = parts(target, axis, count)
    if not target.in_registers:
        return [copied(number, target.region("w", begin, part)) for number, begin in enumerate(begins)]
    loops, number, index = whole_loops(axis, part)
    value = element(number, index)
    value = value if value.dtype == target.dtype else ir.Cast(target.dtype, value)
    return [tir.parallel(loops, target.extents, ir.BufferStore(target.buffer, value, target.at(loops)))]


def whole_loops(axis: int, part: list[int]) -> tuple[list[ir.Var], Any, list[Any]]:
    """Loops over a whole tile, the number of an element's part along an axis, and its indices in the part.

    Stock's layout inference takes a loop over a part of a fragment for one over the whole, and gives the fragment too
    few registers.
    """
    loops = [ir.Var(f"i{a}", "int32") for a in range(len(part))]
    index = [i % part[axis] if a == axis else i for a, i in enumerate(loops)]
    return loops, loops[axis] // part[axis], index
