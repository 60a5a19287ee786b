# SPDX-License-Identifier: MIT
"""Tiles of programs: in groups of rows, and over the programs of a persistent grid.

Why: the operands of tiles that run at once should fit into the cache, so rows of tiles are taken in groups, column
after column; and a persistent program loads its next tile while it stores this one. Before: a program has the tile of
its indices. After: it has the tile of that number in the order of groups, or each `blocks`-th one from its own number
on. Declines grids that are not those of columns, tiles and maybe parts, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.rewriter import LaunchRewriter, bound
from tilescale.passes.overlap.schedule import Move
from tilescale.passes.overlap.tile_order import check_order, sets_order
from tilescale.program.effects import phases
from tilescale.program.model import GridPhase, location

Owner = Callable[[Any], dict[ir.Var, Any]]
"""The part whose tiles are made, as a value for its axis, from the number of the part in the order of programs."""


@dataclass(frozen=True)
class Raster:
    """The programs of a grid, and their tiles.

    Attributes:
        axes: indices of a program: of its column, its tile, and its part if there are parts.
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
        launch, tiles = use.launch, use.tiles
        if move.group is None and move.blocks is None:
            return Raster(launch.programs, 1, launch.grid[0], None, None)
        columns = ir.constant(launch.grid[0])
        has_parts = tiles is not None and any(tiles.part.same_as(var) for var in launch.programs)
        axes = ("columns", "tiles", "parts")[: 2 + has_parts]
        is_second = tiles is None or tiles.tile.same_as(launch.programs[1])
        if len(launch.programs) != len(axes) or not is_second or columns is None:
            raise Declined(f"the axes of the grid are not {', '.join(axes)}", location(use.stmts[0]))
        return Raster(launch.programs, columns, launch.grid[1], move.group, move.blocks)

    def grid(self, parts: int = 1) -> dict[ir.Var, Any]:
        """The new extents of axes, where they change."""
        if self.group is None and self.blocks is None:
            return {}
        column, row, *_ = self.axes
        if self.blocks is None:
            return {column: ir.int_node(self.columns * self.rows), row: ir.int_node(1)}
        return {column: ir.int_node(self.blocks), row: ir.int_node(1), self.axes[-1]: ir.int_node(min(parts, 2))}

    def arm(self, stmt: ir.Stmt, owner: Owner, first: int = 0, parts: int = 1) -> ir.Stmt:
        """A statement of a tile, for the tiles of some parts from number `first` on, which some programs have."""
        column, part = self.axes[0], self.axes[-1]
        if self.blocks is None:
            at = {} if self.group is None else self._at(column)
            return _with(stmt, {**at, **owner(part)})
        iteration, a_part = ir.Var("iteration", "int32"), self.rows * self.columns
        number: Any = column + iteration * self.blocks
        shard: Any = 0
        for begun in range(1, parts):
            shard = shard + ir.Cast("int32", number >= begun * a_part)
        inside = number if parts == 1 else ir.Max(ir.int_node(0), number - shard * a_part)
        body = _with(stmt, {**self._at(inside), **owner(first + shard)})
        iterations = -((column - parts * a_part) // self.blocks)
        return ir.For(iteration, ir.int_node(0), iterations, ir.ForKind.SERIAL, body)

    def changed(
        self, phase: GridPhase, rewriter: LaunchRewriter, before: Sequence[ir.Stmt], owner: Owner, parts: int = 1
    ) -> GridPhase:
        """A grid with all that `rewriter` changes in it, whose programs have these tiles of all parts. `before`:
        statements in front of these tiles."""
        rewriter.grid = self.grid()
        make = lambda stmt: tir.sequence([*before, self.arm(rewriter.statement(stmt), owner, 0, parts)])  # noqa: E731
        return GridPhase(inside(phase.stmt, set(self.axes), make))

    def _at(self, number: Any) -> dict[ir.Var, Any]:
        """Column and row of a tile of a part, from its number."""
        column, row = self.axes[:2]
        if self.group is None:
            return {column: number % self.columns, row: number // self.columns}
        found_row, found_column = grouped(number, self.group, self.rows, self.columns)
        return {column: found_column, row: found_row}


def check_free(use: TensorUse, uses: AccessMaps, move: Move, grids: int = 1) -> None:
    """Raise Declined if programs of a grid cannot have other tiles than those of their numbers, as `move` asks.
    `grids`: how many of a launch are changed together."""
    if sets_order(use.phase):
        raise Declined("the program sets the order of its blocks itself", use.launch.where)
    check_order(use.phase, use.launch, uses.machine)
    found = [phase for phase, launch in phases(uses.program.body) if launch is use.launch]
    changes_grid = move.group is not None or move.blocks is not None
    if changes_grid and sum(isinstance(phase, GridPhase) for phase in found) > grids:
        raise Declined("the launch has several grids", use.launch.where)


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


def inside(stmt: ir.Stmt, axes: set[ir.Var], make: Callable[[ir.Stmt], ir.Stmt]) -> ir.Stmt:
    """A phase with what `make` makes of its statements, inside its scales and behind values that are the same for all
    programs."""
    if isinstance(stmt, ir.AttrStmt):
        return tir.at(ir.AttrStmt(stmt.node, stmt.attr_key, stmt.value, inside(stmt.body, axes, make)), stmt)
    stmts = ir.in_order(stmt)
    same = [isinstance(s, ir.Bind) and not axes & ir.variables(s.value) for s in stmts]
    first = (*same, False).index(False)
    rest = stmts[first:]
    nested = len(rest) == 1 and isinstance(rest[0], ir.AttrStmt)
    return tir.sequence([*stmts[:first], inside(rest[0], axes, make) if nested else make(tir.sequence(rest))])


def _with(stmt: ir.Stmt, values: dict[ir.Var, Any]) -> ir.Stmt:
    """A statement with values in place of a program's indices, each in a variable."""
    named = {var: bound(f"{var.name}_tile", ir.int_node(value)) for var, value in values.items()}
    binds = [bind for _, bind in named.values()]
    return tir.sequence([*binds, ir.substitute(stmt, {var: new for var, (new, _) in named.items()})])
