# SPDX-License-Identifier: MIT
"""Asynchronous operations: those that a unit starts on its copy queue, and the layout of a collective's parts in the
whole.

A queue executes operations one after the other, in the order in which its unit started them, concurrently with the
unit's next operations. Each sees all earlier effects of its unit; only a wait for its flag sees its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilescale.hda import Level, Machine
from tilescale.program.operations import Collective, Copy, operation


def owns_a_queue(executing: Level, machine: Machine) -> bool:
    """Whether the units of a level, as they execute a phase, have copy queues: those that own tensors and run no
    threads."""
    return executing == machine.tensor_level and executing != machine.program_level


def is_asynchronous(node: ir.Node) -> bool:
    """Whether a node of a device phase (of a level that `owns_a_queue`) is an operation for the unit's copy queue."""
    found = operation(node)
    if isinstance(found, Copy):
        return found.signal is not None
    return isinstance(found, Collective) and found.flags is not None


@dataclass(frozen=True)
class PartLayout:
    """Layout of parts in the whole of a gather or an all-to-all: rows one after the other, or in separate slots.

    Attributes:
        slots: whether the whole has a dimension for the ranks, in front of the rows.
        rows: the dimension of a part's region along which its rows are: a part that is a slot of the whole has a
            leading 1.
        lead: the dimensions before the split one; part and whole agree in them.
    """

    slots: bool
    rows: int
    lead: int = 0

    @staticmethod
    def of(part: Sequence[Any], whole: Sequence[Any], dim: int = 0) -> PartLayout:
        """The layout from the extents of both. In slices at an index the first dimension is the first one of more than
        one element."""
        if len(whole) > len(part):
            return PartLayout(slots=True, rows=dim, lead=dim)
        lead, is_whole = dim, list(map(str, part)) == list(map(str, whole))  # of a single unit
        if dim == 0 and not is_whole:
            while lead < len(part) - 1 and ir.constant(part[lead]) == ir.constant(whole[lead]) == 1:
                lead += 1
        one = lead < len(part) - 1 and ir.constant(part[lead]) == 1
        return PartLayout(slots=one, rows=lead + int(one), lead=lead)

    @staticmethod
    def moved(made: Collective) -> PartLayout:
        """The parts that an asynchronous gather or all-to-all moves."""
        if made.slots is not None:
            return PartLayout(made.slots, rows=made.axis + int(made.slots), lead=made.axis)
        part, whole = (ir.region_parts(region)[2] for region in (made.source, made.target))
        return PartLayout.of(part, whole, made.axis)

    def in_whole(self, rank: Any, count: Any, first: Any) -> list[Any]:
        """Position of row `first` of a rank's part of `count` rows: offsets along the whole's dimensions, 0 for further
        ones."""
        return [*[0] * self.lead, *([rank, first] if self.slots else [rank * count + first])]

    def in_part(self, first: Any) -> list[Any]:
        """Position of a row in the part's region."""
        return [*[0] * self.rows, first]

    def whole(self, part: Sequence[Any], size: Any) -> list[Any]:
        """Extents of a tensor that has `size` such parts."""
        joined = [size, part[self.rows]] if self.slots else [part[self.rows] * size]
        return [*part[: self.lead], *joined, *part[self.rows + 1 :]]


def flag_of(begins: Sequence[Any], rank: Any, chunk: Any) -> list[Any]:
    """Position of the flag of a rank's chunk in a tensor whose flags (ranks, chunks) begin at `begins`."""
    *lead, row, column = begins
    return [*lead, row + rank, column + chunk]


def part_of(whole: Sequence[Any], size: Any, dim: int = 0) -> list[Any]:
    """The shape of one of `size` parts that are adjacent along a dimension."""
    extent, size = ir.int_node(whole[dim]), ir.int_node(size)
    count = ir.IntImm("int32", 1) if str(extent) == str(size) else ir.simplify(extent // size, {})
    return [*whole[:dim], count, *whole[dim + 1 :]]
