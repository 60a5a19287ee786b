# SPDX-License-Identifier: MIT
"""Time of each tile of a grid: a few numbers of the machine, no simulation.

A tile takes as long as its arithmetic, at the rate of one program slot, as its share of reading and writing each tensor
of the grid once, or as its share of what all tiles carry through the cache in front of that memory (the roofline model,
Williams, Waterman and Patterson, 2009): small tiles of a GEMM load each operand many times. The memory may bound full
waves, and arithmetic the last one. Tiles take slots in order (list scheduling; Graham, 1966), so a grid of few tiles
ends at least one whole tile after the arrival of the last rows, even if most rows arrived before.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tilelang_core import ir, tl
from tilelang_core.tiles import regions_of
from tilescale.hda import Machine
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.program.footprint import held
from tilescale.program.grids import UnknownValue
from tilescale.program.model import GridPhase, Launch, bytes_of


@dataclass(frozen=True)
class TileWork:
    """The tiles of a grid.

    Attributes:
        tiles: how many there are.
        tile: seconds of each.
        at_once: how many a unit makes at a time, each in a place of its own.
        streamed: seconds in which the unit's memory delivers what a tile reads. All tiles share its bandwidth: those of
            a last wave that is not full have more each.
        waits: seconds of a tile's latencies of the memory, which only tiles hide that read at the same time.
        each: tiles that are resident in a place at the same time, and share its arithmetic: they are done together.
        faster: time that a tile saves by running alone, relative to one of a full wave: tiles share the unit's power.
    """

    tiles: int
    tile: float
    at_once: int
    streamed: float = 0.0
    waits: float = 0.0
    each: int = 1
    faster: float = 0.0

    @classmethod
    def of(cls, use: TensorUse, uses: AccessMaps, level: str, added: int = 0) -> TileWork:
        """Cost of the grid of a use: a tile is an iteration of a program that reaches the use. Raises Declined: how
        many there are is known at launch only. `added`: bytes of fragments that the grid's programs get in addition."""
        machine = uses.machine
        repeats = uses.repeats(use, level)
        rounds = [repeats * int(np.sum(runs)) for _, _, runs in uses.values(use, uses.ranks(level, 0), likely=True)]
        programs, places = uses.grid(use.launch, uses.ranks(level, 0)).count, machine.program_units
        tiles, at_once = max(sum(rounds), 1), min(places, programs)
        done = list(_done(use.phase, use.launch, uses, repeats))
        arithmetic = sum(count / rate_of(machine, dtype) for dtype, count in _products(done))
        memory, carried = machine.layer_for("global"), _carried(done, uses)
        cache, alone = memory.cache_bandwidth or float("inf"), memory.per_program or float("inf")
        traffic = max(_bytes(use.phase, uses) / bandwidth_of(machine), carried / cache)
        tile = max(arithmetic * places, carried / alone) / tiles
        each = max(held(use.phase, use.launch, uses.names, machine, added) // places, 1)
        return cls(tiles, tile, at_once, traffic / tiles, WAITS * memory.latency, each)

    @property
    def seconds(self) -> float:
        """Seconds until all tiles are done, without waits."""
        return float(np.max(self.done()))

    @property
    def waves(self) -> int:
        """The number of tiles of a place."""
        return -(-self.tiles // self.at_once)

    @property
    def resident(self) -> int:
        """Tiles that a unit has begun at the same time, at most."""
        return self.at_once * self.each

    def done(self, ready: Chunks = (0.0,), until: Chunks = (0.0,)) -> np.ndarray:
        """When each tile is done, in the order in which they begin.

        Args:
            ready: when the rows of each chunk are there, which the tiles go through in order.
            until: when tiles of each chunk may end, which occupy their places until then.
        """
        ends, read, number = np.empty(self.tiles), np.zeros(self.tiles), np.arange(self.tiles)
        there, kept = (np.maximum.accumulate(c)[last(number, self.tiles, len(c))] for c in (ready, until))
        for first in range(0, self.tiles, self.resident):
            wave = slice(first, min(first + self.resident, self.tiles))
            free = ends[first - self.resident : wave.stop - self.resident] if first else 0.0
            begin = np.maximum(there[wave], free)
            read[wave] = self._read(begin, np.max(read))
            ends[wave] = np.maximum.reduce([self._in_wave(len(begin))._shared(begin), read[wave], kept[wave]])
        return np.maximum(ends, read + self.waits)

    def _in_wave(self, count: int) -> TileWork:
        """The same, in a wave of `count` tiles."""
        is_full = count == self.resident
        return self if is_full else replace(self, tile=self.tile * (1 - self.faster * (1 - count / self.resident)))

    def _shared(self, begin: np.ndarray) -> np.ndarray:
        """When tiles are done that are resident at once: those that share a place, and have begun, together."""
        step, done = self.at_once, begin + self.tile + self.waits
        levels = [slice(first, first + step) for first in range(0, len(begin), step)]
        for before, level in itertools.pairwise(levels):
            count = len(done[level])
            done[level] = np.maximum(done[level], done[before][:count] + self.tile)
        for level, after in reversed(list(itertools.pairwise(levels))):
            count = len(done[after])
            mine = done[level][:count]
            done[level][:count] = np.where(begin[after] < mine, done[after], mine)
        return done

    def _read(self, begin: np.ndarray, busy: float) -> np.ndarray:
        """When each tile of a wave has read its operands from a memory that is busy before. Those that begin at the
        same time read together."""
        order, before = np.argsort(begin, kind="stable"), self.streamed * np.arange(len(begin))
        begins = np.maximum(begin, busy * (self.streamed > 0))[order]
        done = np.maximum.accumulate(begins - before) + before + self.streamed
        together = np.diff(begins, append=np.inf) > 0
        read = np.empty(len(begin))
        read[order] = done[together][np.cumsum(together) - together]
        return read

    def made(self, chunks: int) -> np.ndarray:
        """Seconds at which each of `chunks` equal chunks of tiles is complete, if no tile waits."""
        return self.done()[last(np.arange(chunks), chunks, self.tiles)]


Chunks = np.ndarray | Sequence[float]
"""A time for each chunk of rows."""

WAITS = 3
"""Memory latencies of a tile that nothing of it hides: the first loads of a pipeline, the second ones, the stores."""


def last(number: Any, count: int, others: int) -> Any:
    """Number of the last of `others` equal intervals that overlaps interval `number` of `count` over the same rows."""
    return -(-(number + 1) * others // count) - 1


def _bytes(phase: GridPhase, uses: AccessMaps) -> int:
    """Bytes of all tensors that a grid touches: of a unit's shard, where it has a part of a parameter."""
    shards = {p.buffer.data: p.shape for p in uses.program.parameters if p.buffer is not None}
    touched = {a.root for a in uses.names.all_effects(phase.stmt).accesses}
    homes = [uses.names.homes[root] for root in touched if root in uses.names.homes]
    return sum(bytes_of(shards.get(b.data, b.shape), b.dtype) or 0 for b in homes if b.scope() == "global")


def _done(phase: GridPhase, launch: Launch, uses: AccessMaps, repeats: int) -> Iterator[tuple[ir.Stmt, float]]:
    """Each statement of a grid, and how often it is done, over all programs, where those go through loops of unknown
    extent so often."""
    grid = uses.grid(launch, dict.fromkeys(uses.sizes, 0))

    def visit(stmt: ir.Stmt, times: Any) -> Iterator[tuple[ir.Stmt, float]]:
        yield stmt, float(np.sum(times))
        if isinstance(stmt, ir.For):
            try:
                times = times * np.maximum(grid.value(stmt.extent, {}), 0)
            except UnknownValue:
                times = times * repeats
        if isinstance(stmt, ir.IfThenElse) and stmt.else_case is None:
            with contextlib.suppress(UnknownValue):
                times = times * np.asarray(grid.value(stmt.condition, {}), bool)
        for inner in ir.children(stmt):
            yield from visit(inner, times)

    yield from visit(phase.stmt, np.ones(grid.count))


def _products(done: Iterable[tuple[ir.Stmt, float]]) -> Iterator[tuple[str, float]]:
    for stmt, times in done:
        if isinstance(stmt, ir.Evaluate) and str(ir.op_name(stmt.value)).startswith(tl.GEMM):
            a, _, c = map(ir.region_parts, regions_of(stmt.value)[:3])
            m, n = (ir.constant(e) or 1 for e in c[2][-2:])
            elements = [ir.constant(e) or 1 for e in a[2]]
            yield str(a[0].dtype), float(2 * n * np.prod(elements) * times) if m else 0.0


def _carried(done: Iterable[tuple[ir.Stmt, float]], uses: AccessMaps) -> float:
    """Bytes that statements load from a unit's own memory, and store there, in all."""
    return sum(
        times * (bytes_of(access.extents, access.buffer.dtype) or 0)
        for stmt, times in done
        for access in uses.names.effects(stmt).accesses
        if access.extents is not None and access.at is None and uses.names.shared(access.root)
    )


def rate_of(machine: Machine, dtype: str) -> float:
    """Operations a second of a unit that owns tensors, by its fastest arithmetic; as float32 for unknown types."""
    level = machine.tensor_level.name
    rates = machine.rates(level)
    # Variants of a format without infinities or negative zero compute at the rate of the format.
    names = (dtype, dtype.removesuffix("uz").removesuffix("fn"), "tfloat32", "float32")
    kinds = [kind for kind in names if any(kind in known for known in rates.values())]
    able = [u for u, known in rates.items() if kinds and kinds[0] in known]
    return max((machine.rate(level, unit, kinds[0], sustained=True) for unit in able), default=float("inf"))


def bandwidth_of(machine: Machine) -> float:
    """Bytes a second of a unit's own memory."""
    layer = machine.layer_for("global")
    return layer.sustained or layer.bandwidth or float("inf")
