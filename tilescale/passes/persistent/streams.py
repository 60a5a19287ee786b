# SPDX-License-Identifier: MIT
"""Tiles of weights loaded ahead across tasks: one ring in shared memory, which all phases fill.

Before: a task has a pipelined loop over tiles of a tensor that no phase writes, as weights. Its loads begin when the
task does, so memory idles while a block waits for other tasks, and at the begin and the end of each.
After: the loads of a block are numbered through all of its tasks, in their order. Load n goes to stage n % stages of
the ring, and is issued as soon as the use of load n - stages is over, even in another task or iteration of a loop of
phases. They depend on nothing, so they never wait for other tasks. A block has as many bytes in flight as the ring
holds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang_core import ir, tiles, tl
from tilelang_core import rewrite as tir
from tilescale.hda import Machine
from tilescale.passes.persistent.phases import Grid, Loop, Phases
from tilescale.passes.persistent.placement import Placement
from tilescale.program.effects import ProgramNames
from tilescale.program.footprint import fullest, stages_of, tile_bytes
from tilescale.program.model import bytes_of

BULK_BYTES, BOX_EXTENT = 16, 256
"""Bulk copies take rows of multiples of these bytes, and at most this many rows (PTX ISA, cp.async.bulk.tensor)."""

COMPILERS = 8 << 10
"""Bytes of shared memory left to the compiler: barriers, reductions over threads."""

IN_FLIGHT = 64 << 10
"""Bytes that a block loads at once, at most, but two tiles. A signal waits until its block's stores are visible, which
queue behind these loads; memory has its full rate from 48 KiB on (H200)."""

AHEAD = 32 << 10
"""The same for loads of later phases: signals at the end of a phase wait for fewer bytes."""

MOST = 16
"""Stages of a ring, at most."""


@dataclass(frozen=True)
class Stream:
    """The loop of a phase whose tiles are loaded ahead.

    Attributes:
        around: serial loops around it, the outermost first.
        load: its copy from memory, as a statement of its body.
        tile: where that puts a tile.
    """

    grid: Grid
    loop: ir.For
    around: list[ir.For]
    load: ir.Evaluate
    tile: ir.Buffer

    @functools.cached_property
    def trips(self) -> int:
        """Loads of a task."""
        return math.prod(ir.integer(loop.extent) for loop in (*self.around, self.loop))

    @property
    def number(self) -> Any:
        """The number of a load among those of its task."""
        number: Any = ir.IntImm("int32", 0)
        for loop in (*self.around, self.loop):
            number = number * loop.extent + loop.loop_var
        return number

    def iteration(self, number: Any) -> dict[ir.Var, Any]:
        """Values of the loops' variables at a load."""
        found: dict[ir.Var, Any] = {}
        for loop in (self.loop, *reversed(self.around)):
            found[loop.loop_var], number = number % loop.extent, number // loop.extent
        return found

    @property
    def form(self) -> tuple[str, ...]:
        """Extents and type of the tile."""
        return (*map(str, self.tile.shape), str(self.tile.dtype))

    @classmethod
    def of(cls, grid: Grid, names: ProgramNames, written: Collection[ir.Var]) -> Stream | None:
        """The stream of a phase with one pipelined loop, outside of branches, that only loads such tiles."""
        loops = [node for node in ir.statements(grid.phase.stmt) if stages_of(node)]
        around = _around(loops[0], grid.phase.stmt) if len(loops) == 1 else None
        if around is None:
            return None
        (loop,) = loops
        loads = [s for s in ir.statements(loop.body) if any(names.shared(a.root) for a in names.effects(s).accesses)]
        if not all(map(_is_counted, (*around, loop))) or len(loads) != 1 or not _is_bulk(loads[0]):
            return None
        (load,) = loads
        source, target = ir.regions_of_copy(load.value)
        tile = ir.region_parts(target)[0]
        known = {*grid.launch.programs, *(() if grid.loop is None else (grid.loop.var,))}
        known |= {each.loop_var for each in (*around, loop)}
        is_placed = all(ir.variables(begin) <= known for begin in ir.region_parts(source)[1])
        read = {access.root for access in names.effects(load).reads}
        if read & set(written) or not is_placed or _used(grid.phase.stmt, tile) != _used(loop, tile):
            return None
        return cls(grid, loop, around, load, tile)


class Ring:
    """The ring of a launch.

    Args:
        grids: the phases.
        streams: of each phase, None where it has none; all of one form.
        block: the number of the block.

    Attributes:
        ring, full: its tiles, and the mbarriers of its stages, which count the bytes of a tile.
        flight, ahead: loads in flight, at most, when one of the same phase is issued, or one of a later phase.
        spans: for each phase, the loads of a block before it and until its end; in a loop, of the first iteration.
        begin: statements that compute these numbers.
    """

    def __init__(
        self,
        grids: Sequence[Grid],
        streams: Sequence[Stream | None],
        placements: Sequence[Placement],
        block: ir.Var,
        stages: int,
    ):
        self.grids, self.streams, self.placements, self.block, self.stages = grids, streams, placements, block, stages
        tile = next(stream.tile for stream in streams if stream is not None)
        size = bytes_of(tile.shape, str(tile.dtype)) or 1
        self.flight, self.ahead = (min(max(most // size, 2), stages) for most in (IN_FLIGHT, AHEAD))
        self.ring = tir.local_buffer("ring", [stages, *tile.shape], str(tile.dtype), tile.scope())
        self.full = tir.local_buffer("full", [stages], "uint64", "shared.barrier")
        self.begin: list[ir.Stmt] = []
        self.spans: list[tuple[Any, Any]] = []
        self.loops: dict[Loop, _LoopLoads] = {}
        before: Any = ir.IntImm("int32", 0)
        for loop, numbers in self._runs():
            start = before
            for number in numbers:
                stream = streams[number]
                more = 0 if stream is None else placements[number].turns(block) * stream.trips
                end = self._number(f"loads{number}", before + more)
                self.spans.append((before, end))
                before = end
            if loop is not None:
                end, before = before, self._number("loads_all", start + (before - start) * loop.count)
                self.loops[loop] = _LoopLoads(start, end, before)
        for begin, end in ((0, self.flight), (self.flight, stages)):
            if begin < end:
                number = ir.Var("load", "int32")
                zero = np.zeros((1, self._executed[1].shape[1]), int)
                first = self._load(number, self._phases_of(zero + begin, zero + end), begin)
                self.begin.append(ir.For(number, begin, end - begin, ir.ForKind.SERIAL, first))

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
        stages = min([_stages(phases, streams, machine), *_in_iterations(phases.grids, streams, placements)])
        return cls(phases.grids, streams, placements, block, stages) if stages > 1 else None

    def used(self, number: int, task: ir.Var, body: ir.Stmt) -> ir.Stmt:
        """The statements of a task of a phase with its tiles from the ring, which it fills again."""
        stream = self.streams[number]
        if stream is None:
            return body
        loop, turn = self.grids[number].loop, task // self.placements[number].blocks
        load, mine = ir.Var("load", "int32"), self.spans[number][0] + turn * stream.trips + stream.number
        iterations = 0 if loop is None else loop.index * self.loops[loop].each
        stage = load % self.stages

        def enter(node: ir.Node) -> Any:
            if node.same_as(stream.load):
                return self._landed(load)
            return None

        def leave(node: ir.Node) -> Any:
            if isinstance(node, ir.BufferLoad) and node.buffer.data.same_as(stream.tile.data):
                return ir.BufferLoad(self.ring, [stage, *node.indices])
            if tiles.is_region(node) and tiles.first_element(node).buffer.same_as(self.ring):
                return tiles.with_leading_one(node)
            return None

        used = tir.rewrite(stream.loop.body, enter=enter, leave=leave)
        refill = self._load(load + self.stages, self._reached(number), self.flight, number, loop, mine + self.stages)
        inner = tir.sequence([ir.Bind(load, mine + iterations), used, refill])
        again = ir.For(stream.loop.loop_var, 0, stream.loop.extent, ir.ForKind.SERIAL, inner)
        return tir.rewrite(body, enter=lambda node: tir.at(again, stream.loop) if node.same_as(stream.loop) else None)

    def _runs(self) -> Iterator[tuple[Loop | None, list[int]]]:
        """The numbers of phases, those of a loop together."""
        for loop, numbers in itertools.groupby(range(len(self.grids)), lambda number: self.grids[number].loop):
            yield loop, list(numbers)

    def _number(self, name: str, value: Any) -> ir.Var:
        """A number that is computed before the first task."""
        self.begin.append(ir.Bind(var := ir.Var(name, "int32"), ir.simplify(ir.int_node(value), {})))
        return var

    @functools.cached_property
    def _executed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Phases as executed, with iterations of loops; first load of each, and the one after its last, by block."""
        runs = [numbers * (1 if loop is None else loop.count) for loop, numbers in self._runs()]
        order = np.concatenate(runs)
        trips = [0 if stream is None else stream.trips for stream in self.streams]
        counts = np.stack([trips[number] * self.placements[number].executed() for number in order])
        ends = np.cumsum(counts, axis=0)
        return order, ends - counts, ends

    def _reached(self, number: int) -> list[int]:
        """Phases to which the loads belong that tasks of phase `number` issue, one ring ahead."""
        order, begins, ends = self._executed
        return self._phases_of(begins[order == number] + self.stages, ends[order == number] + self.stages)

    def _phases_of(self, first: np.ndarray, last: np.ndarray) -> list[int]:
        """Phases with a load whose number is in a range of its block. first, last: bounds, (ranges, blocks)."""
        order, begins, ends = self._executed
        shared = np.maximum(begins, first[:, None]) < np.minimum(ends, last[:, None])
        return sorted({int(phase) for phase in order[shared.any(axis=(0, 2))]})

    def _load(
        self, load: Any, phases: Sequence[int], flight: int,
        of: int | None = None, here: Loop | None = None, in_first: Any = None,
    ) -> ir.Stmt:  # fmt: skip
        """Issue a load by its number, if it exists; it belongs to one of `phases`.

        Args:
            flight: loads that are not complete, at most, when it is issued; 0 for any number.
            of: the phase whose task issues it. If it is of another one, fewer loads are in flight.
            here: the loop whose iteration issues it. It has at least as many loads as there are stages, so the load is
                of this iteration or the next one.
            in_first: the number that the load would have if this iteration were the first one.
        """
        stmts: list[ir.Stmt] = []
        flights = {number: self.ahead if of not in (None, number) else flight for number in phases}
        for loop, numbers in self._runs():
            among = [number for number in numbers if number in phases]
            if loop is None or loop is not here:
                values = {} if loop is None else {loop.var: ir.IntImm("int32", loop.begin)}
                stmts += [self._of_phase(number, load, values, flights[number]) for number in among]
            elif among:
                loads, again, rest = self.loops[loop], ir.Var("again", "int32"), ir.Var("rest", "int32")
                names = [
                    ir.Bind(again, ir.Select(loads.first <= in_first, ir.IntImm("int32", 1), ir.IntImm("int32", 0))),
                    ir.Bind(rest, in_first - again * loads.each),
                ]
                values = {loop.var: loop.var + again}
                each = [self._of_phase(number, rest, values, flights[number], load) for number in among]
                stmts += [*names, ir.IfThenElse(loop.index + again < loop.count, tir.sequence(each), None)]
        return tir.sequence(stmts)

    def _of_phase(
        self, number: int, load: Any, values: dict[ir.Var, Any], flight: int, issued: Any = None
    ) -> ir.Stmt:
        """Issue a load if it belongs to phase `number`. Its number is `load` in the first iteration of a loop, and
        `issued` in its own."""
        stream, placement, (before, end) = self.streams[number], self.placements[number], self.spans[number]
        assert stream is not None
        mine = load - before
        task = placement.task(self.block, mine // stream.trips)
        values = {**values, **stream.grid.indices(task), **stream.iteration(mine % stream.trips)}
        issued = load if issued is None else issued
        stage = issued % self.stages
        full = ir.BufferLoad(self.full, [stage])
        shape = [int(n) for n in self.ring.shape[1:]]
        target = tir.region(self.ring, [stage, *[0] * len(shape)], [1, *shape], "w")
        source = ir.regions_of_copy(ir.substitute(stream.load, values).value)[0]
        copy = tir.tile_call("tma_copy", source, target, barrier=full, is_tma_copy=1)
        arrive = tir.evaluate(tir.call(tl.ARRIVE_BARRIER, full))
        elected = ir.IfThenElse(tir.elected(stream.grid.launch.thread_count), arrive, None)
        paced = [self._landed(issued - flight)] if 0 < flight < self.stages else []
        return ir.IfThenElse(ir.And(before <= load, load < end), tir.sequence([*paced, copy, elected]), None)

    def _landed(self, load: Any) -> ir.Stmt:
        """Wait until a load is complete."""
        full = ir.BufferLoad(self.full, [load % self.stages])
        return tir.evaluate(tir.call(tl.WAIT_BARRIER_PARITY, full, load // self.stages % 2))


@dataclass(frozen=True)
class _LoopLoads:
    """Loads of a block until the begin of a loop of phases, until the end of its first iteration, and of its last."""

    start: Any
    first: Any
    last: Any

    @property
    def each(self) -> Any:
        """Those of an iteration."""
        return self.first - self.start


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


def _in_iterations(
    grids: Sequence[Grid], streams: Sequence[Stream | None], placements: Sequence[Placement]
) -> list[int]:
    """For each loop of phases, the fewest loads in an iteration of a block that has any."""
    counts: dict[Loop, np.ndarray] = {}
    for grid, stream, placement in zip(grids, streams, placements, strict=True):
        if grid.loop is not None and stream is not None:
            counts[grid.loop] = counts.get(grid.loop, 0) + stream.trips * placement.executed()
    return [int(each[each > 0].min()) for each in counts.values()]


def _around(loop: ir.For, stmt: ir.Stmt) -> list[ir.For] | None:
    """The serial loops around a loop, the outermost first; None where it is not in a statement, or in a branch."""
    if stmt.same_as(loop):
        return []
    if isinstance(stmt, ir.SeqStmt):
        return next((found for inner in stmt.seq if (found := _around(loop, inner)) is not None), None)
    if not isinstance(stmt, ir.AttrStmt | ir.For) or isinstance(stmt, ir.For) and stmt.kind != ir.ForKind.SERIAL:
        return None
    found = _around(loop, stmt.body)
    return [stmt, *found] if found is not None and isinstance(stmt, ir.For) else found


def _is_counted(loop: ir.For) -> bool:
    """Whether a loop has a known trip count, from 0 on."""
    bounds = ir.constants([loop.min, loop.extent])
    return bounds is not None and not bounds[0]


def _is_bulk(stmt: ir.Stmt) -> bool:
    """Whether a statement is a copy that fills a whole tile and can be a bulk copy."""
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
