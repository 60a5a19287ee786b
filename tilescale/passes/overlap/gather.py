# SPDX-License-Identifier: MIT
"""An all-gather and the grids that read its result.

Why: all devices wait for the whole of a tensor although each tile reads rows of one part. Before: a gather, then grids.
After: the gather is started on the copy queue, a chunk of rows at a time, each with a flag; a tile waits for the flags
of the rows that it reads; the first grid works on the local part first and then on the others in the order in which
they arrive. A gather along columns is handled by `columns.py`. Declines one along further dimensions, one whose result
is used outside of grids, and the cases of `legality.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilelang_core.trace import call
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.arrival_reduce import copy
from tilescale.passes.overlap.chunks import RowChunks, flag, put
from tilescale.passes.overlap.columns import overlap_columns
from tilescale.passes.overlap.estimate import choose_rows, gathered
from tilescale.passes.overlap.legality import CollectiveSite, check_unwritten, is_behind_waiting
from tilescale.passes.overlap.local_rows import check_source, split_by_source
from tilescale.passes.overlap.partition import Partition, check_whole
from tilescale.passes.overlap.producers_consumers import check_some, readers_of
from tilescale.passes.overlap.raster import Raster
from tilescale.passes.overlap.rewriter import LaunchRewriter, located, rank_of
from tilescale.passes.overlap.schedule import Move
from tilescale.passes.overlap.tile_order import ArrivalOrder, tiles_in, with_tiles
from tilescale.program.asynchronous import PartLayout
from tilescale.program.dependence import Dependence, ProgramStep
from tilescale.program.model import location
from tilescale.program.ops import ALL_GATHER


@dataclass(frozen=True)
class _SplitGather:
    site: CollectiveSite
    uses: AccessMaps
    rows: Partition
    readers: tuple[TensorUse, ...]

    @property
    def level(self) -> str:
        return self.site.made.level


def overlap_gather(
    site: CollectiveSite, mine: ProgramStep, graph: Dependence, uses: AccessMaps, move: Move
) -> ir.PrimFunc:
    """The program with a gather overlapped with the grids that read it; `move` records the choice.

    Raises:
        Declined: it stays unchanged.
    """
    if not site.made.is_in_place and site.made.axis == 1:
        return overlap_columns(site, mine, graph, uses, move)
    rows = rows_of(site, uses)
    target, source = (uses.names.root(ir.region_parts(r)[0].data) for r in (site.made.target, site.made.source))
    check_unwritten(source, mine, graph, "what it sends")
    check_unwritten(target, mine, graph, "its result")
    readers = readers_of(target, mine, graph, uses, rows)
    while (deeper := readers[0].deeper) and all(use.deeper for use in readers):
        rows, readers = deeper, readers_of(target, mine, graph, uses, deeper)
    gather = _SplitGather(site, uses, rows, readers)
    check_some(gather.readers[0], rows, uses, gather.level)
    chunk = choose_rows(site, uses, rows, readers, move, gathered)
    rewriter = LaunchRewriter(uses.program, site.launch, uses.machine)
    chunks = RowChunks(rows, chunk, move.chunks)
    flags = rewriter.alloc_flags(f"{rows.buffer.name}_here", chunks.shape)
    move.why = "each tile waits for the rows that it reads"
    for use in readers:
        rewriter.before(use.stmts[0], chunks.waits(use, uses, gather.level, flags))
    first = readers[0]
    if (raster := _reads_source(gather, move)) is not None:
        started = chunks.to_others(gather.level, _send(gather, chunks, flags))
        changed = split_by_source(first, site, rewriter, raster)
    else:
        started = _started(gather, flags, chunk, in_place=is_behind_waiting(mine, graph))
        changed = with_tiles(first.phase, tiles_in(ArrivalOrder(), first, rows, uses, move, gather.level), rewriter)
    rewriter.statements.append((site.stmt, tir.sequence(located(started, site.stmt))))
    rewriter.phases.append((first.phase, (changed,)))
    return rewriter.apply()


def _reads_source(gather: _SplitGather, move: Move) -> Raster | None:
    """The programs whose tiles read local rows from the source, if `move` asks for that; it records whether they do."""
    if move.local is None:
        return None
    try:
        raster = check_source(gather.site, gather.readers, gather.uses, move)
    except Declined as reason:
        move.local = move.group = move.blocks = None
        move.why += f"; local rows are copied: {reason.reason}"
        return None
    move.why += ", local rows from the source"
    return raster


def rows_of(site: CollectiveSite, uses: AccessMaps) -> Partition:
    """Row numbering of the result."""
    made = site.made
    (_, _, own), (whole, _, extents) = ir.region_parts(made.source), ir.region_parts(made.target)
    if made.is_in_place or made.axis != 0:
        raise Declined("it does not gather along the first dimension", location(site.stmt))
    check_whole(made.target, "gathers into", location(site.stmt))
    if whole.data in uses.names.views:
        raise Declined(f"it gathers into a view of {uses.names.views[whole.data].base.name!r}", location(site.stmt))
    return Partition(whole, uses.sizes[made.level], PartLayout.of(own, extents).slots)


# -- chunks ------------------------------------------------------------------------------------------------------------


def _started(gather: _SplitGather, flags: ir.Buffer, chunk: int, *, in_place: bool) -> list[ir.Stmt]:
    """The gather, started on the copy queue.

    Args:
        in_place: whether the device itself copies the local part into the result before.
    """
    made, rows = gather.site.made, gather.rows
    if chunk % rows.inner:
        return _sent(gather, RowChunks(rows, chunk), flags)
    whole = tir.region(flags, [ir.IntImm("int32", 0)] * 2, flags.shape, "rw")
    source, before = made.source, []
    if in_place:
        rank, rank_is = rank_of(made.level)
        before = [rank_is, copy(source, rows.region(rank, 0, rows.height, "w"))]
        source = rows.region(rank, 0, rows.height, "r")
    notes: dict[str, Any] = {"level": made.level, "dim": 0, "chunk": chunk // rows.inner}
    return [*before, tir.evaluate(call(ALL_GATHER, source, made.target, whole, **notes))]


def _sent(gather: _SplitGather, chunks: RowChunks, here: ir.Buffer) -> list[ir.Stmt]:
    """Copies of chunks that are not whole indices of the first dimension, and of the local part into the result."""
    made, rows = gather.site.made, gather.rows
    rank, rank_is = rank_of(made.level)
    home = copy(made.source, rows.region(rank, 0, rows.height, "w"))
    sent = chunks.to_others(made.level, _send(gather, chunks, here))
    return [*sent, rank_is, home, *chunks.told(here, rank)]


def _send(gather: _SplitGather, chunks: RowChunks, here: ir.Buffer) -> Callable[[Any, Any, Any], ir.Stmt]:
    """The copy of a chunk of a rank's rows to a peer."""
    made, rows = gather.site.made, gather.rows
    source, begins, extents = ir.region_parts(made.source)
    leading = len(extents) - len(rows.buffer.shape) + rows.slots

    def some(first: Any, count: Any) -> ir.Call:
        places, sizes = rows.box(first, count)
        inside = slice(leading, leading + rows.depth)
        at, of = list(begins), list(extents)
        at[inside] = [begin + place for begin, place in zip(begins[inside], places, strict=True)]
        of[inside] = sizes
        return tir.region(source, at, of, "r")

    def part(rank: Any, peer: Any, chunk: Any) -> ir.Stmt:
        first, count = chunk * chunks.rows, chunks.count(chunk)
        return put(made.level, some(first, count), rows.region(rank, first, count, "w"), peer, flag(here, rank, chunk))

    return part
