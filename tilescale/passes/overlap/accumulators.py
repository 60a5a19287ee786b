# SPDX-License-Identifier: MIT
"""Local rows whose accumulators the other units' contributions are added to, before they are rounded and stored.

Why: registers that hold a tile and its accumulators leave no space for a third copy, and local rows are not rounded
twice. Before: each tile is rounded into shared memory, then stored and counted. After: a tile of local rows adds the
contributions to its accumulators in the order in which they were sent, each through the tile in shared memory, which
is rounded afterwards. So sums differ from those of the sequential program by the roundings of local rows. Declines
tiles that are not rounded from registers directly before their store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.tiles import TileCopy
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.arrival_reduce import COMBINED, ArrivalReduce, copy, whole
from tilescale.passes.overlap.chunks import wait
from tilescale.passes.overlap.epilogue import EpilogueTile, check_alone, is_free, stored
from tilescale.passes.overlap.rewriter import LaunchRewriter, bound
from tilescale.program.model import location


def add_to_accumulators(
    use: TensorUse,
    arrivals: ArrivalReduce,
    rank: ir.Var,
    others: Callable[[EpilogueTile], list[ir.Stmt]],
    rewriter: LaunchRewriter,
    uses: AccessMaps,
    after: Callable[[EpilogueTile], list[ir.Stmt]],
) -> None:
    """`epilogue.add_where_made`, with the contributions added to the accumulators of a tile.

    Raises Declined: they cannot be.
    """
    check_alone(use, arrivals, uses)
    (tile, begins), (store,), rows = stored(use), use.stmts, arrivals.chunks.of
    if rows.axis or rows.depth > 1 or tile.dtype != arrivals.inbox.dtype or not is_free(tile, store, use, uses):
        reason = f"the stored tile is not one of rows of {arrivals.inbox.dtype} in shared memory, or is used again"
        raise Declined(reason, location(store))
    rounding, sums = _rounded(tile, store, use, uses)
    (owner, row), column = use.place, begins[-1]
    high, wide = (ir.integer(n) for n in tile.shape)
    step = ir.Var("step", "int32")
    source, source_is = bound("source", (rank + rows.parts - step) % rows.parts)
    arrived = wait(arrivals.here, source, row // arrivals.chunks.rows, value=arrivals.count(rank, row))
    body = [source_is, arrived, *_loaded(tile, arrivals, source, row, column), _combined(sums, tile, arrivals.op)]
    adding = ir.For(step, ir.IntImm("int32", 1), ir.int_node(rows.parts - 1), ir.ForKind.SERIAL, tir.sequence(body))
    target = arrivals.to(rank, row, column, (high, wide))
    own = [adding, rounding, copy(whole(tile, "r"), target), *after(EpilogueTile(tile, row, column, rank, rank))]
    away = [rounding, *others(EpilogueTile(tile, row, column, owner, rank))]
    branch = ir.IfThenElse(ir.NE(owner, rank), tir.sequence(away), tir.sequence(own))
    rewriter.statements += [(rounding, tir.sequence([])), (store, tir.at(branch, store))]
    rewriter.in_order = True


def _rounded(tile: ir.Buffer, store: ir.Stmt, use: TensorUse, uses: AccessMaps) -> tuple[ir.Stmt, ir.Buffer]:
    """The copy of accumulators into a tile right before its store, and the accumulators. Raises Declined if there is
    none."""
    found: list[ir.Stmt] = []
    for stmt in ir.statements(use.phase.stmt):
        if isinstance(stmt, ir.SeqStmt):
            found += [s for s, behind in zip(stmt.seq, stmt.seq[1:], strict=False) if behind.same_as(store)]
    for stmt in found:
        if isinstance(stmt, ir.Evaluate) and ir.op_name(stmt.value) == tl.COPY:
            made = TileCopy.of(stmt.value)
            sums, target = (ir.region_parts(region)[0] for region in (made.source, made.target))
            same = target.data.same_as(tile.data) and ir.constants(sums.shape) == ir.constants(tile.shape)
            if same and ir.scope_kind(sums) == "fragment" and is_free(sums, store, use, uses, "fragment"):
                return stmt, sums
    raise Declined("the stored tile is not a copy of registers that are used no more", location(store))


def _loaded(tile: ir.Buffer, arrivals: ArrivalReduce, source: Any, row: Any, column: Any) -> list[ir.Stmt]:
    """A tile of what a unit has sent. Conditional loads would wait for one another: so rows beyond the last one repeat
    it and are not stored, and only tiles that end beyond the last column have conditions."""
    (high, wide), rows = tile.shape, arrivals.chunks.of
    height, across = ir.int_node(rows.height), ir.int_node(rows.across)

    def some(repeats: bool, ends: bool = False) -> ir.Stmt:
        i, j = loops = tir.loop_variables(tile.shape)
        place = ir.Min(row + i, height - 1) if repeats else row + i
        value = ir.BufferLoad(arrivals.inbox, [source, place, column + j])
        if ends:
            value = tir.call(tl.IF_THEN_ELSE, column + j < across, value, ir.Cast(str(tile.dtype), 0), dtype=tile.dtype)
        return tir.parallel(loops, tile.shape, ir.BufferStore(tile, value, loops))

    begun, loads = [], some(repeats=False)
    repeats = ir.constant(height % high) != 0
    if repeats:
        begun = [tir.evaluate(tir.call(tl.ASSUME, height >= 1, dtype="bool"))]
        loads = ir.IfThenElse(row + high <= height, loads, some(repeats))
    if ir.constant(across % wide) != 0:
        loads = ir.IfThenElse(column + wide <= across, loads, some(repeats, ends=True))
    return [*begun, loads]


def _combined(total: ir.Buffer, part: ir.Buffer, op: str) -> ir.Stmt:
    """Combine a tile with accumulators, in their type."""
    loops = tir.loop_variables(total.shape)
    value = COMBINED[op](ir.BufferLoad(total, loops), ir.Cast(str(total.dtype), ir.BufferLoad(part, loops)))
    return tir.parallel(loops, total.shape, ir.BufferStore(total, value, loops))
