# SPDX-License-Identifier: MIT
"""An all-gather along columns, and the grids that read its result.

Why: all devices wait for the whole matrix although a tile reads some rows of it; each device has some columns. Before:
a gather, then grids. After: each device copies its own columns into the result, and its copy queue sends them to the
others, a chunk of rows after the other; a tile waits until all devices have sent the chunks that it reads. Tiles keep
their order: rows arrive from the first to the last. Declines tensors that are not matrices, and the cases of
`legality.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.arrival_reduce import copy
from tilescale.passes.overlap.chunks import RowChunks, flag, put, wait
from tilescale.passes.overlap.estimate import RowTransport, choose_rows
from tilescale.passes.overlap.legality import CollectiveSite, check_unwritten
from tilescale.passes.overlap.partition import Partition, check_whole
from tilescale.passes.overlap.producers_consumers import check_some, readers_of
from tilescale.passes.overlap.rewriter import LaunchRewriter, located, rank_of
from tilescale.passes.overlap.schedule import Move
from tilescale.passes.overlap.tile_cost import TileWork
from tilescale.program.dependence import Dependence, ProgramStep
from tilescale.program.model import location


def overlap_columns(
    site: CollectiveSite, mine: ProgramStep, graph: Dependence, uses: AccessMaps, move: Move
) -> ir.PrimFunc:
    """Overlap a gather along columns with the grids that read its result; record the choice in `move`.

    Raises:
        Declined: it stays unchanged.
    """
    rows, made = _rows(site, uses), site.made
    target, source = (uses.names.root(ir.region_parts(r)[0].data) for r in (made.target, made.source))
    check_unwritten(source, mine, graph, "what it sends")
    check_unwritten(target, mine, graph, "its result")
    readers = readers_of(target, mine, graph, uses, rows)
    check_some(readers[0], rows, uses, made.level)
    units = uses.sizes[made.level]
    chunks = RowChunks(rows, choose_rows(site, uses, rows, readers, move, _gathered, units), move.chunks)
    rewriter = LaunchRewriter(uses.program, site.launch, uses.machine)
    here = rewriter.alloc_flags(f"{rows.buffer.name}_here", (units, chunks.shape[1]))
    rewriter.statements.append((site.stmt, tir.sequence(located(_sent(site, chunks, here, units), site.stmt))))
    for use in readers:
        rewriter.before(use.stmts[0], _waits(use, chunks, here, uses, made.level))
    move.ordered, move.why = False, "each tile waits for the rows that it reads, of the columns of all"
    return rewriter.apply()


def _rows(site: CollectiveSite, uses: AccessMaps) -> Partition:
    made, where = site.made, location(site.stmt)
    (_, _, own), (whole, _, extents) = ir.region_parts(made.source), ir.region_parts(made.target)
    if len(extents) != 2 or len(own) != 2:
        raise Declined("it is not a matrix", where)
    check_whole(made.target, "gathers into", where)
    if whole.data in uses.names.views:
        raise Declined(f"it gathers into a part of {whole.name!r}", where)
    return Partition(whole, 1, slots=False)


def _gathered(travel: RowTransport, chunk: int, work: TileWork) -> float:
    """Seconds until a grid ends that processes chunks of rows when all units' columns of them are there."""
    steps = [(travel.parts - 1) * travel.sending(rows) for rows in travel.cut(chunk)]
    return travel.keeping(travel.height) + float(work.done(travel.queue.startup + np.cumsum(steps))[-1])


def _sent(site: CollectiveSite, chunks: RowChunks, here: ir.Buffer, units: int) -> list[ir.Stmt]:
    """This device's columns copied into the result, and copies of them to all other devices, chunk by chunk."""
    whole, height = chunks.of.buffer, chunks.of.height
    source, begins, own = ir.region_parts(site.made.source)
    wide, step, chunk = own[1], ir.Var("step", "int32"), ir.Var("chunk", "int32")
    rank, rank_is = rank_of(site.made.level)

    def rows(buffer: ir.Buffer, at: list[Any], first: Any, count: Any, access: str) -> ir.Call:
        return tir.region(buffer, [at[0] + first, at[1]], [count, wide], access)

    place, first, count = [0, rank * wide], chunk * chunks.rows, chunks.count(chunk)
    regions = rows(source, begins, first, count, "r"), rows(whole, place, first, count, "w")
    sent = put(site.made.level, *regions, (rank + step) % units, flag(here, rank, chunk))
    each = ir.For(step, 1, units - 1, ir.ForKind.SERIAL, sent)
    home = copy(rows(source, begins, 0, height, "r"), rows(whole, place, 0, height, "w"))
    return [rank_is, home, ir.For(chunk, 0, chunks.each, ir.ForKind.SERIAL, each)]


def _waits(use: TensorUse, chunks: RowChunks, here: ir.Buffer, uses: AccessMaps, level: str) -> list[ir.Stmt]:
    """Waits for the rows that a use reads, from all other units: one by one for rows of one chunk, before which a
    pipelined loop keeps its producer; else in a loop."""
    chunk, units = ir.Var("chunk", "int32"), uses.sizes[level]
    rank, rank_is = rank_of(level)
    first, last = chunks.number(use.begin), chunks.number(use.end - 1)
    if chunks.span(use, uses, level) == (1, True):
        return [rank_is, *(wait(here, (rank + step) % units, first) for step in range(1, units))]
    each = tir.sequence([wait(here, (rank + step) % units, chunk) for step in range(1, units)])
    count = ir.Max(last - first + 1, ir.IntImm("int32", 0))
    return [rank_is, ir.For(chunk, first, count, ir.ForKind.SERIAL, each)]
