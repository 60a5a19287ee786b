# SPDX-License-Identifier: MIT
"""A grid and the reduce-scatter, or all-reduce, of its result.

Why: the network is idle while the grid computes, and the SMs while rows are sent. Before: a grid, then a collective.
After: a copy for each chunk of remote rows is started before the grid, and waits until the tiles of its chunk are
counted; the grid produces remote rows first; a grid after it adds up the local rows as they arrive, in the order of
ranks. For an all-reduce the sums are then sent to all units likewise. Tiles only count, so their order cannot deadlock.
Declines reductions that are not elementwise with one operation, tensors that other statements write or use in between,
and the cases of `legality.py`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilelang_core.tiles import TileCopy
from tilescale.cost.choose import TIE
from tilescale.hda.units import format_time
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.accumulators import add_to_accumulators
from tilescale.passes.overlap.arrival_reduce import COMBINED, ArrivalReduce, copy, sum_of, tile_shape, whole
from tilescale.passes.overlap.chunks import RowChunks, flag, put, signal, wait
from tilescale.passes.overlap.epilogue import EpilogueTile, add_where_made, added_bytes, stored
from tilescale.passes.overlap.estimate import WORTH, RowTransport, align, choose_chunk, in_order, reduced
from tilescale.passes.overlap.legality import CollectiveSite, check_unwritten
from tilescale.passes.overlap.partition import Partition, check_whole, same_extents
from tilescale.passes.overlap.producers_consumers import Count, counted, maker_of
from tilescale.passes.overlap.raster import Raster, check_free
from tilescale.passes.overlap.rewriter import LaunchRewriter, located, rank_of
from tilescale.passes.overlap.schedule import ACCUMULATORS, ANY, COLLECTIVE, GRID, QUEUE, TILES, WIRES, Move
from tilescale.passes.overlap.tile_collective import reduce_tiles
from tilescale.passes.overlap.tile_cost import TileWork
from tilescale.passes.overlap.tile_order import DepartureOrder, last_axis, stairs, tiles_in, with_tiles
from tilescale.program.asynchronous import PartLayout
from tilescale.program.dependence import Dependence, ProgramStep
from tilescale.program.model import DevicePhase, GridPhase, location


@dataclass(frozen=True)
class _SplitReduction:
    """A reduction that is taken apart.

    Attributes:
        maker: the producer grid's write of the reduced tensor.
        everywhere: whether all units get all rows.
        used_elsewhere: whether the caller, or other statements, use the source, or statements use the target before the
            result is complete.
    """

    site: CollectiveSite
    uses: AccessMaps
    rows: Partition
    maker: TensorUse
    everywhere: bool
    used_elsewhere: bool

    @property
    def level(self) -> str:
        return self.site.made.level

    def result(self, rank: Any) -> ir.Call:
        """Destination of this rank's rows."""
        return self.rows.region(rank, 0, self.rows.height, "w") if self.everywhere else self.site.made.target


def overlap_reduction(
    site: CollectiveSite, mine: ProgramStep, graph: Dependence, uses: AccessMaps, move: Move
) -> ir.PrimFunc:
    """The program with a reduce-scatter or all-reduce overlapped with its producer grid; `move` records the choice.
    Raises Declined: it stays unchanged."""
    made = site.made
    if made.op not in COMBINED:
        raise Declined("it combines tiles by a function", location(site.stmt))
    if made.name == "allreduce" and not made.is_in_place:
        raise Declined("its result is another tensor", location(site.stmt))
    if move.carrier == COLLECTIVE:
        return reduce_tiles(site, mine, graph, uses, move)
    everywhere = made.name == "allreduce"
    rows = _rows(site, uses, everywhere)
    move.axis = rows.axis
    root = uses.names.root(rows.buffer.data)
    if not everywhere:
        check_unwritten(root, mine, graph, "what it sends")
        _check_apart(site, uses)
    phase = maker_of(root, mine, graph, "what it reduces")
    elsewhere = not everywhere and (uses.is_argument(root) or _used_elsewhere(root, phase, site, mine, graph))
    scatter = _SplitReduction(site, uses, rows, uses.find(phase, site.launch, rows), everywhere, elsewhere)
    note = _choose_wire(scatter, move)
    for carrier in (carriers := _carriers(scatter, move)):
        chunk = _choose(scatter, move, carrier)
        rewriter = LaunchRewriter(uses.program, site.launch, uses.machine)
        try:
            (_by_queue if carrier == QUEUE else _by_tiles)(scatter, RowChunks(rows, chunk, move.chunks), rewriter, move)
        except Declined:
            if carrier == carriers[-1]:
                raise
            continue
        move.chunk, move.carrier = chunk, carrier
        move.why += note
        _choose(scatter, move, carrier)  # the reducer is known now
        return rewriter.apply()
    raise AssertionError("the last carrier was declined or taken")


def _rows(site: CollectiveSite, uses: AccessMaps, everywhere: bool) -> Partition:
    """Row numbering of the reduced tensor: the part of each unit is the one that it adds up."""
    made, where = site.made, location(site.stmt)
    whole, _, extents = ir.region_parts(made.source)
    parts, dimensions = uses.sizes[made.level], len(extents)
    check_whole(made.source, "reduces", where)
    axis = 0 if everywhere else made.axis
    if everywhere:
        slots = uses.symbolic and dimensions > 2 and ir.constant(extents[0]) == parts
    else:
        slots = axis == 0 and PartLayout.of(ir.region_parts(made.target)[2], extents).slots and dimensions > 2
    depth = 1 if axis else dimensions - 1 - slots
    if axis and dimensions != 2 or depth < 1:
        raise Declined("it is not a matrix", where)
    if ir.constant(extents[axis] % parts) != 0:
        raise Declined(f"{extents[axis]} {'columns' if axis else 'rows'} do not divide among {parts} units", where)
    return Partition(whole, parts, slots, axis, depth)


def _check_apart(site: CollectiveSite, uses: AccessMaps) -> None:
    """Raise Declined for a result inside of the source."""
    source, target = (ir.region_parts(r)[0] for r in (site.made.source, site.made.target))
    if uses.names.root(source.data).same_as(uses.names.root(target.data)):
        raise Declined(f"its result is a part of {source.name!r} itself", location(site.stmt))


def _used_elsewhere(root: ir.Var, phase: GridPhase, site: CollectiveSite, mine: ProgramStep, graph: Dependence) -> bool:
    """Whether anything but the grid and the reduction touches the parts, or from the grid on until the reduction what
    that writes."""
    target = graph.names.root(ir.region_parts(site.made.target)[0].data)
    first = next(s.number for s in graph.steps if s.phase is phase)
    for step in graph.steps:
        roots = [access.root for access in step.effects.accesses]
        if step is not mine and step.phase is not phase and any(r.same_as(root) for r in roots):
            return True
        if first <= step.number < mine.number and any(r.same_as(target) for r in roots):
            return True
    return False


# -- the choice --------------------------------------------------------------------------------------------------------


def _choose(scatter: _SplitReduction, move: Move, carrier: str) -> int:
    """Rows of a chunk for a carrier; records the estimate in the move."""
    site, uses, rows, maker = scatter.site, scatter.uses, scatter.rows, scatter.maker
    if uses.symbolic:
        return align(move, [maker])
    travel = RowTransport.of(site, uses, rows.parts, rows.height, carrier)
    if move.wire is not None:
        travel = replace(travel, row_bytes=travel.row_bytes * ir.bits(move.wire) // ir.bits(str(rows.buffer.dtype)))
    grid = TileWork.of(maker, uses, scatter.level)
    alone = move.adds in (GRID, ACCUMULATORS)
    work = grid if alone else TileWork.of(maker, uses, scatter.level, _summed_bytes(scatter))

    def seconds(chunk: int) -> float:
        return reduced(travel, chunk, work, everywhere=scatter.everywhere, behind=move.adds == GRID)

    step = uses.step(maker, rows.height, scatter.level)
    move.in_order_s = in_order(site, uses, grid.seconds)
    return choose_chunk(move, travel, rows, step, seconds, carrier)


def _summed_bytes(scatter: _SplitReduction) -> int:
    """Bytes of the fragments in which a program adds up a tile; none if it cannot."""
    with contextlib.suppress(Declined):
        return added_bytes(scatter.maker, str(scatter.rows.buffer.dtype))
    return 0


def _choose_wire(scatter: _SplitReduction, move: Move) -> str:
    """Let `move` round parts if it is allowed and saves time by the estimate; else note the saving. Rounding is never
    unasked, as it changes the bits of results."""
    if move.wire in WIRES or scatter.uses.symbolic:
        return ""
    may_round, move.wire, wire = move.wire == ANY, None, WIRES[0]
    if move.carrier == TILES:
        return ""
    try:
        _outgoing(scatter, wire)
    except Declined:
        return ""
    exact, rounded = (_best(scatter, replace(move, wire=w, estimates={})) for w in (None, wire))
    if rounded > exact * (1 - WORTH):
        return ""
    if may_round:
        move.wire = wire
        return ""
    return f"; with wire={ANY!r} parts would be rounded to {wire}: estimated {format_time(rounded)}"


def _best(scatter: _SplitReduction, move: Move) -> float:
    """Seconds that a move is estimated to take with the carrier that is tried first; inf without one."""
    with contextlib.suppress(Declined):
        _choose(scatter, move, _carriers(scatter, move)[0])
        return move.overlapped_s or 0.0
    return math.inf


def _carriers(scatter: _SplitReduction, move: Move) -> list[str]:
    """Possible carriers of the rows, the first choice in front: the copy queue, unless tiles are clearly faster."""
    if move.carrier is not None:
        return [move.carrier]
    if move.wire is not None:
        return [QUEUE]
    times = {}
    for carrier in (QUEUE, TILES):
        with contextlib.suppress(Declined):
            _choose(scatter, move, carrier)
            times[carrier] = move.overlapped_s or 0.0
    if not times:
        raise Declined("no mechanism of the network moves such rows", location(scatter.site.stmt))
    if TILES in times and times[TILES] < times.get(QUEUE, math.inf) * (1 - TIE):
        return [TILES, *(name for name in times if name == QUEUE)]
    return [QUEUE]


# -- the program -------------------------------------------------------------------------------------------------------


def _by_tiles(scatter: _SplitReduction, chunks: RowChunks, rewriter: LaunchRewriter, move: Move) -> None:
    """Tiles send remote rows to their owners, and the sums of local ones to all units. Raises Declined: local tiles
    cannot accumulate where they are made."""
    if move.wire is not None:
        raise Declined(f"tiles that programs send are not rounded to {move.wire}")
    name, rows, maker, level = scatter.rows.buffer.name, scatter.rows, scatter.maker, scatter.level
    count = counted(scatter.maker, chunks, scatter.uses, scatter.level)
    here = rewriter.alloc_flags(f"{name}_here", chunks.shape)
    inbox = rewriter.alloc(f"{name}_inbox", (rows.parts, *rows.part_shape), str(rows.buffer.dtype))
    back = rewriter.alloc_flags(f"{name}_back", chunks.shape) if scatter.everywhere else None

    def away(tile: EpilogueTile) -> list[ir.Stmt]:
        extents = rows.of_tile(*map(ir.integer, tile.buffer.shape))
        region = tir.region(inbox, [tile.rank, *rows.spot(tile.row, tile.column)], [1, *extents], "w")
        chunk = rows.place(tile.row, tile.column)[0] // chunks.rows
        return [put(level, whole(tile.buffer, "r"), region, tile.owner, flag(here, tile.rank, chunk))]

    def after(tile: EpilogueTile) -> list[ir.Stmt]:
        if back is None:
            return []
        step = ir.Var("step", "int32")
        high, wide = map(ir.integer, tile.buffer.shape)
        target = arrivals.to(tile.rank, tile.row, tile.column, (high, wide))
        arrived = flag(back, tile.rank, tile.row // chunks.rows)
        sent = put(level, whole(tile.buffer, "r"), target, (tile.rank + step) % rows.parts, arrived)
        return [ir.For(step, 1, rows.parts - 1, ir.ForKind.SERIAL, sent)]

    op = str(scatter.site.made.op)
    arrivals = ArrivalReduce(rows.buffer, inbox, here, scatter.result, op, chunks, level, count)
    move.why = "remote tiles are sent to their owners, local tiles accumulate those that arrive"
    tiles = tiles_in(DepartureOrder(), maker, rows, scatter.uses, move, level)
    if tiles is None or scatter.used_elsewhere or move.adds == GRID:
        raise Declined("local tiles cannot accumulate")
    add_where_made(maker, arrivals, tiles[0][0].var, away, rewriter, scatter.uses, after)
    rewriter.phases.append((maker.phase, (with_tiles(maker.phase, tiles, rewriter),)))
    waits = chunks.to_others(level, lambda rank, peer, i: wait(back, peer, i, value=count(peer, i))) if back else []
    behind = [DevicePhase(tir.sequence(located(waits, scatter.site.stmt)))] if waits else []
    rewriter.instead(scatter.site.phase, scatter.site.stmt, behind)
    move.adds = TILES


def _by_queue(scatter: _SplitReduction, chunks: RowChunks, rewriter: LaunchRewriter, move: Move) -> None:
    """Copies before the grid, counts in it, sums after it."""
    name, rows, maker, level = scatter.rows.buffer.name, scatter.rows, scatter.maker, scatter.level
    done, here = (rewriter.alloc_flags(f"{name}_{what}", chunks.shape) for what in ("done", "here"))
    outbox, stores = _outbox(scatter, rewriter, move.wire)
    inbox = rewriter.alloc(f"{name}_inbox", (rows.parts, *rows.part_shape), str(outbox.buffer.dtype))
    made = counted(scatter.maker, chunks, scatter.uses, scatter.level)
    move.why = "a chunk of remote rows is sent when its tiles are counted"

    def part(rank: Any, peer: Any, chunk: Any) -> ir.Stmt:
        count = chunks.count(chunk)
        source = outbox.region(peer, chunk * chunks.rows, count, "r")
        begins, extents = rows.block(chunk * chunks.rows, count)
        target = tir.region(inbox, [rank, *begins], [1, *extents], "w")
        after = flag(done, peer, chunk), made(peer, chunk)
        return put(level, source, target, peer, flag(here, rank, chunk), after)

    arrivals = ArrivalReduce(rows.buffer, inbox, here, scatter.result, str(scatter.site.made.op), chunks, level)
    summed = rewriter.alloc_flags(f"{name}_summed", (chunks.shape[1],)) if scatter.everywhere else None
    grid, rank = _departing(scatter, rewriter, move)
    behind = _add_up(scatter, arrivals, done, summed, rewriter, move, stores, rank)
    sending = chunks.to_others(level, part)
    waits: list[DevicePhase] = []
    if summed is not None:
        back, waiting = _back(scatter, chunks, rewriter, summed, _per_chunk(scatter, chunks) if behind else made)
        sending += back
        waits = [DevicePhase(tir.sequence(located(waiting, scatter.site.stmt)))]
    before = DevicePhase(tir.sequence(located(sending, scatter.site.stmt)))
    rewriter.phases.append((maker.phase, (before, grid())))
    rewriter.instead(scatter.site.phase, scatter.site.stmt, [*behind, *waits])


def _departing(
    scatter: _SplitReduction, rewriter: LaunchRewriter, move: Move
) -> tuple[Callable[[], GridPhase], ir.Var | None]:
    """The grid with all changes, and the unit's rank in it if remote rows are first; None if they are not."""
    maker, parts, order = scatter.maker, scatter.rows.parts, DepartureOrder()
    if move.group is None and move.blocks is None:
        tiles = tiles_in(order, maker, scatter.rows, scatter.uses, move, scatter.level)
        return lambda: with_tiles(maker.phase, tiles, rewriter), tiles[0][0].var if tiles else None
    check_free(maker, scatter.uses, move)
    part, raster, (rank, rank_is) = last_axis(maker), Raster.of(maker, move), rank_of(scatter.level)
    owner = lambda number: {part: order.part(number, rank, parts)}  # noqa: E731
    return lambda: raster.changed(maker.phase, rewriter, [rank_is], owner, parts), rank


def _outbox(scatter: _SplitReduction, rewriter: LaunchRewriter, wire: str | None) -> tuple[Partition, list[ir.Stmt]]:
    """Source of the sends of remote rows, and the statements that put a tile there in addition to its store. Raises
    Declined: tiles cannot be rounded to `wire`."""
    rows, store = scatter.rows, scatter.maker.stmts[-1]
    if wire in (None, str(rows.buffer.dtype)):
        return rows, []
    tile, begins, extents = _outgoing(scatter, wire)
    outbox = rewriter.alloc(f"{rows.buffer.name}_{wire}", rows.buffer.shape, wire)
    rounded = copy(whole(tile, "r"), tir.region(outbox, begins, extents, "w"))
    return replace(rows, buffer=outbox), [tir.at(rounded, store)]


def _outgoing(scatter: _SplitReduction, wire: str) -> tuple[ir.Buffer, list[Any], list[Any]]:
    """The tile that can be rounded to a type, and where it goes: places and extents. Raises Declined if it cannot."""
    rows, store = scatter.rows, scatter.maker.stmts[-1]
    dtype = str(rows.buffer.dtype)
    if "float" not in dtype or ir.bits(dtype) <= ir.bits(wire):
        raise Declined(f"{wire} is not narrower than {dtype}", location(scatter.site.stmt))
    tile, _ = stored(scatter.maker)
    target, begins, extents = ir.region_parts(TileCopy.of(store.value).target)
    if not same_extents(target.shape, rows.buffer.shape):
        raise Declined("the tiles are stored in another shape", location(store))
    return tile, list(begins), list(extents)


def _add_up(
    scatter: _SplitReduction,
    arrivals: ArrivalReduce,
    done: ir.Buffer,
    summed: ir.Buffer | None,
    rewriter: LaunchRewriter,
    move: Move,
    stores: list[ir.Stmt],
    rank: ir.Var | None,
) -> list[GridPhase]:
    """Add up the local rows: in the tiles that produce them, if these are last, or in a grid after them, which is
    returned.

    Args:
        stores: statements that copy a tile of remote rows to the send buffer, if it is not produced there.
        rank: the unit's in the grid whose tiles of local rows are last; None: they are not.
    """
    maker, chunks = scatter.maker, arrivals.chunks

    def after(row: Any) -> list[ir.Stmt]:
        return [] if summed is None else [signal(summed, row // chunks.rows)]

    last = maker.stmts[-1]
    counts = [tir.at(s, last) for s in chunks.counts(maker, scatter.uses, scatter.level, done)]
    try:
        if move.adds == GRID:
            raise Declined("as requested")
        if rank is None:
            raise Declined("the local tiles are not the last ones")
        if scatter.used_elsewhere:
            raise Declined("the parts, or the destination of the sum, have other uses")
        away = lambda tile: [*(stores or [last]), *counts]  # noqa: E731
        add = add_to_accumulators if move.adds == ACCUMULATORS else add_where_made
        add(maker, arrivals, rank, away, rewriter, scatter.uses, lambda tile: after(tile.row))
    except Declined as reason:
        move.adds = GRID
        move.why += f"; a separate grid accumulates: {reason.reason}"
        rewriter.statements.append((last, tir.sequence([last, *stores, *counts])))
        return [sum_of(arrivals, rewriter, after)]
    move.adds = move.adds or TILES
    move.why += ", local tiles accumulate those that arrive"
    return []


# -- sums for all units ------------------------------------------------------------------------------------------------


def _back(
    scatter: _SplitReduction, chunks: RowChunks, rewriter: LaunchRewriter, summed: ir.Buffer, count: Count
) -> tuple[list[ir.Stmt], list[ir.Stmt]]:
    """Copies of this unit's sums to others, and waits for theirs. `count`: tiles of a chunk, which `summed` counts."""
    rows, level = scatter.rows, scatter.level
    back = rewriter.alloc_flags(f"{rows.buffer.name}_back", chunks.shape)

    def total(rank: Any, peer: Any, chunk: Any) -> ir.Stmt:
        region = rows.region(rank, chunk * chunks.rows, chunks.count(chunk), "r")
        after = flag(summed, chunk), count(rank, chunk)
        return put(level, region, region, peer, flag(back, rank, chunk), after)

    waits = chunks.to_others(level, lambda rank, peer, chunk: wait(back, peer, chunk))
    return chunks.to_others(level, total), waits


def _per_chunk(scatter: _SplitReduction, chunks: RowChunks) -> Count:
    """Number of tiles of the reduction grid in a chunk."""
    high, wide = tile_shape(scatter.site.launch, chunks)
    heights = [min(chunks.rows, chunks.of.height - i * chunks.rows) for i in range(chunks.each)]
    numbers = [-(-height // high) * -(-chunks.of.across // wide) for height in heights] * chunks.of.parts
    return lambda part, chunk: stairs(part * chunks.each + chunk, range(len(numbers)), numbers)
