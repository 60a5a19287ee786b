# SPDX-License-Identifier: MIT
"""Chunks of rows: each is sent with a separate flag, and tiles wait for, or count, those that they touch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilelang_core.trace import call
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.partition import Partition
from tilescale.passes.overlap.rewriter import bound, rank_of
from tilescale.passes.overlap.tile_order import DepartureOrder, TileOrder
from tilescale.program.ops import COPY, SIGNAL, WAIT

LARGEST = (1 << 31) - 1
"""Extents are below."""

MOST_APART = 4
"""Chunks that a tile waits for one by one; for more it waits in a loop."""


@dataclass(frozen=True)
class RowChunks:
    """The rows of a tensor in chunks: `each` chunks a part, of `rows` rows, which may be an expression, the last one of
    the remainder. `most`: flags of a part where its rows are known at launch only; None: as many as it has chunks. One
    flag is for all rows of a part."""

    of: Partition
    rows: Any
    most: int | None = None

    @property
    def each(self) -> Any:
        """Chunks of a part."""
        return 1 if self.most == 1 else (self.of.height + self.rows - 1) // self.rows

    @property
    def shape(self) -> tuple[int, Any]:
        """Parts and chunks of each: the shape of flags for all of them."""
        return self.of.parts, self.each if self.most is None or isinstance(self.each, int) else self.most

    def place(self, row: Any) -> tuple[Any, Any]:
        """The part that has a row, and the chunk of that part."""
        return row // self.of.height, row % self.of.height // self.rows

    def number(self, row: Any) -> Any:
        """The same as one number."""
        part, chunk = self.place(row)
        return part * self.each + chunk

    def touched(self, use: TensorUse, uses: AccessMaps, level: str) -> Iterator[tuple[Any, Any, Any]]:
        """For each iteration of a use on each unit of a level: first and last chunk, and whether it is executed."""
        for begin, end, runs in uses.by_rank(use, level):
            yield self.number(begin), self.number(end - 1), runs

    def count(self, chunk: Any) -> Any:
        if self.most == 1:
            return self.of.height
        if ir.constant(self.of.height % self.rows) == 0:
            return self.rows
        return ir.Min(ir.int_node(self.rows), self.of.height - chunk * self.rows)

    def to_others(
        self, level: str, make: Callable[[Any, Any, Any], ir.Stmt], order: TileOrder | None = None
    ) -> list[ir.Stmt]:
        """Statements of a unit for each other unit, and each chunk: made of its rank, the other's, and the chunk.
        `order`: of the other units; the next one first if left out."""
        every = lambda rank, peer: self.all(lambda chunk: make(rank, peer, chunk))  # noqa: E731
        return to_others(level, self.of.parts, every, order)

    def all(self, make: Callable[[Any], ir.Stmt]) -> ir.Stmt:
        """A statement for each chunk of a part."""
        chunk = ir.Var("chunk", "int32")
        return ir.For(chunk, 0, self.each, ir.ForKind.SERIAL, make(chunk))

    def waits(self, use: TensorUse, uses: AccessMaps, level: str, flags: ir.Buffer) -> list[ir.Stmt]:
        """Waits for all chunks that a use reads."""
        most, always = self.span(use, uses, level)
        if not always or most > MOST_APART or most == 1 and not use.looks_up:
            return self._once(use, most, always, lambda part, chunk: wait(flags, part, chunk))
        first, last = (ir.simplify(self.number(row), use.ranges) for row in (use.begin, use.end - 1))
        binds: list[ir.Stmt] = []
        if use.looks_up:
            last, last_is = bound("last_chunk", last)
            first, first_is = bound("first_chunk", ir.Min(first, last))  # none may be left there
            binds = [last_is, first_is]
        numbers = [first, *(ir.Min(first + i, last) for i in range(1, most))]
        return [*binds, *(wait(flags, number // self.each, number % self.each) for number in numbers)]

    def across(self, use: TensorUse, uses: AccessMaps, level: str, flags: ir.Buffer) -> tuple[ir.Stmt, ir.Stmt]:
        """A statement, and the same with waits for the rows that a use reads of all other units. A loop over the parts
        waits for each where it begins; else all are awaited before, one by one for rows of one chunk, before which a
        pipelined loop keeps its producer."""
        (rank, rank_is), units, chunk = rank_of(level), uses.sizes[level], ir.Var("chunk", "int32")
        if use.tiles and use.loops:
            loop, part = use.loops[-1], use.tiles.part
            other = ir.IfThenElse(ir.NE(part, rank), tir.sequence(self.waits(use, uses, level, flags)), None)
            return loop, tir.sequence([rank_is, waiting_at_each(use.tiles.iterations(loop), loop, other)])
        first, last = self.number(use.begin), self.number(use.end - 1)
        if units == 1 or self.span(use, uses, level) == (1, True):
            waits = [wait(flags, (rank + step) % units, first) for step in range(1, units)]
        else:
            each = tir.sequence([wait(flags, (rank + step) % units, chunk) for step in range(1, units)])
            count = ir.Max(last - first + 1, ir.IntImm("int32", 0))
            waits = [ir.For(chunk, first, count, ir.ForKind.SERIAL, each)]
        stmt = use.stmts[0]
        return stmt, tir.sequence([*(tir.at(s, stmt) for s in (rank_is, *waits)), stmt])

    def signals(self, flags: ir.Buffer, part: Any) -> list[ir.Stmt]:
        """Signals that all of a part is there."""
        return [self.all(lambda chunk: signal(flags, part, chunk))]

    def counts(self, use: TensorUse, uses: AccessMaps, level: str, flags: ir.Buffer) -> list[ir.Stmt]:
        """Signals of a grid's tile to the flags of the chunks that it has written."""
        return self._once(use, *self.span(use, uses, level), lambda part, chunk: signal(flags, part, chunk))

    def span(self, use: TensorUse, uses: AccessMaps, level: str) -> tuple[int, bool]:
        """Largest number of chunks that a tile touches, and whether every tile touches at least one."""
        if self.most == 1 and use.part is not None:
            return 1, True
        if uses.symbolic:
            return (1, True) if use.tiles and ir.constant(self.rows % use.tiles.step) == 0 else (0, False)
        if use.looks_up:
            if use.high is None:
                return self.of.parts * self.each, False
            return (use.high + self.rows - 2) // self.rows + 1, True
        numbers = [(last - first + 1)[runs] for first, last, runs in self.touched(use, uses, level)]
        every = np.concatenate(numbers)
        return int(every.max(initial=0)), bool((every > 0).all())

    def _first(self, use: TensorUse) -> tuple[Any, Any]:
        if self.most == 1 and use.part is not None:
            return use.part, 0
        if use.tiles is not None:
            return use.tiles.part, ir.simplify(use.tiles.row // self.rows, use.ranges)
        part, chunk = (ir.simplify(number, use.ranges) for number in self.place(use.begin))
        return part, chunk

    def _once(self, use: TensorUse, most: int, always: bool, make: Callable[[Any, Any], ir.Stmt]) -> list[ir.Stmt]:
        if most == 1 and always:
            return [make(*self._first(use))]
        if use.part is not None and use.box is not None and self.of.depth == 1:
            return self._of_part(use.part, use.box[self.of.dimensions[-1]], use.ranges, make)
        chunk, first = ir.Var("chunk", "int32"), ir.simplify(self.number(use.begin), use.ranges)
        count = ir.simplify(self.number(use.end - 1) - first + 1, use.ranges)
        extent = ir.Max(count, ir.IntImm("int32", 0))
        return [ir.For(chunk, first, extent, ir.ForKind.SERIAL, make(chunk // self.each, chunk % self.each))]

    def _of_part(
        self, part: Any, rows: tuple[Any, Any] | None, ranges: dict[ir.Var, tuple[int, int]], make: Callable
    ) -> list[ir.Stmt]:
        """A statement for each chunk that has some rows of a part, which may end behind its last one."""
        begin, end = map(ir.int_node, rows or (0, self.of.height))
        known = ranges | {var: (0, LARGEST) for n in self.of.buffer.shape for var in ir.variables(n)}
        each, each_is = bound("chunk_rows", ir.int_node(self.rows))
        first, first_is = bound("first_chunk", ir.Div(ir.simplify(begin, known), each))
        last = ir.Div(ir.simplify(ir.Min(end, ir.int_node(self.of.height)) - 1, known), each)
        chunk = ir.Var("chunk", "int32")
        count = ir.Max(last - first + 1, ir.IntImm("int32", 0))
        return [each_is, first_is, ir.For(chunk, first, count, ir.ForKind.SERIAL, make(part, chunk))]


def to_others(
    level: str, parts: int, make: Callable[[Any, Any], ir.Stmt], order: TileOrder | None = None
) -> list[ir.Stmt]:
    """Statements of a unit for each other unit of `parts`: made of its rank and the other's. `order`: of the other
    units; the next one first if left out."""
    if parts == 1:
        return []
    order, step, (rank, rank_is) = order or DepartureOrder(), ir.Var("step", "int32"), rank_of(level)
    each = make(rank, order.part(step, rank, parts))
    return [rank_is, ir.For(step, order.others, parts - 1, ir.ForKind.SERIAL, each)]


def waiting_at_each(count: Any, loop: ir.For, waiting: ir.Stmt) -> ir.For:
    """A loop with a wait in the first of every `count` iterations, before all else: so it keeps its producer."""
    begins = ir.EQ(loop.loop_var % count, ir.IntImm("int32", 0))
    return tir.relooped(loop, body=tir.sequence([tir.at(ir.IfThenElse(begins, waiting, None), loop), loop.body]))


def flag(flags: ir.Buffer, *index: Any) -> ir.Call:
    """An element of flags as the argument of an operation."""
    places = [ir.simplify(ir.int_node(i), {}) for i in index]
    return tir.region(flags, places, [ir.IntImm("int32", 1)] * len(places), "rw")


def wait(flags: ir.Buffer, *index: Any, value: Any = 1) -> ir.Stmt:
    """`T.wait(flags[index], ">=", value)`."""
    return tir.evaluate(call(WAIT, flag(flags, *index), ir.int_node(value), compare=">="))


def signal(flags: ir.Buffer, *index: Any) -> ir.Stmt:
    """`T.signal(flags[index])`."""
    return tir.evaluate(call(SIGNAL, flag(flags, *index), ir.IntImm("int32", 1), op="add"))


def put(
    level: str,
    source: ir.Call,
    target: ir.Call,
    peer: Any,
    arrived: ir.Call,
    after: tuple[ir.Call, Any] | tuple[()] = (),
) -> ir.Stmt:
    """`T.copy(source, target, dst=peer, signal=arrived, after=(flag, ">=", value))`."""
    notes: dict[str, Any] = {"level": level, "far": "dst", "op": "add", "after": ">=" if after else None}
    return tir.evaluate(call(COPY, source, target, peer, arrived, ir.IntImm("int32", 1), *after, **notes))
