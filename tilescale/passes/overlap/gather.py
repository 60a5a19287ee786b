# SPDX-License-Identifier: MIT
"""An all-gather and the grids that read its result.

Why: all devices wait for the whole of a tensor although each tile reads rows of one part. Before: a gather, then grids.
After: the gather is started on the copy queue, a chunk of rows at a time, each with a flag; a tile waits for the flags
of the rows that it reads; the first grid works on the local part first and then on the others in the order in which
they arrive. Where a tile reads rows of all parts, in a loop over these or of a matrix whose columns are gathered, each
chunk is sent to all units before the next one, and tiles stay as written; in such a loop, chunks that a grid makes are
sent when their tiles are counted. Declines gathers along further dimensions, those whose result is used outside of
grids, and the cases of `legality.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilelang_core.trace import call
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.arrival_reduce import copy
from tilescale.passes.overlap.chunks import RowChunks, flag, put, to_others
from tilescale.passes.overlap.estimate import RowTransport, choose_rows, gathered, gathered_across, sliced
from tilescale.passes.overlap.legality import CollectiveSite, check_unwritten, is_behind_waiting
from tilescale.passes.overlap.local_rows import check_source, split_by_source
from tilescale.passes.overlap.partition import Partition, check_whole
from tilescale.passes.overlap.producers_consumers import check_some, counted, counting, maker_of, readers_of
from tilescale.passes.overlap.raster import Raster, check_free
from tilescale.passes.overlap.rewriter import LaunchRewriter, located, rank_of
from tilescale.passes.overlap.schedule import CALLER, Move
from tilescale.passes.overlap.slices import ColumnSlices
from tilescale.passes.overlap.tile_cost import TileWork
from tilescale.passes.overlap.tile_order import ArrivalOrder, tiles_in, with_tiles
from tilescale.program.asynchronous import PartLayout
from tilescale.program.dependence import Dependence, ProgramStep
from tilescale.program.model import DevicePhase, GridPhase, location
from tilescale.program.operations import Rank, operation
from tilescale.program.ops import ALL_GATHER


@dataclass(frozen=True)
class _SplitGather:
    """A gather that is taken apart.

    Attributes:
        readers: reads of its result, one for each grid.
        pieces: what is sent with one flag.
        flags: one for each piece of each part.
        across: whether a tile reads rows of all parts.
        maker: the write of the source by a grid before, whose tiles are counted; None: it is there before.
    """

    site: CollectiveSite
    uses: AccessMaps
    move: Move
    rows: Partition
    readers: tuple[TensorUse, ...]
    pieces: RowChunks | ColumnSlices
    flags: ir.Buffer
    across: bool
    maker: TensorUse | None = None

    @property
    def level(self) -> str:
        return self.site.made.level

    @property
    def units(self) -> int:
        return self.uses.sizes[self.level]

    def part(self, rank: Any, first: Any, count: Any) -> ir.Call:
        """Destination of some rows of a rank."""
        if self.site.made.axis == 0:
            return self.rows.region(rank, first, count, "w")
        wide = ir.region_parts(self.site.made.source)[2][1]
        return tir.region(self.rows.buffer, [first, rank * wide], [count, wide], "w")


Gathers = Sequence[tuple[CollectiveSite, ProgramStep, Move]]
"""Gathers of a device phase, each with its first statement and what to do with it."""


def overlap_gather(
    site: CollectiveSite, mine: ProgramStep, graph: Dependence, uses: AccessMaps, move: Move
) -> ir.PrimFunc:
    """The program with a gather overlapped with the grids that read it; `move` records the choice. Raises Declined: it
    stays unchanged."""
    return overlap_gathers([(site, mine, move)], graph, uses)


def overlap_gathers(several: Gathers, graph: Dependence, uses: AccessMaps) -> ir.PrimFunc:
    """The program with gathers overlapped with the grids that read them. Several are of one grid, whose tiles read
    local rows of all from their sources; they are sent together, in their order, to one unit after the other. Raises
    Declined: it stays unchanged."""
    (site, mine, move), *_ = several
    if move.carrier == CALLER:
        return _moved_before(several, graph, uses)
    rewriter = LaunchRewriter(uses.program, site.launch, uses.machine)
    gathers = [_gather(*each, graph, uses, rewriter) for each in several]
    for gather in gathers:
        gather.move.why = "each tile waits for its rows" + ", of all columns" * gather.across
        for use in gather.readers:
            _await(gather, use, rewriter)
    first, level = gathers[0].readers[0], gathers[0].level
    if (raster := _reads_source(gathers)) is not None:
        send = lambda *which: tir.sequence([_send(gather, *which) for gather in gathers])  # noqa: E731
        started = to_others(level, gathers[0].rows.parts, send)
        changed = split_by_source(first, [gather.site for gather in gathers], rewriter, raster)
    else:
        started = _started(gathers[0], rewriter, in_place=is_behind_waiting(mine, graph))
        changed = _tiles(gathers[0], first, rewriter)
    stmts = [tir.sequence(located(started, site.stmt)), *[tir.sequence([])] * (len(gathers) - 1)]
    rewriter.statements.extend((gather.site.stmt, stmt) for gather, stmt in zip(gathers, stmts, strict=True))
    rewriter.phases.append((first.phase, (changed,)))
    return rewriter.apply()


def _tiles(gather: _SplitGather, use: TensorUse, rewriter: LaunchRewriter) -> GridPhase:
    """The grid that reads a gather, with the tiles that its move asks for."""
    move, uses = gather.move, gather.uses
    move.ordered &= not gather.across
    if move.group is None and move.blocks is None:
        return with_tiles(use.phase, tiles_in(ArrivalOrder(), use, gather.rows, uses, move, gather.level), rewriter)
    if not gather.across:
        raise Declined("tiles are rasterized that read local rows from the source, or rows of all parts")
    check_free(use, uses, move, grids=1 if gather.maker is None else 2)
    return Raster.of(use, move).changed(use.phase, rewriter, [], lambda number: {})


def _moved_before(several: Gathers, graph: Dependence, uses: AccessMaps) -> ir.PrimFunc:
    """The program whose caller has moved all rows but the local ones."""
    (site, _, move), *_ = several
    gathers = [(site, _readers(site, mine, graph, uses, rows_of(site, uses))) for site, mine, _ in several]
    raster, rewriter = check_source(gathers, uses, move), LaunchRewriter(uses.program, site.launch, uses.machine)
    first = gathers[0][1][0]
    rewriter.statements.extend((site.stmt, tir.sequence([])) for site, _ in gathers)
    rewriter.phases.append((first.phase, (split_by_source(first, [s for s, _ in gathers], rewriter, raster),)))
    for _, _, each in several:
        each.why = "the caller has moved the rows, local rows from the source"
    return rewriter.apply()


def _readers(
    site: CollectiveSite, mine: ProgramStep, graph: Dependence, uses: AccessMaps, rows: Partition
) -> tuple[TensorUse, ...]:
    """Reads of the result. Raises Declined if source or result are changed while rows are sent."""
    target, source = (uses.names.root(ir.region_parts(r)[0].data) for r in (site.made.target, site.made.source))
    check_unwritten(source, mine, graph, "what it sends")
    check_unwritten(target, mine, graph, "its result")
    return readers_of(target, mine, graph, uses, rows)


def _gather(
    site: CollectiveSite, mine: ProgramStep, move: Move, graph: Dependence, uses: AccessMaps, rewriter: LaunchRewriter
) -> _SplitGather:
    rows = rows_of(site, uses, by_columns=True)
    readers = _readers(site, mine, graph, uses, rows)
    while move.chunks != 1 and (deeper := readers[0].deeper) and all(use.deeper for use in readers):
        rows, readers = deeper, _readers(site, mine, graph, uses, deeper)
    check_some(readers[0], rows, uses, site.made.level)
    made, units = site.made, uses.sizes[site.made.level]
    across = made.axis == 1 or units == 1 and move.local is None or all(use.tiles and use.loops for use in readers)
    maker = _maker(site, mine, graph, uses, rows) if across and made.axis == 0 and units > 1 else None
    chunk = choose_rows(site, uses, rows, readers, move, partial(_seconds, move, across), maker)
    pieces = ColumnSlices(rows, move.slices) if move.slices else RowChunks(rows, chunk, move.chunks)
    flags = rewriter.alloc_flags(f"{rows.buffer.name}_here", (units, pieces.shape[1]))
    return _SplitGather(site, uses, move, rows, readers, pieces, flags, across, maker)


def _maker(
    site: CollectiveSite, mine: ProgramStep, graph: Dependence, uses: AccessMaps, rows: Partition
) -> TensorUse | None:
    """The write of the source by a grid that can be counted; None: there is no such grid."""
    source, _, extents = ir.region_parts(site.made.source)
    sent = Partition(source, 1, len(extents) == len(rows.buffer.shape), depth=rows.depth)
    with contextlib.suppress(Declined):
        check_whole(site.made.source, "gathers", None)
        phase = maker_of(uses.names.root(source.data), mine, graph, "what it sends")
        use = uses.find(phase, site.launch, sent)
        counted(use, RowChunks(sent, use.tiles.step if use.tiles else sent.height), uses, site.made.level)
        return use
    return None


def _seconds(
    move: Move, across: bool, travel: RowTransport, chunk: int, made: TileWork | None, work: TileWork | None
) -> float:
    """The estimate of the grid that reads a gather, and of that which makes its source."""
    assert work is not None
    if across:
        return gathered_across(travel, chunk, work, made, kept=move.local is None)
    if move.slices is not None:
        return sliced(travel, move.slices, work, travel.queue.startup)
    return gathered(travel, chunk, work, kept=move.local is None)


def _await(gather: _SplitGather, use: TensorUse, rewriter: LaunchRewriter) -> None:
    """Let the tiles of a use wait for what they read."""
    pieces, uses = gather.pieces, gather.uses
    if isinstance(pieces, ColumnSlices):
        rewriter.statements.append(pieces.awaited(use, uses, gather.flags))
    elif gather.across:
        rewriter.statements.append(pieces.across(use, uses, gather.level, gather.flags))
    else:
        rewriter.before(use.stmts[0], pieces.waits(use, uses, gather.level, gather.flags))


def _reads_source(gathers: Sequence[_SplitGather]) -> Raster | None:
    """The programs whose tiles read local rows from the sources, if the moves ask for that; they record whether they
    do."""
    move, uses = gathers[-1].move, gathers[-1].uses
    if gathers[0].across and (move.local is None or _reads_others(gathers[0])):
        return None
    try:
        if move.local is None:
            raise Declined("as requested")
        raster = check_source([(gather.site, gather.readers) for gather in gathers], uses, move)
    except Declined as reason:
        if len(gathers) > 1 or gathers[0].units == 1 or move.slices:
            raise
        if move.local is not None:
            move.local = move.group = move.blocks = None
            move.why += f"; local rows are copied: {reason.reason}"
        return None
    for gather in gathers:
        gather.move.why += ", local rows from the source"
    return raster


def _reads_others(gather: _SplitGather) -> bool:
    """Whether tiles, which alone see the result, are known to read no local rows."""
    uses = gather.uses
    is_seen = uses.is_argument(uses.names.root(gather.rows.buffer.data))
    return not is_seen and all(_skips_local(use, gather.level, gather.units) for use in gather.readers)


def _skips_local(use: TensorUse, level: str, units: int) -> bool:
    """Whether the loop over the parts in the tiles of a use leaves out that of the unit itself, on each one."""
    steps = ir.constants((use.loops[-1].min, use.loops[-1].extent)) if use.loops else None
    if use.tiles is None or steps is None:
        return False
    loop, part, (first, count) = use.loops[-1], use.tiles.part, steps
    made = {stmt.var: operation(stmt.value) for stmt in ir.statements(use.phase.stmt) if isinstance(stmt, ir.Bind)}
    ranks = [var for var, value in made.items() if isinstance(value, Rank) and value.level == level]

    def read(rank: int, step: int) -> int | None:
        values = {loop.loop_var: step, **dict.fromkeys(ranks, rank)}
        return ir.constant(ir.substitute(part, {var: ir.IntImm("int32", value) for var, value in values.items()}))

    return all(read(rank, step) not in (None, rank) for rank in range(units) for step in range(first, first + count))


def rows_of(site: CollectiveSite, uses: AccessMaps, *, by_columns: bool = False) -> Partition:
    """Row numbering of the result; if `by_columns`, it may be a matrix whose columns are gathered, all of one part."""
    made, where = site.made, location(site.stmt)
    (_, _, own), (whole, _, extents) = ir.region_parts(made.source), ir.region_parts(made.target)
    columns = by_columns and made.axis == 1 and len(own) == len(extents) == 2
    if made.is_in_place or made.axis != 0 and not columns:
        raise Declined("it does not gather along the first dimension", where)
    check_whole(made.target, "gathers into", where)
    if whole.data in uses.names.views:
        raise Declined(f"it gathers into a view of {uses.names.views[whole.data].base.name!r}", where)
    if columns:
        return Partition(whole, 1, slots=False)
    return Partition(whole, uses.sizes[made.level], PartLayout.of(own, extents).slots)


# -- chunks ------------------------------------------------------------------------------------------------------------


def _started(gather: _SplitGather, rewriter: LaunchRewriter, *, in_place: bool) -> list[ir.Stmt]:
    """The gather, started on the copy queue, which may be before a grid that makes its source. `in_place`: whether the
    device itself copies the local part into the result before."""
    made, rows, flags = gather.site.made, gather.rows, gather.flags
    rank, rank_is = rank_of(made.level)
    home = copy(made.source, gather.part(rank, 0, rows.height))
    assert isinstance(gather.pieces, RowChunks)
    if gather.across:
        kept = [rank_is, home] if gather.move.local is None else []
        if gather.units == 1:
            return kept
        after: Callable[[Any, Any], Any] = lambda *which: ()  # noqa: E731
        if gather.maker is not None:
            chunks = RowChunks(gather.maker.rows, gather.pieces.rows, gather.pieces.most)
            after = counting(gather.maker, chunks, gather.uses, made.level, rewriter)
        piece = lambda number: lambda rank, peer: _piece(gather, rank, peer, number, after(0, number))  # noqa: E731
        sent = gather.pieces.all(lambda number: tir.sequence(to_others(made.level, gather.units, piece(number))))
        if gather.maker is None:
            return [*kept, sent]
        before = DevicePhase(tir.sequence(located([sent], gather.site.stmt)))
        rewriter.phases.append((gather.maker.phase, (before, _tiles(gather, gather.maker, rewriter))))
        gather.move.why += ", a chunk is sent when its tiles are counted"
        return kept
    if gather.pieces.rows % rows.inner:
        sent = to_others(made.level, rows.parts, lambda *which: _send(gather, *which))
        return [*sent, rank_is, home, *gather.pieces.signals(flags, rank)]
    whole = tir.region(flags, [ir.IntImm("int32", 0)] * 2, flags.shape, "rw")
    source = rows.region(rank, 0, rows.height, "r") if in_place else made.source
    notes: dict[str, Any] = {"level": made.level, "dim": 0, "chunk": gather.pieces.rows // rows.inner}
    started = tir.evaluate(call(ALL_GATHER, source, made.target, whole, **notes))
    return [rank_is, home, started] if in_place else [started]


def _send(gather: _SplitGather, rank: Any, peer: Any) -> ir.Stmt:
    """The copies of a rank's rows to a peer, piece by piece."""
    return gather.pieces.all(lambda number: _piece(gather, rank, peer, number))


def _piece(gather: _SplitGather, rank: Any, peer: Any, number: Any, after: Any = ()) -> ir.Stmt:
    """The copy of a piece of a rank's rows to a peer, at once or `after` a count of its tiles."""
    made, rows, pieces = gather.site.made, gather.rows, gather.pieces
    source, begins, extents = ir.region_parts(made.source)
    leading = len(extents) - len(rows.buffer.shape) + rows.slots

    def some(first: Any, count: Any) -> list[ir.Call]:
        """Rows of the source, and the same of the result."""
        places, sizes = rows.box(first, count)
        inside = slice(leading, leading + rows.depth)
        at, of = list(begins), list(extents)
        at[inside] = [begin + place for begin, place in zip(begins[inside], places, strict=True)]
        of[inside] = sizes
        return [tir.region(source, at, of, "r"), gather.part(rank, first, count)]

    if isinstance(pieces, ColumnSlices):
        here, there = (pieces.region(whole, number) for whole in some(0, rows.height))
    else:
        here, there = some(number * pieces.rows, pieces.count(number))
    return put(made.level, here, there, peer, flag(gather.flags, rank, number), after)
