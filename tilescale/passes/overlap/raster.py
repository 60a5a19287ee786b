# SPDX-License-Identifier: MIT
"""Tiles of programs: in groups of rows, and over the programs of a persistent grid.

Why: the operands of tiles that run at once should fit into the cache, so rows of tiles are taken in groups, column
after column; and a persistent program loads its next tile while it stores this one. Before: a program has the tile of
its indices. After: it has the tile of that number in the order of groups, or each `blocks`-th one from its own number
on. Declines grids that are not those of columns, tiles and parts, in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import TensorUse
from tilescale.passes.overlap.rewriter import bound
from tilescale.passes.overlap.schedule import Move
from tilescale.passes.overlap.tile_order import last_axis
from tilescale.program.model import location

Owner = Callable[[Any], Any]
"""The rank that has a part, from the number of the part in the order of programs."""


@dataclass(frozen=True)
class Raster:
    """The programs of a grid, and their tiles.

    Attributes:
        axes: indices of a program: of its column, its tile and its part.
        columns, rows: tiles of a part, along both axes; the columns are constant where there are groups or blocks.
        group: rows of tiles in a group; None: a program has the tile of its indices.
        blocks: programs of a persistent grid, None for one that is not.
    """

    axes: tuple[ir.Var, ...]
    columns: int
    rows: Any
    group: int | None
    blocks: int | None

    @staticmethod
    def of(use: TensorUse, move: Move) -> Raster:
        """The programs that `move` asks for. Raises Declined if the grid has another form."""
        last_axis(use)
        launch, tiles = use.launch, use.tiles
        if move.group is None and move.blocks is None:
            return Raster(launch.programs, 1, launch.grid[0], None, None)
        assert tiles is not None
        columns = ir.constant(launch.grid[0])
        if len(launch.programs) != 3 or not tiles.tile.same_as(launch.programs[1]) or columns is None:
            raise Declined("the axes of the grid are not columns, tiles and parts", location(use.stmts[0]))
        return Raster(launch.programs, columns, launch.grid[1], move.group, move.blocks)

    def grid(self, parts: int) -> dict[ir.Var, Any]:
        """The new extents of axes, where they change."""
        if self.blocks is None:
            return {}
        return dict(zip(self.axes, (self.blocks, 1, min(parts, 2)), strict=True))

    def arm(self, stmt: ir.Stmt, first: int, parts: int, owner: Owner) -> ir.Stmt:
        """A statement of a tile, for the tiles of some parts from number `first` on, which some programs have."""
        column, row, part = self.axes[0], self.axes[-2], self.axes[-1]
        if self.group is None and self.blocks is None:
            return _with(stmt, {part: owner(part if first else 0)})
        if self.blocks is None:
            at = self._at(column + row * self.columns)
            return _with(stmt, {**at, part: owner(part if first else 0)})
        turn, a_part = ir.Var("turn", "int32"), self.rows * self.columns
        number: Any = column + turn * self.blocks
        shard: Any = 0
        for begun in range(1, parts):
            shard = shard + ir.Cast("int32", number >= begun * a_part)
        inside = number if parts == 1 else ir.Max(ir.int_node(0), number - shard * a_part)
        body = _with(stmt, {**self._at(inside), part: owner(first + shard)})
        turns = -((column - parts * a_part) // self.blocks)
        return ir.For(turn, ir.int_node(0), turns, ir.ForKind.SERIAL, body)

    def _at(self, number: Any) -> dict[ir.Var, Any]:
        """Column and row of a tile of a part, from its number."""
        column, row = self.axes[:2]
        if self.group is None:
            return {column: number % self.columns, row: number // self.columns}
        found_row, found_column = grouped(number, self.group, self.rows, self.columns)
        return {column: found_column, row: found_row}


def grouped(number: Any, group: int, rows: Any, columns: int) -> tuple[Any, Any]:
    """Row and column of a tile among `rows` x `columns`: groups of rows, column after column; the last has the rest.

    The column is found in float32, which is exact here and takes less than a division of integers. Bounds that hold
    anyway are spelled out: loads that cannot be proven to be inside of their tensor are guarded, and guarded loads wait
    for one another.
    """
    a_group = group * columns
    begun = ir.Div(number, ir.int_node(a_group))
    inside, high = number - begun * a_group, ir.Min(ir.int_node(group), rows - begun * group)
    quotient = ir.Cast("int32", (ir.Cast("float32", inside) + 0.5) / ir.Cast("float32", high))
    column = ir.Max(ir.int_node(0), ir.Min(quotient, ir.int_node(columns - 1)))
    return begun * group + ir.Max(ir.int_node(0), inside - column * high), column


def _with(stmt: ir.Stmt, values: dict[ir.Var, Any]) -> ir.Stmt:
    """A statement with values in place of a program's indices, each in a variable."""
    named = {var: bound(f"{var.name}_tile", ir.int_node(value)) for var, value in values.items()}
    binds = [bind for _, bind in named.values()]
    return tir.sequence([*binds, ir.substitute(stmt, {var: new for var, (new, _) in named.items()})])
