# SPDX-License-Identifier: MIT
"""An all-to-all, its producer grid, and its consumer grids; either side may be missing.

Why: all devices wait for the whole exchange although each tile produces, or reads, rows of one part. Before: a grid, an
all-to-all, grids. After, without a producer grid: the exchange is started on the copy queue, a chunk of rows at a time.
After, with a producer grid: a copy for each chunk is started before that grid, and is sent when the tiles of its chunk
are counted; the local part is stored in its final location, or copied when the grid is done. Tiles of consumer grids
wait for the rows that they read; where other statements use the result, the device waits for all of it at the position
of the exchange. On request such tiles read the local part from the source. Declines an exchange along a dimension other
than the first, but for slots along the second, one without a grid that could overlap with it, and the cases of
`legality.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.tiles import TileCopy
from tilelang_core.trace import call
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.arrival_reduce import copy
from tilescale.passes.overlap.chunks import RowChunks, flag, put, wait
from tilescale.passes.overlap.estimate import choose_rows, exchanged
from tilescale.passes.overlap.legality import CollectiveSite, check_unwritten, is_behind_waiting, uses_after
from tilescale.passes.overlap.local_rows import check_source, split_by_source
from tilescale.passes.overlap.partition import Partition, check_whole
from tilescale.passes.overlap.producers_consumers import check_some, counted, counting, maker_of, readers_of
from tilescale.passes.overlap.rewriter import LaunchRewriter, located, rank_of
from tilescale.passes.overlap.schedule import Move
from tilescale.passes.overlap.tile_order import (
    ArrivalOrder,
    DepartureOrder,
    TileOrder,
    is_in,
    tiles_in,
    with_tiles,
)
from tilescale.program.asynchronous import PartLayout, part_of
from tilescale.program.dependence import Dependence, ProgramStep
from tilescale.program.model import DevicePhase, location
from tilescale.program.ops import ALL_TO_ALL


@dataclass(frozen=True)
class _SplitAllToAll:
    """An all-to-all that is taken apart.

    Attributes:
        sent, received: how the rows of both tensors are counted.
        maker: the producer grid's write of the source; None: no grid produces it concurrently.
        readers: reads of the result in later grids; none: the device waits for all of it.
        store: the store of the producer's tiles, if those of the local part may go to their final location at once.
    """

    site: CollectiveSite
    uses: AccessMaps
    sent: Partition
    received: Partition
    maker: TensorUse | None
    readers: tuple[TensorUse, ...]
    store: ir.Stmt | None

    @property
    def level(self) -> str:
        return self.site.made.level


def overlap_exchange(
    site: CollectiveSite, mine: ProgramStep, graph: Dependence, uses: AccessMaps, move: Move
) -> ir.PrimFunc:
    """The program with an all-to-all overlapped with the grids around it; `move` records the choice. Raises Declined:
    it stays unchanged."""
    sent, received = (_rows(region, site, uses) for region in (site.made.source, site.made.target))
    source, target = (uses.names.root(rows.buffer.data) for rows in (sent, received))
    if source.same_as(target):
        raise Declined("a copy queue exchanges nothing in place", location(site.stmt))
    check_unwritten(source, mine, graph, "what it sends")
    uses_after(target, mine, graph)
    maker, readers = _neighbours(site, sent, received, mine, graph, uses)
    while all(use.deeper for use in (maker, *readers) if use):
        sent, received = (replace(rows, depth=rows.depth + 1) for rows in (sent, received))
        maker, readers = _neighbours(site, sent, received, mine, graph, uses)
    store = _store(maker, sent, received, mine, graph, uses, site.made.level) if maker else None
    found = _SplitAllToAll(site, uses, sent, received, maker, readers, store)
    seconds = partial(exchanged, in_place=store is not None)
    chunk = choose_rows(site, uses, received, readers, move, seconds, maker)
    rewriter = LaunchRewriter(uses.program, site.launch, uses.machine)
    chunks = RowChunks(received, received.counted(chunk) if uses.symbolic else chunk, move.chunks)
    here = rewriter.alloc_flags(f"{received.buffer.name}_here", chunks.shape)
    move.why = ""
    if found.maker is None and move.local is not None:
        return _by_source(found, chunks, here, rewriter, move)
    move.local = None
    if found.maker is None:
        rewriter.statements.append((site.stmt, tir.sequence(located(_started(found, chunks, here), site.stmt))))
    else:
        _departing(found, found.maker, chunks, here, rewriter, move)
    if found.readers:
        _arriving(found, chunks, here, rewriter, move)
    return rewriter.apply()


def _rows(region: ir.Call, site: CollectiveSite, uses: AccessMaps) -> Partition:
    whole, _, extents = ir.region_parts(region)
    where, parts = location(site.stmt), uses.sizes[site.made.level]
    axis = site.made.axis
    slots = PartLayout.of(part_of(extents, parts, axis), extents, axis).slots
    if axis and not (axis == 1 and slots):
        raise Declined("it does not exchange along the first dimension, or slots along the second", where)
    check_whole(region, "exchanges", where)
    return Partition(whole, parts, slots, lead=axis)


def _neighbours(
    site: CollectiveSite, sent: Partition, received: Partition, mine: ProgramStep, graph: Dependence, uses: AccessMaps
) -> tuple[TensorUse | None, tuple[TensorUse, ...]]:
    """The grids that overlap with it: the producer of the source, and the consumers of the result. Raises Declined:
    there is none."""
    level, reasons = site.made.level, []
    maker: TensorUse | None = None
    readers: tuple[TensorUse, ...] = ()
    try:
        maker = _maker(uses.names.root(sent.buffer.data), mine, graph, uses, sent, level)
    except Declined as reason:
        reasons.append(reason)
    try:
        readers = _readers(uses.names.root(received.buffer.data), mine, graph, uses, received, level)
    except Declined as reason:
        reasons.append(reason)
    if maker is None and is_behind_waiting(mine, graph):
        raise Declined("copies that wait for a flag were started before, and the local part must not overtake them")
    if maker is None and not readers:
        raise Declined("; ".join(reason.reason for reason in reasons), reasons[-1].where)
    return maker, readers


def _maker(
    root: ir.Var, mine: ProgramStep, graph: Dependence, uses: AccessMaps, sent: Partition, level: str
) -> TensorUse:
    """The producer grid's write of the source. Raises Declined if the source cannot be sent chunk by chunk."""
    phase = maker_of(root, mine, graph, "what it sends")
    assert mine.launch is not None
    use = uses.find(phase, mine.launch, sent)
    counted(use, RowChunks(sent, use.tiles.step if use.tiles else sent.height), uses, level)
    return use


def _readers(
    root: ir.Var, mine: ProgramStep, graph: Dependence, uses: AccessMaps, received: Partition, level: str
) -> tuple[TensorUse, ...]:
    """The consumer grids' reads of the result. Raises Declined if they cannot begin before all has arrived."""
    check_unwritten(root, mine, graph, "its result")
    found = readers_of(root, mine, graph, uses, received)
    check_some(found[0], received, uses, level)
    return found


def _store(
    maker: TensorUse,
    sent: Partition,
    received: Partition,
    mine: ProgramStep,
    graph: Dependence,
    uses: AccessMaps,
    level: str,
) -> ir.Stmt | None:
    """The copy of tiles, each of one part, that is all that touches a workspace that is sent; None if there is more."""
    root = uses.names.root(sent.buffer.data)
    if uses.is_argument(root):
        return None
    touching = [s for s in graph.steps if s is not mine and any(a.root.same_as(root) for a in s.effects.accesses)]
    if len(touching) != 1 or touching[0].phase is not maker.phase or received.buffer.data in uses.names.views:
        return None
    stmt = touching[0].stmt
    if not isinstance(stmt, ir.Evaluate) or ir.op_name(stmt.value) != tl.COPY:
        return None
    target, _, _ = ir.region_parts(TileCopy.of(stmt.value).target)
    return stmt if target.same_as(sent.buffer) and not _straddles(maker, sent, uses, level) else None


def _straddles(maker: TensorUse, sent: Partition, uses: AccessMaps, level: str) -> bool:
    """Whether some tiles have rows of several parts."""
    touched = () if maker.tiles else uses.by_rank(maker, level)
    return any(((begin // sent.height != (end - 1) // sent.height) & runs).any() for begin, end, runs in touched)


# -- the program -------------------------------------------------------------------------------------------------------


def _started(found: _SplitAllToAll, chunks: RowChunks, here: ir.Buffer) -> list[ir.Stmt]:
    made, rows = found.site.made, found.received
    if rows.lead or not isinstance(chunks.rows, int) or chunks.rows % rows.inner:
        sending = chunks.to_others(found.level, lambda *which: _put(found, chunks, here, *which))
        return [*sending, *_kept(found, chunks, here)]
    flags = tir.region(here, [ir.IntImm("int32", 0)] * 2, here.shape, "rw")
    notes: dict[str, Any] = {"level": made.level, "dim": 0, "chunk": chunks.rows // rows.inner, "slots": rows.slots}
    return [tir.evaluate(call(ALL_TO_ALL, made.source, made.target, flags, **notes))]


def _by_source(
    found: _SplitAllToAll, chunks: RowChunks, here: ir.Buffer, rewriter: LaunchRewriter, move: Move
) -> ir.PrimFunc:
    """The program whose tiles read the local part from the source, and wait for the others."""
    site, first = found.site, found.readers[0]
    raster = check_source([(site, found.readers)], found.uses, move)
    rewriter.before(first.stmts[0], chunks.waits(first, found.uses, found.level, here))
    changed = split_by_source(first, [site], rewriter, raster)
    sending = chunks.to_others(found.level, lambda *which: _put(found, chunks, here, *which))
    rewriter.statements.append((site.stmt, tir.sequence(located(sending, site.stmt))))
    rewriter.phases.append((first.phase, (changed,)))
    move.why = "each tile waits for its rows, local rows from the source"
    return rewriter.apply()


def _put(
    found: _SplitAllToAll, chunks: RowChunks, here: ir.Buffer, rank: Any, peer: Any, chunk: Any, *after: Any
) -> ir.Stmt:
    """A chunk of a unit's part for a peer, sent `after` a count of its tiles or at once."""
    first, count = chunk * chunks.rows, chunks.count(chunk)
    regions = found.sent.region(peer, first, count, "r"), found.received.region(rank, first, count, "w")
    return put(found.level, *regions, peer, flag(here, rank, chunk), after)


def _kept(found: _SplitAllToAll, chunks: RowChunks, here: ir.Buffer) -> list[ir.Stmt]:
    """The local part is kept; then a device notifies its tiles, or waits for the other devices' parts."""
    rank, rank_is = rank_of(found.level)
    sent = found.sent.region(rank, 0, found.sent.height, "r")
    received = found.received.region(rank, 0, found.received.height, "w")
    home = [] if found.store else [copy(sent, received)]
    if found.readers:
        return [rank_is, *home, *chunks.signals(here, rank)]
    return [rank_is, *home, *chunks.to_others(found.level, lambda rank, peer, chunk: wait(here, peer, chunk))]


def _made(found: _SplitAllToAll, maker: TensorUse) -> ir.Stmt:
    """The last statement of a tile on the source; a tile of the local part goes to the result, which has the same
    indices."""
    last, store = maker.stmts[-1], found.store
    if store is None:
        return last
    copied = TileCopy.of(store.value)
    place = tir.region(found.received.buffer, *ir.region_parts(copied.target)[1:], "w")
    rank, rank_is = rank_of(found.level)
    branch = ir.IfThenElse(ir.EQ(maker.place[0], rank), copy(copied.source, place), store)
    stored = tir.sequence([tir.at(rank_is, store), tir.at(branch, store)])
    return tir.rewrite(last, enter=lambda node: stored if store.same_as(node) else None)


def _departing(
    found: _SplitAllToAll, maker: TensorUse, chunks: RowChunks, here: ir.Buffer, rewriter: LaunchRewriter, move: Move
) -> None:
    """Insert the copies before the grid that writes their sources, signals in it, and the local copy after it."""
    sent, level, stmt = found.sent, found.level, found.site.stmt
    made = RowChunks(sent, chunks.rows, chunks.most)
    after = counting(maker, made, found.uses, level, rewriter, _made(found, maker))
    order: TileOrder = ArrivalOrder() if is_in(ArrivalOrder(), maker, sent, found.uses, level) else DepartureOrder()
    tiles = tiles_in(order, maker, sent, found.uses, move, level) if isinstance(order, DepartureOrder) else None

    def part(rank: Any, peer: Any, chunk: Any) -> ir.Stmt:
        return _put(found, chunks, here, rank, peer, chunk, *after(peer, chunk))

    before = DevicePhase(tir.sequence(located(chunks.to_others(level, part, order), stmt)))
    rewriter.phases.append((maker.phase, (before, with_tiles(maker.phase, tiles, rewriter))))
    behind = located(_kept(found, chunks, here), stmt)
    rewriter.instead(found.site.phase, stmt, [DevicePhase(tir.sequence(behind))])
    move.why = f"a chunk is sent when its tiles are counted{move.why}"


def _arriving(found: _SplitAllToAll, chunks: RowChunks, here: ir.Buffer, rewriter: LaunchRewriter, move: Move) -> None:
    """Waits in the tiles that read arriving rows."""
    uses, level, first = found.uses, found.level, found.readers[0]
    for use in found.readers:
        rewriter.before(use.stmts[0], chunks.waits(use, uses, level, here))
    move.why += f"{', ' if move.why else ''}each tile waits for its rows"
    tiles = tiles_in(ArrivalOrder(), first, chunks.of, uses, move, level)
    rewriter.phases.append((first.phase, (with_tiles(first.phase, tiles, rewriter),)))
