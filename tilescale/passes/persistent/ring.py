# SPDX-License-Identifier: MIT
"""Tiles of weights and caches loaded ahead across tasks: one ring in shared memory, which all phases fill.

Before: a task loads tiles in pipelined loops. Its loads begin when the task does, so memory idles while a block waits
for other tasks, and at the begin and the end of each.
After: the loads of a block are numbered through all of its tasks, in their order. Load n goes to stage n % stages of
the ring, and is issued as soon as the use of load n - stages is over, even in another task or iteration of a loop of
phases. They depend on nothing, so they never wait for other tasks. A block has as many bytes in flight as the ring
holds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang_core import ir, tiles, tl
from tilelang_core import rewrite as tir
from tilescale.hda import Machine
from tilescale.passes.persistent.phases import Grid, Loop, Phases
from tilescale.passes.persistent.placement import Placement
from tilescale.passes.persistent.streams import Stream
from tilescale.program.footprint import fullest, tile_bytes
from tilescale.program.model import bytes_of
from tilescale.program.tile_boxes import TileAccesses

COMPILERS = 8 << 10
"""Bytes of shared memory left to the compiler: barriers, reductions over threads."""

IN_FLIGHT = 64 << 10
"""Bytes that a block loads at once, at most, but two tiles. A signal waits until its block's stores are visible, which
queue behind these loads; memory has its full rate from 48 KiB on (H200)."""

AHEAD = 32 << 10
"""The same for loads of later phases: signals at the end of a phase wait for fewer bytes."""

MOST = 16
"""Stages of a ring, at most."""


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
        tile = next(stream.loads[0].tile for stream in streams if stream is not None)
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
                more = 0 if stream is None else placements[number].iterations(block) * stream.trips
                end = self._number(f"loads{number}", before + more)
                self.spans.append((before, end))
                before = end
            if loop is not None:
                end, before = before, self._number("loads_all", start + (before - start) * loop.count)
                self.loops[loop] = _LoopLoads(start, end, before)
        for begin, end in ((0, self.flight), (self.flight, stages)):
            if begin < end:
                number, owners = ir.Var("load", "int32"), self._owners(lambda *_, b=begin, e=end: np.arange(b, e))
                first = self._load(number, owners, begin)
                self.begin.append(ir.For(number, begin, end - begin, ir.ForKind.SERIAL, first))

    @classmethod
    def of(
        cls, phases: Phases, accesses: Sequence[TileAccesses], placements: Sequence[Placement], block: ir.Var,
        machine: Machine,
    ) -> Ring | None:  # fmt: skip
        """The ring of a program's phases; None where none has such tiles, or shared memory is full."""
        if not machine.has("tma", machine.program_level.name):
            return None
        written = [{a.root for a in phases.names.all_effects(g.phase.stmt).writes} for g in phases.grids]
        streams: list[Stream | None] = []
        for number, (grid, accessed) in enumerate(zip(phases.grids, accesses, strict=True)):
            others: set[ir.Var] = set().union(*written[:number], *written[number + 1 :])
            streams.append(Stream.of(grid, accessed, phases.names, others))
        # TileLang takes minutes where the number of a load, among several of an iteration, depends on the block.
        is_even = all(p.is_even for p, stream in zip(placements, streams, strict=True) if stream is not None)
        streams = [s if s is not None and (is_even or len(s.loads) == 1) else None for s in streams]
        forms = [form for stream in streams if stream is not None for form in stream.forms]
        if not forms:
            return None
        form = max(sorted(set(forms)), key=forms.count)
        streams = [s if s is not None and s.forms == {form} else None for s in streams]
        stages = min([_stages(phases, streams, machine), *_in_iterations(phases.grids, streams, placements)])
        return cls(phases.grids, streams, placements, block, stages) if stages > 1 else None

    def used(self, number: int, task: ir.Var, body: ir.Stmt) -> ir.Stmt:
        """The statements of a task of a phase with its tiles from the ring, which it fills again."""
        stream = self.streams[number]
        if stream is None:
            return body
        iteration = task // self.placements[number].blocks
        first = self.spans[number][0] + iteration * stream.trips
        again = [(loop, self._refilled(number, loop, places, first)) for loop, places in stream.loops]

        def enter(node: ir.Node) -> Any:
            return next((tir.at(made, loop) for loop, made in again if node.same_as(loop)), None)

        return tir.rewrite(body, enter=enter)

    def _refilled(self, number: int, loop: ir.For, places: list[int], first: Any) -> ir.For:
        """A loop that takes tiles of loads from the ring, and fills their stages again behind the last use.

        `first`: the number of the task's first load, as in the first iteration of a loop of phases.
        """
        stream, here = self._of(number), self.grids[number].loop
        iterations = 0 if here is None else here.index * self.loops[here].each
        loads = [stream.loads[place].stmt for place in places]
        parts = [[] if any(map(stmt.same_as, loads)) else [stmt] for stmt in ir.in_order(loop.body)]
        for place in places:
            load, uses = stream.loads[place], stream.uses(place)
            name, mine = ir.Var("load", "int32"), first + load.number
            for part in parts[uses[0] : uses[-1] + 1]:
                part[:] = [self._in_stage(stmt, load.tile, name % self.stages) for stmt in part]
            next_one = name + self.stages, self._reached(number, place), self.flight
            parts[uses[0]][:0] = [ir.Bind(name, mine + iterations), self._landed(name)]
            parts[uses[-1]].append(self._load(*next_one, number, here, mine + self.stages))
        body = tir.sequence([stmt for part in parts for stmt in part])
        return ir.For(loop.loop_var, 0, loop.extent, ir.ForKind.SERIAL, body)

    def _in_stage(self, stmt: ir.Stmt, tile: ir.Buffer, stage: Any) -> ir.Stmt:
        """A statement that uses a stage of the ring as a tile."""

        def leave(node: ir.Node) -> Any:
            if isinstance(node, ir.BufferLoad) and node.buffer.data.same_as(tile.data):
                return ir.BufferLoad(self.ring, [stage, *node.indices])
            if tiles.is_region(node) and tiles.first_element(node).buffer.same_as(self.ring):
                return tiles.with_leading_one(node)
            return None

        return tir.rewrite(stmt, leave=leave)

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

    def _reached(self, number: int, place: int) -> dict[int, set[int]]:
        """The loads that tasks of a phase issue behind the use of a tile, one ring ahead: `_owners` of them."""
        order, stream = self._executed[0], self._of(number)
        mine = np.flatnonzero(np.array(stream.order) == place)

        def numbers(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
            spans = zip(begins[order == number], ends[order == number], strict=True)
            tasks = np.concatenate([np.arange(begin, end, stream.trips) for begin, end in spans])
            return (tasks[:, None] + mine).ravel() + self.stages

        return self._owners(numbers)

    def _owners(self, numbers: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> dict[int, set[int]]:
        """The phases that loads belong to, and for each their places in its stream.

        `numbers`: those of a block's loads, from its first load in each executed phase and the one after its last.
        """
        order, *spans = self._executed
        found: dict[int, set[int]] = {}
        for span in np.unique(np.stack(spans, axis=-1), axis=1).swapaxes(0, 1):
            begins, ends = span.T
            wanted = numbers(begins, ends)
            wanted = wanted[wanted < ends[-1]]
            executed = np.searchsorted(ends, wanted, side="right")
            for phase, load in zip(order[executed].tolist(), (wanted - begins[executed]).tolist(), strict=True):
                found.setdefault(phase, set()).add(self._of(phase).order[load % self._of(phase).trips])
        return found

    def _of(self, number: int) -> Stream:
        stream = self.streams[number]
        assert stream is not None
        return stream

    def _load(
        self, load: Any, owners: dict[int, set[int]], flight: int,
        of: int | None = None, here: Loop | None = None, in_first: Any = None,
    ) -> ir.Stmt:  # fmt: skip
        """Issue a load by its number, if it exists.

        Args:
            owners: the phases that it may belong to, and for each its places there: see `_owners`.
            flight: loads that are not complete, at most, when it is issued; 0 for any number.
            of: the phase whose task issues it. If it is of another one, fewer loads are in flight.
            here: the loop whose iteration issues it. It has at least as many loads as there are stages, so the load is
                of this iteration or the next one.
            in_first: the number that the load would have if this iteration were the first one.
        """
        stmts: list[ir.Stmt] = []
        flights = {number: self.ahead if of not in (None, number) else flight for number in owners}
        for loop, numbers in self._runs():
            among = [number for number in numbers if number in owners]
            if loop is None or loop is not here:
                values = {} if loop is None else {loop.var: ir.IntImm("int32", loop.begin)}
                stmts += [self._of_phase(number, owners[number], load, values, flights[number]) for number in among]
            elif among:
                loads, again, rest = self.loops[loop], ir.Var("again", "int32"), ir.Var("rest", "int32")
                names = [
                    ir.Bind(again, ir.Select(loads.first <= in_first, ir.IntImm("int32", 1), ir.IntImm("int32", 0))),
                    ir.Bind(rest, in_first - again * loads.each),
                ]
                values = {loop.var: loop.var + again}
                each = [self._of_phase(number, owners[number], rest, values, flights[number], load) for number in among]
                stmts += [*names, ir.IfThenElse(loop.index + again < loop.count, tir.sequence(each), None)]
        return tir.sequence(stmts)

    def _of_phase(
        self, number: int, places: set[int], load: Any, values: dict[ir.Var, Any], flight: int, issued: Any = None
    ) -> ir.Stmt:
        """Issue a load if it belongs to phase `number`, at one of some places. Its number is `load` in the first
        iteration of a loop, and `issued` in its own."""
        stream, placement, (before, end) = self._of(number), self.placements[number], self.spans[number]
        mine = load - before
        task = placement.task(self.block, mine // stream.trips)
        values = {**values, **stream.grid.indices(task)}
        issued = load if issued is None else issued
        stage = issued % self.stages
        full = ir.BufferLoad(self.full, [stage])
        shape = [int(n) for n in self.ring.shape[1:]]
        target = tir.region(self.ring, [stage, *[0] * len(shape)], [1, *shape], "w")
        copy = None
        for place in sorted(places, reverse=True):
            of_task, each = mine % stream.trips, stream.loads[place]
            source = ir.substitute(each.source, {**values, **each.iteration(of_task)})
            made = tir.tile_call("tma_copy", source, target, barrier=full, is_tma_copy=1)
            copy = made if copy is None else ir.IfThenElse(each.has(of_task), made, copy)
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
            size = [sizes.pop(tile.data) for tile in {load.tile for load in stream.loads}][0]
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
