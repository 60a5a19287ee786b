# SPDX-License-Identifier: MIT
"""The rows of a tensor: the units of a collective's parts, counted one part after the other.

A tensor (parts, rows, ...) has a leading dimension for the parts; in (parts * rows, ...) parts are consecutive, in
(rows, parts, ...) they alternate. Where tiles are within one index of the first dimension of a part, as with the tokens
of experts, (experts, capacity, ...), the next dimension counts too: a row is then one of an expert's, and the experts
are consecutive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.errors import Location
from tilescale.passes.declined import Declined

SliceBox = list[tuple[Any, Any] | None]
"""Begin and end along each dimension; None where it may be anywhere."""


@dataclass(frozen=True)
class Partition:
    """Row numbering of a tensor; or of its columns, where it is split along these: the columns are then its "rows".

    Attributes:
        buffer: the tensor.
        parts: how many there are.
        slots: whether the parts have a separate dimension, before the rows.
        axis: 1 for the columns of a matrix, else 0.
        depth: how many dimensions are counted as rows.
        lead: 1 if the dimension of the parts is behind the rows, (rows, parts, ...), else 0.
    """

    buffer: ir.Buffer
    parts: int
    slots: bool
    axis: int = 0
    depth: int = 1
    lead: int = 0

    @property
    def dimensions(self) -> Sequence[int]:
        """Dimensions of the tensor that determine the row of an element, that of the parts first."""
        if self.lead:
            return (1, 0)
        return range(1, 2) if self.axis else range(self.slots + self.depth)

    @property
    def extents(self) -> tuple[Any, ...]:
        """Extents of the dimensions of a part that are counted as rows."""
        begin = self.axis or int(self.slots and not self.lead)
        first, *others = map(ir.plain, self.buffer.shape[begin : begin + self.depth])
        return (first if self.slots else _over(first, self.parts), *others)

    @property
    def height(self) -> Any:
        """Rows of a part."""
        return math.prod(self.extents)

    def counted(self, count: int) -> Any:
        """About `count` rows of matrices as rows: a row has as many as an extent says that is known at launch only."""
        inner = math.prod(map(ir.plain, self.buffer.shape[self.slots + self.depth : -1]))
        return count if isinstance(inner, int) else ir.Max(ir.Div(ir.int_node(count), inner), ir.IntImm("int32", 1))

    @property
    def total(self) -> Any:
        """Rows of all parts."""
        return self.parts * self.height

    @property
    def across(self) -> Any:
        """Elements of a row of a matrix."""
        return ir.plain(self.buffer.shape[-1 - self.axis])

    @property
    def part_shape(self) -> tuple[Any, ...]:
        """Extents of a part whose rows are those of matrices."""
        return self.block(0, self.height)[1]

    def place(self, row: Any, column: Any) -> tuple[Any, Any]:
        """Row and column, in matrix order, of an element along and across the rows; or the other way round."""
        return (column, row) if self.axis else (row, column)

    def spot(self, row: Any, column: Any) -> tuple[Any, ...]:
        """The indices of an element of a part, from its row and column as a matrix has them."""
        return (*self.at(row), column)

    def block(self, first: Any, count: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Begins and extents of some rows in a part whose rows are those of matrices."""
        if self.axis:
            return (0, first), (self.across, count)
        begins, extents = self.box(first, count)
        return (*begins, 0), (*extents, self.across)

    def of_tile(self, high: int, wide: int) -> tuple[int, ...]:
        """Extents of a tile in a part: it has rows of one index of all dimensions but the last that is counted."""
        return (*[1] * (self.depth - 1), high, wide)

    @property
    def deeper(self) -> Partition | None:
        """The rows with one more dimension counted; None where only one is left."""
        if len(self.buffer.shape) - self.slots - self.depth < 2 or self.axis or self.lead:
            return None
        deeper = replace(self, depth=self.depth + 1)
        return deeper if ir.constants(deeper.extents) is not None else None

    @property
    def inner(self) -> int:
        """Rows of one index of the first dimension that is counted."""
        return math.prod(self.extents[1:])

    def even(self, count: int) -> int:
        """The largest number of rows up to `count` of which chunks are boxes: some whole indices of the first
        dimension, or an equal share of one of them."""
        inner = self.inner
        if count >= inner:
            return count // inner * inner
        for extent in self.extents[1:]:
            inner //= extent
            if count >= inner:
                break
        return next(n for n in range(count // inner, 0, -1) if extent % n == 0) * inner

    def box(self, first: Any, count: Any) -> tuple[list[Any], list[Any]]:
        """Begins and extents along the counted dimensions of a part: of an `even` number of rows, or the last ones."""
        begins: list[Any] = []
        extents: list[Any] = []
        for number in range(self.depth):
            inner = math.prod(self.extents[number + 1 :])
            if not isinstance(count, int) or count >= inner:
                rest = self.extents[number + 1 :]
                return [*begins, _over(first, inner), *[0] * len(rest)], [*extents, _over(count, inner), *rest]
            begins.append(_over(first, inner))
            extents.append(1)
            first = first % inner if isinstance(first, int) else ir.simplify(first % inner, {})
        raise AssertionError("a row has no less than one element of each dimension")

    def at(self, row: Any) -> list[Any]:
        """The indices of a row of a part."""
        return self.box(row, 1)[0]

    def region(self, part: Any, first: Any, count: Any, access: str) -> ir.Call:
        """Some rows of a part, whole."""
        if self.axis:
            every = ir.plain(self.buffer.shape[0])
            return tir.region(self.buffer, [0, part * self.height + first], [every, count], access)
        begins, extents = self.box(first, count)
        if self.lead:
            begins, extents = [*begins, part], [*extents, 1]
        elif self.slots:
            begins, extents = [part, *begins], [1, *extents]
        else:
            begins[0] = part * self.extents[0] + begins[0]
        rest = [ir.plain(n) for n in self.buffer.shape[len(begins) :]]
        return tir.region(self.buffer, [*begins, *[0] * len(rest)], [*extents, *rest], access)

    def high(self, box: SliceBox) -> int | None:
        """Rows of a box that is within one index of all dimensions but the last counted one; None if unknown."""
        pairs = [box[number] or (0, 0) for number in self.dimensions]
        *others, last = (ir.constant(end - begin) for begin, end in pairs)
        return last or None if all(other == 1 for other in others) else None

    def interval(self, box: SliceBox) -> tuple[Any, Any]:
        """First row and the end of the rows of a box of elements; a row beyond the tensor counts as the last."""
        first: Any = 0
        last: Any = 0
        for number in self.dimensions:
            extent = ir.plain(self.buffer.shape[number])
            begin, end = box[number] or (0, extent)
            one = number != self.dimensions[-1] and ir.constant(end - begin) == 1
            first = first * extent + begin
            last = last * extent + (begin if one else ir.Min(ir.int_node(end), ir.int_node(extent)) - 1)
        return ir.int_node(first), ir.int_node(last + 1)


def check_whole(region: ir.Call, does: str, where: Location | None) -> None:
    """Raise Declined if a region is not a whole tensor; `does`: what the collective does with it."""
    whole, begins, extents = ir.region_parts(region)
    if any(ir.constant(b) != 0 for b in begins) or not same_extents(extents, whole.shape):
        raise Declined(f"it {does} a part of {whole.name!r}", where)


def same_extents(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are the same at each launch."""
    return len(one) == len(other) and all(ir.constant(a - b) == 0 for a, b in zip(one, other, strict=True))


def _over(rows: Any, inner: int) -> Any:
    """Number of whole indices of a dimension in some rows, with `inner` rows each."""
    if isinstance(rows, int) or inner == 1:
        return rows // inner if inner > 1 else rows
    return ir.simplify(rows // inner, {})
