# SPDX-License-Identifier: MIT
"""Collectives on tiles: all units synchronize, and the last to arrive runs the rounds of the chosen algorithm for
all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends import base
from tilescale.backends.emulator import numerics
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.unit_rendezvous import Moves, rendezvous
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Region
from tilescale.backends.emulator.interpret.registry import operation
from tilescale.backends.emulator.operations import float8_lines, pieces
from tilescale.backends.emulator.operations.gathers import queued_collective
from tilescale.backends.emulator.operations.remote import Peer
from tilescale.collectives import TENSORS, TILES, Algorithm, RoundSchedule, records, select
from tilescale.collectives.estimate import shape_of
from tilescale.collectives.request import wanted_of
from tilescale.collectives.select import everything, moved, refusal
from tilescale.errors import Location, RankMismatchError
from tilescale.program import ops
from tilescale.program.norm import (
    GROUP,
    LARGEST,
    LEAST,
    PACKED,
    PACKED_TYPE,
    Norm,
    check_packed,
    packed_rows,
    packed_words,
)
from tilescale.program.operations import Collective, Combine

DIVIDED = ("reduce_scatter", "all_to_all")
"""Collectives that send each unit a part of a contribution."""

FLOAT8 = numerics.numpy_dtype("float8_e4m3fn")

Values = list[list[np.ndarray]]
"""The tiles that each rank contributes."""

Results = Sequence[dict[int, np.ndarray]]
"""Results of each rank, by the position of the tile argument."""


class Chosen:
    """The algorithm of a collective, chosen at its first execution: then the sizes of the launch are known."""

    def __init__(self, compiler: Compiler, made: Collective):
        self.made, self.machine, self.where = made, compiler.machine, compiler.where
        self._record: Algorithm | None = None
        self._plan: RoundSchedule | None = None

    def choose(self, frame: Frame) -> Algorithm:
        """Its record. Raises UnsupportedError: the requested algorithm does not support this number of units, or this
        type."""
        if self._record is None:
            extents, made = frame.run.extents, self.made
            self._wanted = wanted_of(made, self.machine, extents, frame.program is not None, frame.run.mesh)
            name = made.impl or self._select(base.Target(self.machine, tuple(extents.items())))
            self._record = records()[name]
            if self._record.against(frame.unit.around(made.level).siblings, made.dtype, made.op) is not None:
                refused = refusal(self._wanted, name, everything(self.machine, self._wanted))
                raise refused.at(self.where) if self.where else refused
        return self._record

    def _select(self, target: base.Target) -> str:
        return select(self.machine, self._wanted, base.available(self.made, self._wanted, target)).name

    def moves(self, frame: Frame, nbytes: int) -> Moves:
        """The transfers of the algorithm for whole tensors of `nbytes` bytes."""
        name, units = self.choose(frame).name, frame.unit.around(self.made.level).siblings
        sent, size = moved(self.made.name, name, units, nbytes, self.made.combine is not None)
        return Moves(sent, name, int(size))

    def schedule(self, frame: Frame, units: int) -> RoundSchedule:
        """The rounds of the algorithm between `units` units."""
        record, wanted = self.choose(frame), self._wanted
        if self._plan is None:
            shape: tuple[int, ...] = (units,)
            if wanted.form in (TENSORS, TILES):
                shape = shape_of(self.machine, self.machine.tensor_level.name, wanted.units, dict(wanted.sizes))
            if wanted.function and not record.takes_functions:
                record = records()["one_shot"]  # the combination of gathered tiles
            self._plan = record.schedule(self.made.name, shape)
        return self._plan


class _Tiles:
    """The tile arguments of a collective: reads of contributions, writes of results."""

    def __init__(self, compiler: Compiler, regions: Sequence[Any], brings: Callable[[Frame], int]):
        self.regions, self._brings = [Region(compiler, r) for r in regions], brings

    def payload(self, frame: Frame) -> tuple[list[np.ndarray], list[Callable[[np.ndarray], None]]]:
        """The contributed values, and functions that store a result on this unit."""
        brings = self._brings(frame)
        values = [r.read(frame) if i < brings else r.blank(frame) for i, r in enumerate(self.regions)]
        return values, [partial(region.write, frame) for region in self.regions]


def _bytes_of(compiler: Compiler, tiles: Sequence[Any]) -> Closure:
    regions = [Region(compiler, tile) for tile in tiles]
    return lambda frame: sum(region.block(frame).nbytes for region in regions)


def _collective(
    compiler: Compiler,
    made: Collective,
    compute: Callable[[Frame, RoundSchedule, Values], Results],
    brings: Callable[[Frame], int] | None = None,
    tiles: Sequence[Any] = (),
) -> Closure:
    """The closure of a collective on tiles.

    Args:
        compute: executes the rounds of the algorithm.
        brings: the number of leading tiles that a unit contributes; all by default.
        tiles: those that it computes with, if they differ from the exchanged ones.
    """
    name, level, where, chosen = made.name, made.level, compiler.where, Chosen(compiler, made)
    arguments = _Tiles(compiler, tiles or made.tiles, brings or (lambda frame: len(made.tiles)))
    brought, whole = _bytes_of(compiler, made.tiles), _bytes_of(compiler, made.whole)
    sent = brought if made.combine is not None else _bytes_of(compiler, [made.source])

    def run(frame: Frame) -> None:
        def finish(payloads: list) -> None:
            _check_shapes(payloads, name, where)
            results = compute(frame, chosen.schedule(frame, len(payloads)), [values for values, _ in payloads])
            for (_, store), mine in zip(payloads, results, strict=True):
                for index, tile in mine.items():
                    store[index](tile)

        moves = chosen.moves(frame, whole(frame))
        frame.run.collected(frame.unit, name, level, brought(frame), moves.algorithm)
        if frame.program is not None and compiler.machine.level(level).kind == "unit":
            grid, senders = frame.program.grid, frame.unit.around(level).siblings
            message = sent(frame) // (senders if name in DIVIDED else 1)
            if senders > 1:  # one unit has everything already
                frame.run.exchanged(frame.unit, id(chosen), 2 * grid.places * senders * message)
        if compiler.data:
            rendezvous(frame, level, name, where, arguments.payload(frame), finish, moves)
        else:
            rendezvous(frame, level, name, where, None, lambda _: None, moves)

    return run


def _check_shapes(payloads: list, name: str, where: Location | None) -> None:
    first = [v.shape for v in payloads[0][0]]
    for rank, (values, _) in enumerate(payloads):
        if [v.shape for v in values] != first:
            raise RankMismatchError(
                f"T.{name}: rank 0 brings tiles {first}, rank {rank} brings {[v.shape for v in values]}", where=where
            )


def _reduction(op: str, dtype: np.dtype) -> pieces.Combine:
    """Combine flat arrays in the order given, narrow floats in float32, and round once."""
    return lambda values: (numerics.reduce_many([array for (array,) in values], op, dtype),)


@operation(ops.ALLREDUCE.name)
def _allreduce(compiler: Compiler, call: ir.Call) -> Closure:
    made = Collective.of(call)
    if made.combine is not None:
        return _allreduce_function(compiler, made, made.combine)
    if made.norm is not None:
        return _allreduce_norm(compiler, made, made.norm)
    if made.wire is not None:
        return _of_tiles(compiler, made, lambda plan, tiles: float8_lines.allreduce(tiles, made.dim or 0))
    op, result = made.reduction, len(made.tiles) - 1

    def compute(frame: Frame, plan: RoundSchedule, values: Values) -> Results:
        flat = [(tile.reshape(-1),) for tile, *_ in values]
        sums = pieces.allreduce(plan, flat, _reduction(op, values[0][0].dtype))
        return [{result: total.reshape(tile.shape)} for (total,), (tile, *_) in zip(sums, values, strict=True)]

    return _collective(compiler, made, compute, lambda frame: 1)


def _allreduce_norm(compiler: Compiler, made: Collective, norm: Norm) -> Closure:
    """An all-reduce, the addition of the residual, and RMSNorm or LayerNorm of the sum in float32."""
    tiles = (made.source, *norm.read, made.target, *norm.written)
    brought = 1 + len(norm.read)
    words = compiler.expr(ir.region_parts(norm.scales)[2][0]) if norm.packed else None

    def compute(frame: Frame, plan: RoundSchedule, values: Values) -> Results:
        dtype = values[0][0].dtype
        sums = pieces.allreduce(plan, [(mine[0].reshape(-1),) for mine in values], _reduction(made.reduction, dtype))
        results = []
        for (total,), (tile, *given) in zip(sums, values, strict=True):
            if words is not None:
                check_packed(int(words(frame)), tile.size // tile.shape[-1], tile.shape[-1], compiler.where)
            others = iter(given[: len(norm.read)])
            weight = next(others)
            bias, residual = (None if tile is None else next(others) for tile in (norm.bias, norm.residual))
            parts = [total.reshape(tile.shape), *([] if residual is None else [residual])]
            y = numerics.reduce_many(parts, "sum", dtype)
            rows = _normalized(norm, y.astype(np.float32), weight, bias)
            normed = [] if norm.normed is None else [numerics.convert(rows, dtype)]
            results.append(dict(enumerate([y, *normed, *_quantized(norm, rows, [*others])], brought)))
        return results

    return _collective(compiler, made, compute, lambda frame: brought, tiles)


def _of_tiles(
    compiler: Compiler, made: Collective, play: Callable[[RoundSchedule, list[np.ndarray]], Sequence[np.ndarray]]
) -> Closure:
    """A collective that takes a tile of each unit, and stores the result in its last one: the same if in place."""
    last = len(made.tiles) - 1

    def compute(frame: Frame, plan: RoundSchedule, values: Values) -> Results:
        return [{last: result} for result in play(plan, [tile for tile, *_ in values])]

    return _collective(compiler, made, compute, lambda frame: 1)


def _normalized(norm: Norm, rows: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    if norm.centered:
        rows = rows - rows.mean(-1, keepdims=True)
    factor = 1 / np.sqrt((rows * rows).mean(-1, keepdims=True) + np.float32(norm.eps))
    made = rows * factor * (weight.astype(np.float32) + np.float32(norm.offset))
    return made if bias is None else made + bias.astype(np.float32)


def _quantized(norm: Norm, rows: np.ndarray, given: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Normalized rows as float8, and their scales unless these are given; nothing where nothing is quantized."""
    if norm.scaling is None:
        return []
    if norm.scaling == "tensor":
        return [numerics.convert(rows / given[0].reshape(-1)[0], FLOAT8)]
    wide = GROUP if norm.scaling == "group" else rows.shape[-1]
    firsts = np.arange(0, rows.shape[-1], wide)
    largest = np.maximum.reduceat(np.abs(rows), firsts, axis=-1)
    scales = (np.maximum(largest, np.float32(LEAST)) / np.float32(LARGEST)).astype(np.float32)
    if norm.power:
        scales = np.exp2(np.ceil(np.log2(scales))).astype(np.float32)
    made = numerics.convert(rows / np.repeat(scales, wide, axis=-1)[..., : rows.shape[-1]], FLOAT8)
    if norm.packed:
        return [made, _packed(scales, rows.shape[-1])]
    return [made, scales[..., 0] if norm.scaling == "row" else scales]


def _packed(scales: np.ndarray, columns: int) -> np.ndarray:
    """The exponents of powers of two, four groups of a row in a word; words of adjacent rows are adjacent."""
    exponents = (scales.reshape(-1, scales.shape[-1]).view(np.int32) >> 23).astype(np.uint8)
    high, words = packed_rows(len(exponents)), -(-exponents.shape[1] // PACKED)
    room = np.zeros((words, high, PACKED), np.uint8)
    for group, column in enumerate(exponents.T):
        room[group // PACKED, : len(column), group % PACKED] = column
    return room.view(PACKED_TYPE).reshape(-1)[: packed_words(len(exponents), columns)]


def _allreduce_function(compiler: Compiler, made: Collective, combine: Combine) -> Closure:
    """An all-reduce with the user's combination of elements at the same position."""
    left, right = ([compiler.slot(v) for v in side] for side in (combine.left, combine.right))
    results = [compiler.expr(e) for e in combine.results]

    def fold(frame: Frame, values: Sequence[pieces.Value]) -> pieces.Value:
        rank = values[0][0].ndim
        work = frame.fork(frame.unit, None)
        work.space, work.mask = values[0][0].shape, None
        total = [_expanded(v, rank) for v in values[0]]
        for other in values[1:]:
            for slot, tile in zip(left, total, strict=True):
                work.slots[slot] = tile
            for slot, tile in zip(right, other, strict=True):
                work.slots[slot] = _expanded(tile, rank)
            total = [r(work) for r in results]
        pairs = zip(total, values[0], strict=True)
        return tuple(numerics.convert(_collapsed(t, like), like.dtype) for t, like in pairs)

    def compute(frame: Frame, plan: RoundSchedule, values: Values) -> Results:
        shapes = [tile.shape for tile in values[0]]
        common = min(len(shape) for shape in shapes)
        rows = [tuple(tile.reshape(-1, *tile.shape[common:]) for tile in mine) for mine in values]
        totals = pieces.allreduce(plan, rows, lambda brought: fold(frame, brought))
        return [{i: t.reshape(shapes[i]) for i, t in enumerate(mine)} for mine in totals]

    return _collective(compiler, made, compute)


def _expanded(tile: np.ndarray, rank: int) -> np.ndarray:
    return tile.reshape(tile.shape + (1,) * (rank - tile.ndim))


def _collapsed(tile: np.ndarray, like: np.ndarray) -> np.ndarray:
    """A result in the shape of its tile: trailing dimensions that the tile lacks hold one value."""
    tile = np.asarray(tile)
    full = np.broadcast_to(tile, np.broadcast_shapes(tile.shape, _expanded(like, tile.ndim).shape))
    kept: tuple[Any, ...] = (Ellipsis, *(0 for _ in range(full.ndim - like.ndim)))
    return full[kept]


@operation(ops.REDUCE_SCATTER.name)
def _reduce_scatter(compiler: Compiler, call: ir.Call) -> Closure:
    made = Collective.of(call)
    if made.wire is not None:
        return _of_tiles(compiler, made, lambda plan, tiles: float8_lines.reduce_scatter(tiles, made.dim or 0))
    op, axis = made.reduction, made.axis
    return _of_tiles(
        compiler, made, lambda plan, tiles: pieces.reduce_scatter(plan, tiles, axis, _reduction(op, tiles[0].dtype))
    )


@operation(ops.ALL_GATHER.name)
def _all_gather(compiler: Compiler, call: ir.Call) -> Closure:
    made = Collective.of(call)
    if made.flags is not None:
        return queued_collective(compiler, made)
    if made.is_in_place:  # The parts are views of one tile, which is whole once all are written.
        level, where, part, chosen = made.level, compiler.where, _bytes_of(compiler, made.tiles), Chosen(compiler, made)

        def join(frame: Frame) -> None:
            whole = part(frame) * frame.unit.around(level).siblings
            rendezvous(frame, level, "all_gather", where, None, lambda _: None, chosen.moves(frame, whole))

        return join
    if made.wire is not None:
        return _of_tiles(compiler, made, lambda plan, tiles: float8_lines.all_gather(tiles, made.dim or 0))
    axis = made.axis
    return _of_tiles(compiler, made, lambda plan, tiles: pieces.all_gather(plan, tiles, axis))


@operation(ops.ALL_TO_ALL.name)
def _all_to_all(compiler: Compiler, call: ir.Call) -> Closure:
    made = Collective.of(call)
    if made.flags is not None:
        return queued_collective(compiler, made)
    axis = made.axis
    return _of_tiles(compiler, made, lambda plan, tiles: pieces.all_to_all(plan, tiles, axis))


@operation(ops.BROADCAST.name)
def _broadcast(compiler: Compiler, call: ir.Call) -> Closure:
    made = Collective.of(call)
    root = Peer(compiler, made.root, made.level)

    def compute(frame: Frame, plan: RoundSchedule, values: Values) -> Results:
        chosen = root.unit(frame).around(root.level).rank
        return [{0: tile.copy()} for tile in pieces.broadcast(plan, [v[0] for v in values], chosen)]

    return _collective(compiler, made, compute, lambda frame: int(root.unit(frame) is frame.unit))
