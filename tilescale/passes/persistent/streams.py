# SPDX-License-Identifier: MIT
"""Tiles of weights loaded ahead across tasks: one ring in shared memory, which all phases fill.

Before: a task has a pipelined loop over tiles of a tensor that no phase writes, as weights. Its loads begin when the
task does, so memory idles while a block waits for other tasks, and at the begin and the end of each.
After: the loads of a block are numbered through all of its tasks, in their order. Load n goes to stage n % stages of
the ring, and is issued as soon as the use of load n - stages is over, even in another task. They depend on nothing, so
they never wait for other tasks. A block has as many bytes in flight as the ring holds.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang_core import ir, tiles, tl
from tilelang_core import rewrite as tir
from tilescale.hda import Machine
from tilescale.passes.persistent.phases import Grid, Phases
from tilescale.passes.persistent.placement import Placement
from tilescale.program.effects import ProgramNames
from tilescale.program.footprint import fullest, stages_of, tile_bytes

BULK_BYTES, BOX_EXTENT = 16, 256
"""Bulk copies take rows of multiples of these bytes, and at most this many rows (PTX ISA, cp.async.bulk.tensor)."""

COMPILERS = 8 << 10
"""Bytes of shared memory left to the compiler: barriers, reductions over threads."""

MOST = 16
"""Stages of a ring, at most."""


@dataclass(frozen=True)
class Stream:
    """The loop of a phase whose tiles are loaded ahead.

    Attributes:
        load: its copy from memory, as a statement of its body.
        tile: where that puts a tile.
        trips: iterations of a task.
    """

    grid: Grid
    loop: ir.For
    load: ir.Evaluate
    tile: ir.Buffer
    trips: int

    @property
    def form(self) -> tuple[str, ...]:
        """Extents and type of the tile."""
        return (*map(str, self.tile.shape), str(self.tile.dtype))

    @classmethod
    def of(cls, grid: Grid, names: ProgramNames, written: Collection[ir.Var]) -> Stream | None:
        """The stream of a phase with one pipelined loop, outside of loops and branches, that only loads such tiles."""
        loops = [node for node in ir.statements(grid.phase.stmt) if stages_of(node)]
        if len(loops) != 1 or not any(node.same_as(loops[0]) for node in _unconditional(grid.phase.stmt)):
            return None
        (loop,) = loops
        bounds = ir.constants([loop.min, loop.extent])
        loads = [s for s in ir.statements(loop.body) if any(names.shared(a.root) for a in names.effects(s).accesses)]
        if bounds is None or bounds[0] or len(loads) != 1 or not _is_bulk(loads[0]):
            return None
        (load,) = loads
        source, target = ir.regions_of_copy(load.value)
        tile = ir.region_parts(target)[0]
        known = {*grid.launch.programs, loop.loop_var}
        is_placed = all(ir.variables(begin) <= known for begin in ir.region_parts(source)[1])
        read = {access.root for access in names.effects(load).reads}
        if read & set(written) or not is_placed or _used(grid.phase.stmt, tile) != _used(loop, tile):
            return None
        return cls(grid, loop, load, tile, bounds[1])


class Ring:
    """The ring of a launch.

    Args:
        streams: of each phase, None where it has none; all of one form.
        block: the number of the block.

    Attributes:
        ring, full: its tiles, and the barriers of its stages: of the bytes of a tile.
        ends: loads of a block until the end of each phase.
    """

    def __init__(self, streams: Sequence[Stream | None], placements: Sequence[Placement], block: ir.Var, stages: int):
        self.streams, self.placements, self.block, self.stages = streams, placements, block, stages
        tile = next(stream.tile for stream in streams if stream is not None)
        self.ring = tir.local_buffer("ring", [stages, *tile.shape], str(tile.dtype), tile.scope())
        self.full = tir.local_buffer("full", [stages], "uint64", "shared.barrier")
        self.ends = [ir.Var(f"loads{number}", "int32") for number in range(len(streams))]

    @classmethod
    def of(cls, phases: Phases, placements: Sequence[Placement], block: ir.Var, machine: Machine) -> Ring | None:
        """The ring of a program's phases; None where none has such tiles, or shared memory is full."""
        if not machine.has("tma", machine.program_level.name):
            return None
        written = {a.root for g in phases.grids for a in phases.names.all_effects(g.phase.stmt).writes}
        streams = [Stream.of(grid, phases.names, written) for grid in phases.grids]
        forms = [stream.form for stream in streams if stream is not None]
        if not forms:
            return None
        form = max(sorted(set(forms)), key=forms.count)
        streams = [s if s is not None and s.form == form else None for s in streams]
        stages = _stages(phases, streams, machine)
        return cls(streams, placements, block, stages) if stages > 1 else None

    @property
    def begin(self) -> list[ir.Stmt]:
        """Statements before the first task: how many loads a block has until the end of each phase; the first loads."""
        earlier: Any = ir.IntImm("int32", 0)
        stmts: list[ir.Stmt] = []
        for end, stream, placement in zip(self.ends, self.streams, self.placements, strict=True):
            more = 0 if stream is None else placement.turns(self.block) * stream.trips
            stmts.append(ir.Bind(end, ir.simplify(earlier + more, {})))
            earlier = end
        number, (zeros, _) = ir.Var("load", "int32"), self._spans
        first = self._load(number, zeros[0], zeros[0] + self.stages)
        return [*stmts, ir.For(number, 0, self.stages, ir.ForKind.SERIAL, first)]

    def used(self, number: int, task: ir.Var, body: ir.Stmt) -> ir.Stmt:
        """The statements of a task of a phase with its tiles from the ring, which it fills again."""
        stream = self.streams[number]
        if stream is None:
            return body
        turn = task // self.placements[number].blocks
        load = self._before(number) + turn * stream.trips + stream.loop.loop_var
        stage = load % self.stages

        def enter(node: Any) -> Any:
            if node.same_as(stream.load):
                wait = tir.call(tl.WAIT_BARRIER_PARITY, ir.BufferLoad(self.full, [stage]), load // self.stages % 2)
                return tir.evaluate(wait)
            return None

        def leave(node: Any) -> Any:
            if isinstance(node, ir.BufferLoad) and node.buffer.data.same_as(stream.tile.data):
                return ir.BufferLoad(self.ring, [stage, *node.indices])
            if tiles.is_region(node) and tiles.first_element(node).buffer.same_as(self.ring):
                return tiles.with_leading_one(node)
            return None

        begins, ends = (numbers[number] + self.stages for numbers in self._spans)
        used = tir.rewrite(stream.loop.body, enter=enter, leave=leave)
        inner = tir.sequence([used, self._load(load + self.stages, begins, ends)])
        loop = ir.For(stream.loop.loop_var, 0, stream.trips, ir.ForKind.SERIAL, inner)
        return tir.rewrite(body, enter=lambda node: tir.at(loop, stream.loop) if node.same_as(stream.loop) else None)

    def _before(self, number: int) -> Any:
        """Loads of a block before a phase."""
        return self.ends[number - 1] if number else ir.IntImm("int32", 0)

    @functools.cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """First load of each phase, and the one after its last, for each block: (phases, blocks)."""
        trips = [0 if stream is None else stream.trips for stream in self.streams]
        counts = [count * each.executed() for count, each in zip(trips, self.placements, strict=True)]
        ends = np.cumsum(counts, axis=0)
        return ends - counts, ends

    def _load(self, load: Any, first: np.ndarray, end: np.ndarray) -> ir.Stmt:
        """Issue a load, if there is one of that number, which is from `first` to `end` on each block."""
        begins, ends = self._spans
        reached = (np.maximum(begins, first) < np.minimum(ends, end)).any(axis=1)
        numbers = [(n, stream) for n, stream in enumerate(self.streams) if stream is not None and reached[n]]
        return tir.sequence([self._of_phase(load, *phase) for phase in numbers])

    def _of_phase(self, load: Any, number: int, stream: Stream) -> ir.Stmt:
        placement = self.placements[number]
        mine = load - self._before(number)
        task = placement.task(self.block, mine // stream.trips)
        values = {**stream.grid.indices(task), stream.loop.loop_var: mine % stream.trips}
        stage = load % self.stages
        full = ir.BufferLoad(self.full, [stage])
        shape = [int(n) for n in self.ring.shape[1:]]
        target = tir.region(self.ring, [stage, *[0] * len(shape)], [1, *shape], "w")
        source = ir.regions_of_copy(ir.substitute(stream.load, values).value)[0]
        copy = tir.tile_call("tma_copy", source, target, barrier=full, is_tma_copy=1)
        arrive = tir.evaluate(tir.call(tl.ARRIVE_BARRIER, full))
        issued = tir.sequence([copy, ir.IfThenElse(tir.elected(stream.grid.launch.thread_count), arrive, None)])
        return ir.IfThenElse(ir.And(self._before(number) <= load, load < self.ends[number]), issued, None)


def _stages(phases: Phases, streams: Sequence[Stream | None], machine: Machine) -> int:
    """Stages of a ring that fit in shared memory with the other tiles of each phase."""
    room = machine.capacity(machine.layer_for("shared").name) - COMPILERS
    taken, size = 0, 1
    for grid, stream in zip(phases.grids, streams, strict=True):
        if stream is None:
            taken = max(taken, fullest(grid.phase, grid.launch, phases.names, machine).nbytes)
        else:
            sizes = tile_bytes(machine, grid.launch, phases.names, ir.SHARED)
            size = sizes.pop(stream.tile.data)
            taken = max(taken, sum(sizes.values()))
    return min((room - taken) // size, MOST)


def _unconditional(stmt: ir.Stmt) -> Iterator[ir.Stmt]:
    """The statements that each task executes once, in order."""
    if isinstance(stmt, ir.SeqStmt):
        for inner in stmt.seq:
            yield from _unconditional(inner)
    elif isinstance(stmt, ir.AttrStmt):
        yield from _unconditional(stmt.body)
    else:
        yield stmt


def _is_bulk(stmt: ir.Stmt) -> bool:
    """Whether a statement is a copy that fills a tile, and a bulk copy can make it."""
    if not isinstance(stmt, ir.Evaluate) or ir.op_name(stmt.value) != tl.COPY:
        return False
    source, target = ir.regions_of_copy(stmt.value)
    if not tiles.is_region(source):
        return False
    tensor, _, box = ir.region_parts(source)
    tile, begins, _ = ir.region_parts(target)
    shape, extents, whole = ir.constants(tile.shape), ir.constants(box), ir.constants(tensor.shape)
    if shape is None or extents is None or whole is None or str(tensor.dtype) != str(tile.dtype):
        return False
    size = ir.bits(str(tile.dtype)) // 8
    is_whole = ir.constants(begins) == [0] * len(shape) and extents[-len(shape) :] == shape
    return (
        is_whole and not (shape[-1] * size % BULK_BYTES or whole[-1] * size % BULK_BYTES) and max(shape) <= BOX_EXTENT
    )


def _used(stmt: ir.Stmt, tile: ir.Buffer) -> int:
    """Statements that name a tile."""
    return sum(tile.data in ir.uses(inner) for inner in ir.statements(stmt))
