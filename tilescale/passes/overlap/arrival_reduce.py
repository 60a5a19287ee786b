# SPDX-License-Identifier: MIT
"""The reduction grid for arrived parts: each unit adds its own rows, in the order of ranks, independent of arrival.

The grid is persistent over small tiles. For each tile a program iterates over the units, waits for the chunk of each,
and combines it in float32 where the type is narrower: the bits equal those of the sequential collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.chunks import RowChunks, wait
from tilescale.passes.overlap.rewriter import LaunchRewriter, bound, rank_of
from tilescale.program.model import GridPhase, Launch

COMBINED: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "prod": lambda a, b: a * b,
    "max": lambda a, b: _either(a > b, a, b),
    "min": lambda a, b: _either(a < b, a, b),
}
"""Combination of two elements, by the name of the reduction. A NaN of either stays, as in the collective."""


def _either(first: Any, a: Any, b: Any) -> ir.PrimExpr:
    if "float" in str(a.dtype):
        first = ir.Or(first, tir.call(tl.ISNAN, a, dtype="bool"))
    return ir.Select(first, a, b)

_PER_THREAD, _WIDEST = 16, 256
"""Elements of a tile for each thread, and its largest number of columns: two such tiles fit into registers."""


@dataclass(frozen=True)
class ArrivalReduce:
    """Parts that a unit's own rows are combined of.

    Attributes:
        own: the unit's contribution, with rows as in `chunks.of`.
        inbox: those of the others, a part of each unit.
        here: flags (units, chunks), raised when a chunk of a unit has arrived.
        result: the destination of a rank's rows: a region (rows, columns), maybe with a leading 1.
        op: one of `COMBINED`.
        count: signals that a chunk of a rank's own rows gets from each other unit.
    """

    own: ir.Buffer
    inbox: ir.Buffer
    here: ir.Buffer
    result: Callable[[Any], ir.Call]
    op: str
    chunks: RowChunks
    level: str
    count: Callable[[Any, Any], Any] = lambda rank, chunk: 1

    def fragments(self, rewriter: LaunchRewriter, shape: tuple[int, int]) -> tuple[ir.Buffer, ir.Buffer]:
        """Fragments in which a program holds a unit's part of a tile, and the total."""
        name, dtype = self.own.name, str(self.own.dtype)
        part = rewriter.alloc(f"{name}_part", shape, dtype, "local.fragment")
        return part, rewriter.alloc(f"{name}_total", shape, _wider(dtype), "local.fragment")

    def to(self, rank: Any, row: Any, column: Any, shape: tuple[int, int]) -> ir.Call:
        """Destination of a tile of this rank's rows."""
        buffer, begins, _ = ir.region_parts(self.result(rank))
        rows = self.chunks.of
        leading, spot = len(begins) - 1 - rows.depth, rows.spot(row, column)
        places = [*begins[:leading], *(begin + place for begin, place in zip(begins[leading:], spot, strict=True))]
        return tir.region(buffer, places, [*[1] * leading, *rows.of_tile(*shape)], "w")

    def added(self, rank: Any, row: Any, column: Any, own: ir.Call, part: ir.Buffer, total: ir.Buffer) -> ir.Stmt:
        """A tile of all units combined: the first one's part is the total, the others' go to it. `own`: where the
        unit's own part of the tile is."""
        shape, unit = [ir.integer(n) for n in part.shape], ir.Var("unit", "int32")
        rows = self.chunks.of
        sent = tir.region(self.inbox, [unit, *rows.spot(row, column)], [1, *rows.of_tile(*shape)], "r")
        chunk = rows.place(row, column)[0] // self.chunks.rows
        awaited = wait(self.here, unit, chunk, value=self.count(rank, chunk))
        arrived = tir.sequence([awaited, copy(sent, whole(part, "w"))])
        loops = tir.loop_variables(shape)
        value = ir.BufferLoad(part, loops)
        value = value if part.dtype == total.dtype else ir.Cast(str(total.dtype), value)
        combined = COMBINED[self.op](ir.BufferLoad(total, loops), value)
        first, other = (tir.parallel(loops, shape, ir.BufferStore(total, v, loops)) for v in (value, combined))
        body = tir.sequence(
            [
                ir.IfThenElse(ir.EQ(unit, rank), copy(own, whole(part, "w")), arrived),
                ir.IfThenElse(ir.EQ(unit, ir.IntImm("int32", 0)), first, tir.renamed(other)),
            ]
        )
        return _serial(unit, self.chunks.of.parts, body)


def sum_of(arrivals: ArrivalReduce, rewriter: LaunchRewriter, after: Callable[[Any], list[ir.Stmt]]) -> GridPhase:
    """The phase. Raises Declined: extents are known at launch only. `after`: statements after the store of a tile, from
    the tile's first row."""
    launch, rows = rewriter.launch, arrivals.chunks.of
    if ir.constants((*rows.buffer.shape, *launch.grid)) is None:
        raise Declined("a separate grid needs extents that are known before the launch", launch.where)
    high, wide = tile_shape(launch, arrivals.chunks)
    matrix = rows.place(rows.height, rows.across)
    down, across = (-(-extent // size) for extent, size in zip(matrix, (high, wide), strict=True))
    part, total = arrivals.fragments(rewriter, (high, wide))
    rank, rank_is = rank_of(arrivals.level)
    number = _number(launch)
    programs = math.prod(ir.integer(n) for n in launch.grid)
    iteration = ir.Var("iteration", "int32")
    tile, tile_is = bound("tile", number + iteration * programs)
    row, row_is = bound("row", tile // across * high)
    column = tile % across * wide
    first, other = rows.place(row, column)
    at = [rank, *rows.spot(row, column)] if rows.slots else rows.spot(*rows.place(rank * rows.height + first, other))
    own = tir.region(arrivals.own, at, [*[1] * rows.slots, *rows.of_tile(high, wide)], "r")
    body = [
        tile_is,
        row_is,
        arrivals.added(rank, row, column, own, part, total),
        copy(whole(total, "r"), arrivals.to(rank, row, column, (high, wide))),
        *after(row),
    ]
    iterations = ir.simplify((down * across - number + programs - 1) // programs, {})
    return GridPhase(tir.sequence([rank_is, _serial(iteration, iterations, tir.sequence(body))]))


def tile_shape(launch: Launch, chunks: RowChunks) -> tuple[int, int]:
    """Rows and columns of a tile: whole tiles make a chunk, also the last one of a part."""
    even = math.gcd(chunks.rows, chunks.of.height, chunks.of.extents[-1])
    elements = launch.thread_count * _PER_THREAD
    if chunks.of.axis:
        wide = _divisor(even, _WIDEST)
        return min(chunks.of.across, max(1, elements // wide)), wide
    wide = min(chunks.of.across, _WIDEST)
    return _divisor(even, max(1, elements // wide)), wide


def _divisor(number: int, most: int) -> int:
    """Largest divisor of `number` up to `most`."""
    return max(n for n in range(1, min(most, number) + 1) if number % n == 0)


def _number(launch: Launch) -> Any:
    """A program's number, in the order in which they start."""
    number: Any = ir.IntImm("int32", 0)
    for var, extent in reversed(list(zip(launch.programs, launch.grid, strict=True))):
        number = number * extent + var
    return ir.simplify(number, {})


def _wider(dtype: str) -> str:
    """Type in which elements of a type are combined."""
    return "float32" if "float" in dtype and ir.bits(dtype) < 32 else dtype


def whole(buffer: ir.Buffer, access: str) -> ir.Call:
    """All of a tile as the argument of an operation."""
    return tir.region(buffer, [ir.IntImm("int32", 0)] * len(buffer.shape), buffer.shape, access)


def copy(source: ir.Call, target: ir.Call) -> ir.Stmt:
    """`T.copy(source, target)`."""
    return tir.tile_call("copy", source, target)


def _serial(var: ir.Var, extent: Any, body: ir.Stmt) -> ir.Stmt:
    return ir.For(var, ir.IntImm("int32", 0), ir.int_node(extent), ir.ForKind.SERIAL, body)
