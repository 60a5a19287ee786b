# SPDX-License-Identifier: MIT
"""The order of a grid's tiles: those first whose rows are here, or whose rows have the longest way.

Why: programs start in the order of their numbers, so a program that waits for late rows occupies an SM slot that
another one could use. Before: a program works on the tile of its own number. After: on the tile that a one-to-one map
gives for its number and the device's rank. The map has the parts of the tensor in the order of sending, and the tiles
of a part as before. It declines grids whose tiles do not follow the rows along one axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.hda import Machine
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.partition import Partition
from tilescale.passes.overlap.rewriter import LaunchRewriter, bound, rank_of
from tilescale.passes.overlap.schedule import Move
from tilescale.program.model import GridPhase, Launch, location
from tilescale.program.operations import Rank, operation


class TileOrder(Protocol):
    """An order of the parts of a tensor, of which each rank owns one. `others`: the first position of a remote part;
    the others follow consecutively."""

    others: int

    def part(self, iteration: Any, rank: Any, parts: int) -> Any:
        """The rank whose part is at a position."""


class ArrivalOrder:
    """Tile order of an overlapped gather: the local part, then those of ranks r - 1, r - 2, ..., as they arrive."""

    others = 1

    def part(self, iteration: Any, rank: Any, parts: int) -> Any:
        """The rank whose part is at a position."""
        return (rank + parts - iteration) % parts


class DepartureOrder:
    """The part of the next rank first, and so on; the local part last."""

    others = 0

    def part(self, iteration: Any, rank: Any, parts: int) -> Any:
        """The rank whose part is at a position."""
        return (rank + 1 + iteration) % parts


def stairs(x: Any, begins: Sequence[int], values: Sequence[int]) -> Any:
    """The value of the last step that begins at x or before; `begins` do not fall."""
    rises: dict[int, int] = {}
    for begin, value, before in zip(begins[1:], values[1:], values, strict=False):
        rises[begin] = rises.get(begin, 0) + value - before
    total: Any = ir.IntImm("int32", values[0])
    for begin, rise in rises.items():
        if rise:
            total = total + ir.Select(x >= begin, ir.IntImm("int32", rise), ir.IntImm("int32", 0))
    return total


def is_in(order: TileOrder, use: TensorUse, rows: Partition, uses: AccessMaps, level: str) -> bool:
    """Whether the tiles of a use are known to be in an order already, on every rank."""
    if uses.symbolic:
        return False
    for rank in range(rows.parts):
        begins = [begin // rows.height for begin, _, _ in uses.values(use, uses.ranks(level, rank), likely=True)]
        found = list(dict.fromkeys(int(part) for row in np.transpose(begins) for part in row))
        if found != [order.part(iteration, rank, rows.parts) for iteration in range(rows.parts)]:
            return False
    return True


@dataclass(frozen=True)
class GridAxis:
    """The axis of a grid along which the parts of a tensor follow one another.

    Attributes:
        number: of the axis.
        first: for each part the first index along the axis whose tiles begin in it; at the end the axis' extent, as
            all of them begin in some part.
    """

    number: int
    first: tuple[int, ...]


def sets_order(phase: GridPhase) -> bool:
    """Whether a program sets the order of its blocks itself."""
    return ir.contains(phase.stmt, lambda n: isinstance(n, ir.AttrStmt) and str(n.attr_key) == tir.BLOCK_ORDER)


def check_order(phase: GridPhase, launch: Launch, machine: Machine) -> None:
    """Raise Declined if programs of a phase differ by more than the tiles that they work on."""
    if launch.cluster_size > 1:
        raise Declined("programs of a cluster stay together", launch.where)
    named: set[ir.Var] = set()
    for stmt in ir.statements(phase.stmt):
        made = operation(stmt.value) if isinstance(stmt, ir.Bind) else None
        if isinstance(made, Rank) and made.level == machine.program_level.name:
            named.add(stmt.var)
        elif named & set(ir.uses(stmt)):
            raise Declined("a program uses its number", location(stmt))


def axis_of(use: TensorUse, rows: Partition, uses: AccessMaps, level: str) -> GridAxis:
    """The axis along which the parts follow one another. Raises Declined: there is none, or the order depends on the
    device already."""
    shape = [ir.integer(n) for n in use.launch.grid]
    seen = []
    for rank in range(uses.sizes[level]):
        orders = [begin // rows.height for begin, _, _ in uses.values(use, uses.ranks(level, rank), likely=True)]
        if any(not np.array_equal(orders[0], other) for other in orders[1:]):
            raise Declined("the grid is persistent", location(use.loops[0]))
        seen.append(orders[0])
    if any(not np.array_equal(seen[0], other) for other in seen[1:]):
        raise Declined("the tiles are in an order of their own on each device", location(use.stmts[0]))
    parts = seen[0].reshape(shape, order="F")  # as programs are numbered
    varying = [i for i in range(len(shape)) if (np.diff(parts, axis=i) != 0).any()]
    if len(varying) != 1:
        raise Declined("the tiles do not follow the rows along one axis of the grid", location(use.stmts[0]))
    (number,) = varying
    along = np.moveaxis(parts, number, 0).reshape(shape[number], -1)[:, 0]
    if (np.diff(along) < 0).any():
        raise Declined("the tiles do not follow the rows", location(use.stmts[0]))
    if along[0] < 0 or along[-1] >= rows.parts:
        raise Declined("some programs have no rows", location(use.stmts[0]))
    return GridAxis(number, tuple(int(np.searchsorted(along, part)) for part in range(rows.parts + 1)))


Tiles = tuple[list[ir.Stmt], dict[ir.Var, ir.PrimExpr]]
"""Statements that compute a program's tile, the first of which binds the unit's rank, and values of the indices of
programs after them."""


def reordered(launch: Launch, axis: GridAxis, rank: ir.Var, order: TileOrder) -> Tiles:
    """Tiles in another order. Raises Declined: parts with different numbers of tiles."""
    shape = [ir.integer(n) for n in launch.grid]
    each = np.diff(axis.first)
    if (each != each[0]).any():
        raise Declined("the parts have different numbers of tiles")
    if math.prod(shape[axis.number + 1 :]) > 1:
        return _linear(launch, shape, axis, rank, order)
    index, height, parts = launch.programs[axis.number], int(each[0]), len(each)
    var, bind = bound(f"{index.name}_tile", order.part(index // height, rank, parts) * height + index % height)
    return [bind], {index: var}


def _linear(launch: Launch, shape: list[int], axis: GridAxis, rank: ir.Var, order: TileOrder) -> Tiles:
    """Part after part, where tiles of one part are not neighbours in the order in which programs start."""
    number, height, parts = axis.number, axis.first[1], len(axis.first) - 1
    place: Any = 0
    for var, extent in reversed(list(zip(launch.programs, shape, strict=True))):
        place = place * extent + var
    inside = [*shape[:number], height, *shape[number + 1 :]]
    start, bind = bound("iteration", place)
    stmts, mapping, left = [bind], {}, start % math.prod(inside)
    for i, (var, extent) in enumerate(zip(launch.programs, inside, strict=True)):
        value = left % extent
        left = left // extent
        if i == number:
            value = order.part(start // math.prod(inside), rank, parts) * height + value
        mapping[var], bind = bound(f"{var.name}_tile", value)
        stmts.append(bind)
    return stmts, mapping


def _parts_in_order(use: TensorUse, rank: ir.Var, order: TileOrder, parts: int) -> Tiles:
    """Tiles in another order where one axis of the grid is the part."""
    part = last_axis(use)
    var, bind = bound(f"{part.name}_tile", order.part(part, rank, parts))
    return [bind], {part: var}


def last_axis(use: TensorUse) -> ir.Var:
    """The number of the part, if that is the last axis of the grid. Raises Declined if it is not."""
    last = use.launch.programs[-1]
    if use.part is None or not use.part.same_as(last):
        raise Declined("the last axis of the grid is not that of the parts", location(use.stmts[0]))
    return last


def tiles_in(
    order: TileOrder, use: TensorUse, rows: Partition, uses: AccessMaps, move: Move, level: str
) -> Tiles | None:
    """The tiles of a grid in an order, where possible and requested by `move`, which records it."""
    if not move.ordered:
        return None
    try:
        check_order(use.phase, use.launch, uses.machine)
        rank, bind = rank_of(level)
        if uses.symbolic:
            stmts, mapping = _parts_in_order(use, rank, order, rows.parts)
        else:
            stmts, mapping = reordered(use.launch, axis_of(use, rows, uses, level), rank, order)
    except Declined as reason:
        move.ordered = False
        move.why += f"; tiles in program order: {reason.reason}"
        return None
    return [bind, *stmts], mapping


def with_tiles(phase: GridPhase, tiles: Tiles | None, rewriter: LaunchRewriter) -> GridPhase:
    """A phase with all that `rewriter` change in it, on these tiles; None: as written."""
    stmt = rewriter.statement(phase.stmt)
    if tiles is None:
        return GridPhase(stmt)
    stmts, mapping = tiles
    return GridPhase(tir.sequence([*stmts, ir.substitute(stmt, mapping)]))
