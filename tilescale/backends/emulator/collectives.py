# SPDX-License-Identifier: MIT
"""Barriers and collectives.

A collective is a meeting: the last unit to arrive computes the result for all. The units of a meeting are those whose
coordinates agree in all levels but the collective's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.access import Region
from tilescale.backends.emulator.compiler import Compiler
from tilescale.backends.emulator.exchange import Peer
from tilescale.backends.emulator.expr import Closure
from tilescale.backends.emulator.frame import Frame
from tilescale.backends.emulator.gathers import queued_gather
from tilescale.backends.emulator.registry import operation
from tilescale.backends.emulator.scheduler import Wait
from tilescale.backends.emulator.units import Unit
from tilescale.errors import RankMismatchError
from tilescale.program import ops
from tilescale.program.operations import Barrier, Collective, Combine

# -- meetings ----------------------------------------------------------------------------------------------------------


def meet(
    frame: Frame,
    level: str,
    name: str,
    where: Any,
    payload: Any,
    finish: Callable[[list], None],
    nbytes: int = 0,
    impl: str | None = None,
) -> None:
    """Wait for all units of the level; the last one calls `finish` with all payloads in the order of ranks.

    Args:
        nbytes: of the whole tensor that it is about, and `impl`, how, for the clock.

    Raises:
        RankMismatchError: the others are at another collective.
    """
    unit = frame.unit
    mine = unit.around(level)
    group = tuple(step for step in unit.path() if step[0] != level)
    turn = unit.counters.get(level, 0)
    unit.counters[level] = turn + 1
    phase = frame.program.grid.number if frame.program is not None else -1
    key = (level, group, phase, turn)
    meeting = frame.run.meetings.get(key)
    if meeting is None:
        meeting = frame.run.meetings[key] = Meeting(mine, name, where, unit)
    if (meeting.name, meeting.where) != (name, where):
        raise RankMismatchError(
            f"{unit} calls T.{name} where {meeting.first} calls T.{meeting.name}: "
            f"units of level {level!r} must reach the same collectives in the same order",
            where=[w for w in (where, meeting.where) if w],
        )
    meeting.payloads[mine.rank] = payload
    if frame.run.clock is not None:
        frame.run.clock.meets(frame, meeting, mine.rank, name, level, nbytes, impl)
    frame.run.publishes(meeting)
    if len(meeting.payloads) == meeting.size:
        frame.run.acquires(meeting)
        finish([meeting.payloads[rank] for rank in range(meeting.size)])
        frame.run.publishes(meeting)
        meeting.done = True
        del frame.run.meetings[key]
        frame.run.scheduler.progress += 1
    frame.run.scheduler.block(
        Wait(
            lambda: meeting.done,
            f"T.{name} of level {level!r}",
            lambda: f"{len(meeting.payloads)} of {meeting.size} units are there",
            where,
            meeting.absent,
        )
    )
    frame.run.acquires(meeting)


class Meeting:
    """One collective call of one group of units.

    Attributes:
        number: what tells it from all others of the run.
    """

    def __init__(self, member: Unit, name: str, where: Any, first: Unit):
        self.member, self.size = member, member.siblings
        self.name, self.where, self.first = name, where, first
        self.payloads: dict[int, Any] = {}
        self.done = False
        self.number = 0

    def absent(self) -> str:
        """Who has not arrived."""
        missing = [rank for rank in range(self.size) if rank not in self.payloads]
        return f"{self.member.siblings_named(missing)} did not reach it"


@operation(ops.BARRIER.name)
def _barrier(compiler: Compiler, call: ir.Call) -> Closure:
    level, where = Barrier.of(call).level, compiler.where
    return lambda frame: meet(frame, level, "barrier", where, None, lambda _: None)


class _Tiles:
    """The tile arguments of a collective, and how units hand them in and take results."""

    def __init__(self, compiler: Compiler, regions: Sequence[Any], brings: Callable[[Frame], int]):
        self.regions, self._brings = [Region(compiler, r) for r in regions], brings

    def payload(self, frame: Frame) -> tuple[list[np.ndarray], list[Callable[[np.ndarray], None]]]:
        """Values, and functions that store a result on this unit."""
        brings = self._brings(frame)
        values = [r.read(frame) if i < brings else r.blank(frame) for i, r in enumerate(self.regions)]
        return values, [lambda tile, r=region: r.write(frame, tile) for region in self.regions]


def _bytes_of(compiler: Compiler, tiles: Sequence[Any]) -> Closure:
    """Bytes of some tiles."""
    regions = [Region(compiler, tile) for tile in tiles]
    return lambda frame: sum(region.block(frame).nbytes for region in regions)


def _collective(
    compiler: Compiler, made: Collective, combine: Callable, brings: Callable[[Frame], int] | None = None
) -> Closure:
    """A collective on tiles, of which a unit `brings` the first, or all.

    `combine(frame, all ranks' values)` yields for each rank what to store where.
    """
    name, level, impl, where = made.name, made.level, made.impl, compiler.where
    arguments = _Tiles(compiler, made.tiles, brings or (lambda frame: len(made.tiles)))
    brought, whole = _bytes_of(compiler, made.tiles), _bytes_of(compiler, made.whole)

    def run(frame: Frame) -> None:
        def finish(payloads: list) -> None:
            _check_shapes(payloads, name, where)
            results = combine(frame, [values for values, _ in payloads])
            for (_, store), mine in zip(payloads, results, strict=True):
                for index, tile in mine.items():
                    store[index](tile)

        frame.run.collected(frame.unit, name, level, brought(frame))
        nbytes = whole(frame)
        if compiler.data:
            meet(frame, level, name, where, arguments.payload(frame), finish, nbytes, impl)
        else:
            meet(frame, level, name, where, None, lambda _: None, nbytes, impl)

    return run


def _check_shapes(payloads: list, name: str, where: Any) -> None:
    first = [v.shape for v in payloads[0][0]]
    for rank, (values, _) in enumerate(payloads):
        if [v.shape for v in values] != first:
            raise RankMismatchError(
                f"T.{name}: rank 0 brings tiles {first}, rank {rank} brings {[v.shape for v in values]}", where=where
            )


@operation(ops.ALLREDUCE.name)
def _allreduce(compiler: Compiler, call: ir.Call) -> Closure:
    made = Collective.of(call)
    if made.combine is not None:
        return _allreduce_function(compiler, made, made.combine)
    op = made.op

    def combine(frame: Frame, values: list) -> list[dict[int, np.ndarray]]:
        total = numerics.reduce_many([v[0] for v in values], op, values[0][0].dtype)
        return [{0: total}] * len(values)

    return _collective(compiler, made, combine)


def _allreduce_function(compiler: Compiler, made: Collective, combine: Combine) -> Closure:
    """An all-reduce with the user's combination: a fold over the ranks, element by element."""
    left, right = ([compiler.slot(v) for v in side] for side in (combine.left, combine.right))
    results = [compiler.expr(e) for e in combine.results]

    def fold(frame: Frame, values: list) -> list[dict[int, np.ndarray]]:
        rank = values[0][0].ndim
        space = values[0][0].shape
        work = frame.fork(frame.unit, None)
        work.space, work.mask = space, None
        total = [_expanded(v, rank) for v in values[0]]
        for other in values[1:]:
            for slot, tile in zip(left, total, strict=True):
                work.slots[slot] = tile
            for slot, tile in zip(right, other, strict=True):
                work.slots[slot] = _expanded(tile, rank)
            total = [r(work) for r in results]
        tiles = {i: _collapsed(t, like) for i, (t, like) in enumerate(zip(total, values[0], strict=True))}
        return [tiles] * len(values)

    return _collective(compiler, made, fold)


def _expanded(tile: np.ndarray, rank: int) -> np.ndarray:
    return tile.reshape(tile.shape + (1,) * (rank - tile.ndim))


def _collapsed(tile: np.ndarray, like: np.ndarray) -> np.ndarray:
    """A result in the shape of its tile: the trailing dimensions that it does not have hold one value."""
    tile = np.asarray(tile)
    full = np.broadcast_to(tile, np.broadcast_shapes(tile.shape, _expanded(like, tile.ndim).shape))
    return full[(Ellipsis, *(0 for _ in range(full.ndim - like.ndim)))]


@operation(ops.REDUCE_SCATTER.name)
def _reduce_scatter(compiler: Compiler, call: ir.Call) -> Closure:
    made = Collective.of(call)
    op, axis = made.op, made.dim

    def combine(frame: Frame, values: list) -> list[dict[int, np.ndarray]]:
        total = numerics.reduce_many([v[0] for v in values], op, values[0][0].dtype)
        return [{1: part} for part in np.split(total, len(values), axis)]

    return _collective(compiler, made, combine, lambda frame: 1)


@operation(ops.ALL_GATHER.name)
def _all_gather(compiler: Compiler, call: ir.Call) -> Closure:
    made = Collective.of(call)
    if made.flags is not None:
        return queued_gather(compiler, made)
    if made.is_in_place:  # The parts are views of one tile: once all are written, it is whole.
        level, where, part = made.level, compiler.where, _bytes_of(compiler, made.tiles)

        def join(frame: Frame) -> None:
            whole = part(frame) * frame.unit.around(level).siblings
            meet(frame, level, "all_gather", where, None, lambda _: None, whole, made.impl)

        return join
    axis = made.dim

    def combine(frame: Frame, values: list) -> list[dict[int, np.ndarray]]:
        whole = np.concatenate([v[0] for v in values], axis)
        return [{1: whole}] * len(values)

    return _collective(compiler, made, combine, lambda frame: 1)


@operation(ops.ALL_TO_ALL.name)
def _all_to_all(compiler: Compiler, call: ir.Call) -> Closure:
    made = Collective.of(call)
    axis = made.dim

    def combine(frame: Frame, values: list) -> list[dict[int, np.ndarray]]:
        parts = [np.split(v[0], len(values), axis) for v in values]
        return [{1: np.concatenate([sent[rank] for sent in parts], axis)} for rank in range(len(values))]

    return _collective(compiler, made, combine, lambda frame: 1)


@operation(ops.BROADCAST.name)
def _broadcast(compiler: Compiler, call: ir.Call) -> Closure:
    made = Collective.of(call)
    root = Peer(compiler, made.root, made.level)

    def combine(frame: Frame, values: list) -> list[dict[int, np.ndarray]]:
        chosen = root.unit(frame).around(root.level).rank
        return [{0: values[chosen][0].copy()}] * len(values)

    return _collective(compiler, made, combine, lambda frame: int(root.unit(frame) is frame.unit))
