# SPDX-License-Identifier: MIT
"""Estimated time of a collective and its grid, sequential and overlapped: a few numbers of the machine, no simulation.

The time of the grid is that of its tiles (`tile_cost.py`). A chunk takes a latency and the time of its mechanism
(`Mechanism.seconds`); its start-up is hidden by the chunks before it, so only that of the first counts. Overlapped, the
grid processes the chunks in the order in which they arrive, or leave.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tilelang_core import ir
from tilescale.collectives.record import TENSORS
from tilescale.collectives.select import (
    CollectiveQuery,
    everything,
    measured_times,
    members,
    numbering,
    seconds,
    select,
)
from tilescale.cost.calibrated import in_force
from tilescale.cost.operations import network_of, region_bytes
from tilescale.hda import Machine, Mechanism, Network
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.legality import CollectiveSite
from tilescale.passes.overlap.partition import Partition
from tilescale.passes.overlap.schedule import QUEUE, Move
from tilescale.passes.overlap.tile_cost import TileWork, bandwidth_of, last

COUNTS = (32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
"""Possible numbers of chunks of a part."""

CLOSE = 0.02
"""Relative difference of estimates below which more chunks are preferred, as tiles do not all begin and end
together."""


WORTH = 0.02
"""Share of the time in order that an overlap has to save: a program that its user wrote in order is not made slower
where estimates are as good as equal.

On two H200 a GEMM of 2048 x 8192 x 3584 and an all-reduce take 1.02 of the time in order, where 0.98 is estimated; with
8192 rows 0.98 for 0.94; 4096 rows and a reduce-scatter 0.92 for 0.93.
"""

TILE_ALGORITHMS = ("one_shot", "two_shot")
"""Algorithms of tiles that are all-reduced."""

PASSED = 3
"""Memory accesses for each byte of a tile that is all-reduced: the sent part, the received part, the sum."""

SUMMING = 0.5
"""Share of the rate of a unit's memory at which a grid adds up: its loads wait for flags, and for one another."""


def pays(move: Move) -> bool:
    """Whether a collective is estimated to finish sooner when overlapped."""
    return (move.overlapped_s or 0.0) < (1 - WORTH) * (move.in_order_s or 0.0)


@dataclass(frozen=True)
class RowTransport:
    """Transport of the rows of a collective while programs run.

    Attributes:
        queue: the mechanism, over `network`.
        by_tiles: whether programs move them, tile by tile, in place of a copy queue.
        parts, height: the number of parts, and the rows of each.
        row_bytes: bytes of a row.
        local: seconds that a byte takes within a unit's own memory.
        launch: seconds of the launch of the grid.
        loading: seconds of a program's load of a byte, and latency of the unit's memory.
    """

    network: Network
    queue: Mechanism
    parts: int
    height: int
    row_bytes: int
    local: float
    by_tiles: bool = False
    launch: float = 0.0
    loading: tuple[float, float] = (0.0, 0.0)

    @classmethod
    def of(cls, site: CollectiveSite, uses: AccessMaps, parts: int, height: int, carrier: str = QUEUE) -> RowTransport:
        """Transport of a collective's rows on the machine. Raises Declined: nothing moves data while programs run, or
        programs move none."""
        network = network_of(site.made.call, in_force(uses.machine), uses.sizes)
        row_bytes = (region_bytes(site.made.whole[0]) or 0) // (parts * height)
        travel = cls.over(network, uses.machine, parts, height, row_bytes, carrier)
        if travel is None:
            name = network.name if network is not None else uses.machine.name
            raise Declined(f"no mechanism of {name} moves data {'while' if carrier == QUEUE else 'where'} programs run")
        return travel

    @classmethod
    def over(
        cls, network: Network | None, machine: Machine, parts: int, height: int, row_bytes: int, carrier: str = QUEUE
    ) -> RowTransport | None:
        """Transport of rows over a network; None where nothing moves them."""
        offers, starter = network.mechanisms if network is not None else (), "host" if carrier == QUEUE else "program"
        able = next((m for m in offers if m.started_by == starter and m.put and not m.on_request), None)
        if network is None or able is None:
            return None
        memory, local = machine.layer_for("global"), 2 / bandwidth_of(machine)
        loading = (1 / memory.per_program if memory.per_program else 0.0), memory.latency
        launch = machine.tensor_level.launch
        return cls(network, able, parts, height, row_bytes, local, carrier != QUEUE, launch, loading)

    @property
    def beginning(self) -> float:
        """Seconds of the launch, and of the fork and the join of the queue; there is none if programs move the rows."""
        return self.launch + (0.0 if self.by_tiles else self.queue.fork_and_join)

    def sending(self, rows: int) -> float:
        """Seconds for some rows to another unit; the queue has begun before."""
        return self.network.latency + self.queue.seconds(rows * self.row_bytes, starts=0)

    def keeping(self, rows: int) -> float:
        """Seconds for some rows to another place of the unit's own memory."""
        return self.network.latency + rows * self.row_bytes * self.local

    def adding(self, rows: int) -> float:
        """Seconds in which a grid adds up some rows of all parts: each is read, and their sum is written."""
        return (self.parts + 1) * rows * self.row_bytes * self.local / 2 / SUMMING

    def held(self, work: TileWork, everywhere: bool) -> TileWork:
        """The cost of a grid whose programs send remote tiles themselves, and stay resident until these are sent: the
        link takes one after the other, so that those that share a place are not done together, and read while others
        send. `everywhere`: whether they send their sums of local tiles, too."""
        sent = self.queue.seconds((1 + everywhere) * (self.parts - 1) * self.height * self.row_bytes, starts=0)
        read = work.tiles * work.streamed / work.waves - work.waits
        return replace(work, tile=max(work.tile, read) + sent / work.waves, streamed=0.0, each=1)

    def summing(self, work: TileWork, chunk: int) -> float:
        """Seconds in which a tile adds up its parts, one after the other, and stores the sum. Resident tiles of a chunk
        do so together, when its rows have arrived."""
        a_byte, latency = self.loading
        tile = self.parts * self.height * self.row_bytes / work.tiles
        together = min(work.resident, math.ceil(work.tiles * chunk / (self.parts * self.height)))
        return (self.parts - 1) * latency + self.parts * tile * max(a_byte, together * self.local / 2)

    def chunks(self, step: int) -> Iterator[int]:
        """Possible numbers of rows of a chunk: whole steps, which cut a part into nearly equal chunks."""
        found = (-(-self.height // (count * step)) * step for count in COUNTS)
        yield from dict.fromkeys(min(rows, self.height) for rows in found)

    def cut(self, chunk: int) -> list[int]:
        """Rows of each chunk of a part: the last one has the remainder."""
        return [min(chunk, self.height - first) for first in range(0, self.height, chunk)]


def gathered(
    travel: RowTransport, chunk: int, work: TileWork, *, begin: float | None = None, kept: bool = True
) -> float:
    """Seconds until a grid ends that processes the parts in the order in which an all-gather delivers them.

    Args:
        begin: seconds until the first chunk is sent, at least the start-up of the queue if left out.
        kept: whether local rows are copied; else tiles read them from the source.
    """
    rows, begin = travel.cut(chunk), travel.queue.startup if begin is None else begin
    own = begin + np.cumsum([*map(travel.keeping, rows)]) if kept else np.zeros(len(rows))
    sent = np.cumsum([*map(travel.sending, rows)] * (travel.parts - 1))
    return float(work.done(np.concatenate([own, (own[-1] if kept else begin) + sent]))[-1])


def gathered_across(
    travel: RowTransport, chunk: int, work: TileWork, made: TileWork | None = None, *, kept: bool = True
) -> float:
    """Seconds until a grid ends that processes chunks of rows when those of all units are there.

    Args:
        made: of a grid before, whose tiles are the rows; None: they are there.
        kept: whether local rows are copied.
    """
    local, rows = travel.keeping(travel.height) if kept else 0.0, travel.cut(chunk)
    if made is None:
        steps = [(travel.parts - 1) * travel.sending(count) for count in rows]
        return local + float(work.done(travel.queue.startup + np.cumsum(steps))[-1])
    others = travel.parts - 1
    arrived = _gone(travel, chunk, np.repeat(made.made(len(rows)), others))[others - 1 :: others]
    return local + float(work.done(np.maximum(arrived, made.seconds))[-1])


def sliced(travel: RowTransport, slices: int, work: TileWork, begin: float = 0.0) -> float:
    """Seconds until a grid ends whose tiles all run at once and iterate over slices of columns as these arrive.
    `begin`: as for `gathered`."""
    each = travel.network.latency + travel.queue.seconds(travel.height * travel.row_bytes // slices, starts=0)
    last_shard = begin + each * ((travel.parts - 2) * slices + 1 + np.arange(slices))
    multiplied = float(np.max(last_shard + work.tile * (1 - np.arange(slices) / slices)))
    return max(multiplied, work.tiles * work.streamed)


def exchanged(
    travel: RowTransport, chunk: int, made: TileWork | None, read: TileWork | None, *, in_place: bool = False
) -> float:
    """Seconds until a grid is done that processes the parts of an all-to-all as they arrive, after a grid that makes
    remote parts first, which are sent when complete; either grid may be missing. `in_place`: whether the local part is
    stored in its final location."""
    each = -(-travel.height // chunk)
    chunks = travel.parts * each
    ends = np.zeros(chunks) if made is None else made.made(chunks)
    arrived = _gone(travel, chunk, ends[: chunks - each])
    own = float(ends[-1]) + (0.0 if in_place else travel.keeping(travel.height))
    if read is None:
        return max(own, arrived[-1])
    return float(read.done([own] * each + arrived)[-1])


def reduced(travel: RowTransport, chunk: int, work: TileWork, *, everywhere: bool, behind: bool) -> float:
    """Seconds until a grid is done that produces remote rows first, which are sent when they are complete, and then
    adds up the local ones chunk by chunk as they arrive; and until all units have the sums.

    `behind`: whether a second grid adds up, after all tiles of the first.
    """
    each = -(-travel.height // chunk)
    others = (travel.parts - 1) * each
    work = travel.held(work, everywhere) if travel.by_tiles else work
    arrived = _gone(travel, chunk, _completed(travel, chunk, work)[:others])
    # The last to send here is the unit after.
    add_up = _added_behind if behind else _added_where_made
    mine = arrived[others - each :] or [0.0] * each
    own = add_up(travel, chunk, work, mine)
    if not everywhere:
        return own[-1]
    if travel.by_tiles:  # programs have sent their sums when they end
        return own[-1] + travel.network.latency
    return max(own[-1], _gone(travel, chunk, np.tile(own, travel.parts - 1), arrived[-1])[-1])


def tiles_summed(machine: Machine, whole: CollectiveQuery, work: TileWork, tile: int) -> float:
    """Seconds until the tiles of a grid are made and all-reduced. The sums of a wave are exchanged concurrently with
    the arithmetic of the next one, which may take less time than the link; those of the last wave are exposed.

    Args:
        whole: the all-reduce of all tiles.
        tile: bytes of a tile.
    """

    def exchanged(waves: int) -> float:
        wanted = replace(whole, nbytes=waves * min(work.tiles, work.at_once) * tile)
        able = everything(machine, wanted).names
        return min((seconds(machine, wanted, name) for name in TILE_ALGORITHMS if name in able), default=math.inf)

    a_wave = exchanged(1)
    arithmetic = replace(work, tile=max(work.tile, exchanged(2) - a_wave)).seconds
    return machine.tensor_level.launch + arithmetic + a_wave + PASSED * (whole.nbytes or 0) / bandwidth_of(machine)


def _completed(travel: RowTransport, chunk: int, work: TileWork) -> np.ndarray:
    """When each chunk of each part is made: with its last tiles."""
    ends = np.cumsum(travel.cut(chunk))
    rows = np.add.outer(np.arange(travel.parts) * travel.height, ends).ravel()
    return work.done()[-(-rows * work.tiles // (travel.parts * travel.height)) - 1]


def _added_where_made(travel: RowTransport, chunk: int, work: TileWork, arrived: list[float]) -> list[float]:
    """Completion time of each local chunk if its tiles add it up: they are last, and wait in their epilogue."""
    each, others = len(arrived), (travel.parts - 1) * len(arrived)
    ends = work.done(until=[0.0] * others + arrived)
    tiles = (last(others + number, others + each, work.tiles) for number in range(each))
    return [float(ends[tile]) + travel.summing(work, chunk) for tile in tiles]


def _added_behind(travel: RowTransport, chunk: int, work: TileWork, arrived: list[float]) -> list[float]:
    """Completion time of each local chunk if a separate grid adds it up after all tiles."""
    now, found = work.seconds, []
    for came, rows in zip(arrived, travel.cut(chunk), strict=True):
        now = max(now, came) + travel.adding(rows)
        found.append(now)
    return found


def _gone(travel: RowTransport, chunk: int, made: np.ndarray, begin: float = 0.0) -> list[float]:
    """When each chunk of some parts has arrived, of those that leave one after the other once they are made. A queue
    that waits for a flag begins only then, so that the start-up of each counts; what programs send is there when they
    are done. `begin`: when the queue is free."""
    if travel.by_tiles:
        return [ready + 2 * travel.network.latency for ready in made.tolist()]  # of a tile, and of its signal
    now, found = begin, []
    for ready, rows in zip(made.tolist(), itertools.cycle(travel.cut(chunk)), strict=False):
        now = max(now, ready) + travel.queue.startup + travel.sending(rows)
        found.append(now)
    return found


def by_estimate(times: Mapping[int, float]) -> list[int]:
    """Rows of chunks in the order of estimated seconds; the smallest is first among those close to the least."""
    limit = min(times.values()) * (1 + CLOSE)
    return sorted(times, key=lambda rows: (times[rows] > limit, rows if times[rows] <= limit else times[rows]))


def choose_chunk(
    move: Move,
    travel: RowTransport,
    rows: Partition,
    step: int,
    seconds: Callable[[int], float],
    carrier: str | None = None,
) -> int:
    """The rows of a chunk that `move` asks for, or else those for which `seconds` is least; it gets the estimates, with
    the fork and the join of the queue."""
    chunk = move.chunk
    if chunk is None:
        times = {count: travel.beginning + seconds(count) for count in map(rows.even, travel.chunks(step))}
        move.estimates |= {(carrier, count): time for count, time in times.items()}
        chunk = by_estimate(times)[0]
    chunk = rows.even(min(chunk, travel.height))
    move.overlapped_s = travel.beginning + seconds(chunk)
    return chunk


def choose_rows(
    site: CollectiveSite,
    uses: AccessMaps,
    rows: Partition,
    readers: Sequence[TensorUse],
    move: Move,
    seconds: Callable[[RowTransport, int, TileWork | None, TileWork | None], float],
    maker: TensorUse | None = None,
) -> int:
    """Rows of a chunk of a collective whose producer grid, or whose first consumer grid, it overlaps; records the
    estimate in the move. `seconds`: until these grids end, from the rows of a chunk, and the cost of both; None for one
    that is missing."""
    level, near = site.made.level, [use for use in (*readers[:1], maker) if use is not None]
    if uses.symbolic:
        return align(move, [*near, *readers[1:]])
    travel = RowTransport.of(site, uses, uses.sizes[level], rows.height)
    made, first = (None if use is None else TileWork.of(use, uses, level) for use in (maker, next(iter(readers), None)))
    rest = sum(TileWork.of(use, uses, level).seconds for use in readers[1:])
    step = math.lcm(*(uses.step(use, rows.height, level) for use in near))
    move.chunk = choose_chunk(move, travel, rows, step, lambda chunk: seconds(travel, chunk, made, first) + rest)
    move.in_order_s = in_order(site, uses, sum(work.seconds for work in (made, first) if work is not None) + rest)
    return move.chunk


def align(move: Move, uses: Sequence[TensorUse]) -> int:
    """The rows of a chunk that `move` has from likely extents, as whole tiles of all uses."""
    assert move.chunk is not None
    step = math.lcm(*(use.tiles.step for use in uses if use.tiles is not None))
    move.chunk = max(move.chunk // step, 1) * step
    return move.chunk


def wanted_of(site: CollectiveSite, uses: AccessMaps) -> CollectiveQuery:
    """The collective of a site, for which algorithms are chosen."""
    made, sizes = site.made, dict(uses.sizes)
    units, numbered = members(sizes, made.level), numbering(uses.machine, sizes)
    dtype = str(ir.region_parts(made.source)[0].dtype)
    return CollectiveQuery(made.name, TENSORS, made.level, units, numbered, region_bytes(made.whole[0]), dtype)


def in_order(site: CollectiveSite, uses: AccessMaps, grid: float) -> float:
    """Seconds of the collective, by the algorithm that is chosen where the machine has all, and then the grid."""
    machine, wanted = uses.machine, wanted_of(site, uses)
    able = everything(machine, wanted)
    known = [pair for name in able.names for pair in measured_times(machine, wanted, [name])]
    several = len(known) > 1  # one alone may be far from the fastest
    chosen = min(known, key=lambda pair: pair[1])[0] if several else select(machine, wanted, able).name
    return seconds(machine, wanted, chosen) + 2 * machine.tensor_level.launch + grid
