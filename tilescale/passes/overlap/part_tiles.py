# SPDX-License-Identifier: MIT
"""Tiles of a grid whose axes number the tiles of a tensor's part, and the parts, unless a loop of programs does.

Rows of such tiles are known for symbolic extents too. For other grids the rows that each program touches are computed,
which takes constant extents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilescale.passes.overlap.partition import Partition, SliceBox
from tilescale.program.model import Launch


@dataclass(frozen=True)
class PartTiles:
    """The rows of a program, or of an iteration of its loop over the parts: tile number `tile` of part number `part`.

    Attributes:
        part: an index of the program, or an expression of the loop's variable.
        tile: an index of the program.
        step: rows of a tile; the last one of a part may have fewer.
        columns: tiles of the same rows.
    """

    part: ir.PrimExpr
    tile: ir.Var
    step: int
    columns: Any

    @property
    def row(self) -> ir.PrimExpr:
        """First row of a program's tile, in its part."""
        return self.tile * self.step

    def count(self, rows: Any) -> Any:
        """Programs of the tiles of `rows` rows that begin with a tile."""
        return (rows + self.step - 1) // self.step * self.columns

    def iterations(self, loop: ir.For) -> Any:
        """Number of consecutive iterations on one part in a loop over the parts: 8 for `k // 8`, 1 if unknown."""
        var, counts = loop.loop_var, [ir.IntImm("int32", 1)]
        quotient = lambda node: isinstance(node, ir.FloorDiv) and node.a.same_as(var)  # noqa: E731
        ir.walk(self.part, lambda node: counts.insert(0, node.b) if quotient(node) else None)
        same = lambda n: ir.constant(self.part - ir.substitute(self.part, {var: var // n * n})) == 0  # noqa: E731
        return next(filter(same, counts)) if ir.constant(loop.min) == 0 else counts[-1]

    @staticmethod
    def of(rows: Partition, box: SliceBox, launch: Launch, loops: Sequence[ir.For]) -> PartTiles | None:
        """The tiles of a launch of which each touches one box, in each iteration of loops around; None if they have
        another form."""
        if not rows.slots or rows.depth > 1 or rows.lead or box[0] is None or box[1] is None:
            return None
        (part, end), (first, last) = box[0], box[1]
        step, grid = ir.constant(last - first), dict(zip(launch.programs, launch.grid, strict=True))
        in_loop = {loop.loop_var for loop in loops} & ir.variables(ir.int_node(part))
        alone = 1 if rows.parts == 1 else None
        extent = rows.parts if in_loop else grid.pop(ir.simplify(part, {}), alone)
        if step is None or ir.constant(end - part) != 1 or ir.constant(extent) != rows.parts:
            return None
        tile = axis_of_tiles((first, last), rows.height, grid)
        if tile is None:
            return None
        others = [n for var, n in grid.items() if not var.same_as(tile)]
        return PartTiles(part if in_loop else ir.simplify(part, {}), tile, step, math.prod(others))


def axis_of_tiles(pair: tuple[Any, Any], extent: Any, grid: dict[ir.Var, Any]) -> ir.Var | None:
    """The axis of a grid that numbers the tiles of a dimension; None if there is none.

    Args:
        pair: where a program's tile begins and ends.
        extent: of the dimension.
    """
    first, step = pair[0], ir.constant(pair[1] - pair[0])
    if step is None:
        return None
    along = (extent + step - 1) // step
    starts = [var for var, n in grid.items() if ir.constant(first - var * step) == 0 and ir.constant(n - along) == 0]
    return starts[0] if starts else None
