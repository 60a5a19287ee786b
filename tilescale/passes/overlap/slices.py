# SPDX-License-Identifier: MIT
"""Slices of columns of a gathered matrix: tiles that iterate over its columns wait for each slice where it begins.

Why: a tile that waits for whole rows begins with the last one of a chunk, so tiles that all run at once do nothing
until then. Before: a loop of the tile over columns. After: each unit sends its rows in slices of columns, and the first
iteration in a slice waits for that one's flag. Declines loops whose steps do not divide a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.chunks import wait, waiting_at_each
from tilescale.passes.overlap.partition import Partition
from tilescale.program.model import location


@dataclass(frozen=True)
class ColumnSlices:
    """The columns of the rows `of` a matrix in `each` slices of one width."""

    of: Partition
    each: int

    @property
    def shape(self) -> tuple[int, int]:
        """Parts and slices of each: the shape of flags for all of them."""
        return self.of.parts, self.each

    @property
    def width(self) -> int:
        """Columns of a slice. Raises Declined if they are not all of one width."""
        columns = ir.constant(ir.int_node(self.of.across))
        if columns is None or columns % self.each:
            raise Declined(f"{self.of.across} columns are not {self.each} slices of one width")
        return columns // self.each

    def all(self, make: Callable[[Any], ir.Stmt]) -> ir.Stmt:
        number = ir.Var("number", "int32")
        return ir.For(number, 0, self.each, ir.ForKind.SERIAL, make(number))

    def region(self, rows: ir.Call, number: Any) -> ir.Call:
        """A slice of whole rows."""
        _, begins, extents = ir.region_parts(rows)
        first = [*begins[:-1], begins[-1] + number * self.width]
        return tir.resized(tir.beginning(rows, first), [*extents[:-1], self.width])

    def awaited(self, use: TensorUse, uses: AccessMaps, flags: ir.Buffer) -> tuple[ir.Stmt, ir.Stmt]:
        """The loop of a use over columns, and the same with a wait where a slice begins. Raises Declined: there is no
        such loop."""
        loop, width = use.stmts[0], self.width
        step = _step(use, uses) if isinstance(loop, ir.For) and len(use.stmts) == 1 else None
        if step is None or use.part is None or width % step:
            raise Declined("no loop of its tiles iterates over slices of columns", location(loop))
        steps = width // step
        return loop, waiting_at_each(steps, loop, wait(flags, use.part, loop.loop_var // steps))


def _step(use: TensorUse, uses: AccessMaps) -> int | None:
    """Columns that an iteration of a loop reads, each the next ones; None if it reads others."""
    (loop,), root = use.stmts, uses.names.root(use.rows.buffer.data)
    touching = [a for a in uses.names.all_effects(loop.body).accesses if a.root.same_as(root)]
    pairs = [(a.begins[-1], ir.constant(ir.int_node(a.extents[-1]))) for a in touching if a.begins and a.extents]
    if ir.constant(loop.min) != 0 or len(pairs) < len(touching):
        return None
    step = pairs[0][1]
    follow = step and all(n == step and ir.constant(begin - loop.loop_var * step) == 0 for begin, n in pairs)
    return step if follow else None
