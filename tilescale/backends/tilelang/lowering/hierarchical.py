# SPDX-License-Identifier: MIT
"""Collectives of programs on tiles, between groups of devices that share memory: inside them, and along rails.

A device's *rail* is the devices of the same position in all groups. Data for other groups is first combined or gathered
inside a group, by stores into workspaces of peers; NVSHMEM puts it along the rail of its holder, so each number is sent
once between two groups and all adapters work. There are three workspaces: `near` has the group's first parts, `rail`
the parts received along the rail, `spread` the parts that the group distributes last. As in exchange.py they are
double-buffered. Partial sums are sent in the tile's type and added in the order of ranks, inside and then between
groups, and rounded in each stage; a user's combination replaces them, for all tiles that belong together.

Before a device overwrites a half, it has passed two barriers of its kind, inside or along the rail, since the half was
read; and a reader reached the second one only after its reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.combine import fold, reduced
from tilescale.backends.tilelang.lowering.copies import nvshmem
from tilescale.backends.tilelang.lowering.devices import DeviceStage
from tilescale.backends.tilelang.lowering.exchange import siblings, stored, tile_of, when
from tilescale.backends.tilelang.lowering.implemented import BETWEEN, shared_axis
from tilescale.backends.tilelang.lowering.reach import split
from tilescale.backends.tilelang.lowering.registry import lowers
from tilescale.backends.tilelang.lowering.signals import RAIL, barrier_inside, barrier_of_rail, epochs
from tilescale.backends.tilelang.lowering.tile import TileRegion, parts, take_parts, whole_loops
from tilescale.backends.tilelang.nvshmem_link import IMPL
from tilescale.program import ops
from tilescale.program.operations import Collective, Combine

TileElement = Callable[[list[Any]], Any]
"""An element of a part by its indices in the part."""


class HierarchicalExchange:
    """One collective of programs with the same index on all siblings of a level.

    Attributes:
        inside: siblings of a group; `across` groups.
        group, place: this device's group, and its position in it.
    """

    def __init__(self, stage: DeviceStage, call: ir.Call, part: list[int], dtype: str):
        level, groups = stage.level_of(call).name, split(stage.target, stage.level_of(call).name)
        assert groups is not None, "the choice of the algorithm has asked for it"
        self.stage, self.level, self.part, self.dtype = stage, level, part, dtype
        self.inside, self.across = groups.inside, groups.across
        self.rank = stage.rank(level)
        self.group, self.place = self.rank // self.inside, self.rank % self.inside
        self.what = f"T.{call.op.name.removeprefix('tilescale.')} of level {level!r}"
        self.program, self.parity = stage.place(), ir.Var("parity", "int32")
        self._name = f"exchange{stage.next_number()}"
        stage.call_nvshmem()
        stage.ordered = True  # all threads of a program synchronize for each call
        stage.notes.append(f"{self.what}: {BETWEEN} through device memory inside, {IMPL} between")

    # -- workspaces --------------------------------------------------------------------------------------------------

    def _shape(self, count: int) -> tuple[int, ...]:
        return (2 * self.stage.window * count, *self.part)

    def at(self, count: int, number: Any) -> Any:
        """The position of part `number` among the `count` parts of a program in a workspace.

        The remainder proves it in bounds.
        """
        return (self.parity % 2 * self.stage.window + self.program) * count + number

    def here(self, name: str, count: int) -> ir.Buffer:
        """This device's instance of a workspace with `count` parts for each program."""
        return self.stage.workspace(f"{self._name}_{name}", self._shape(count), self.dtype)

    def received(self, name: str, count: int, number: Any) -> TileElement:
        """Part `number` of a workspace of this device."""
        return lambda index: ir.BufferLoad(self.here(name, count), [self.at(count, number), *index])

    def to_peer(self, name: str, count: int, number: Any, place: Any) -> tuple[ir.Buffer, list[Any]]:
        """The position of part `number` at the device `place` of this group: all instances, and its first indices."""
        peers = self.stage.workspace_peers(f"{self._name}_{name}", self._shape(count), self.dtype)
        device = self.stage.device_number(self.level, self.group * self.inside + place)
        return peers, [self.stage.slot(device), self.at(count, number)]

    def sent(self, count: int, number: Any) -> tuple[ir.Buffer, list[Any]]:
        """The position of a part to be sent along the rail: the workspace, and its first index."""
        shape = (self.stage.window * count, *self.part)
        return self.stage.workspace(f"{self._name}_sent", shape, self.dtype), [self.program * count + number]

    # -- steps -------------------------------------------------------------------------------------------------------

    def begin(self) -> ir.Stmt:
        """Select the half of the workspaces: all devices of a rail count the same barriers."""
        return ir.Bind(self.parity, ir.BufferLoad(epochs(self.stage, self.level, RAIL), [self.program]) % 2)

    def _each(self, value: TileElement, *places: tuple[ir.Buffer, list[Any]]) -> ir.Stmt:
        """Store every element of a part to several locations."""
        loops, held = tir.loop_variables(self.part), ir.Var("held", self.dtype)
        stores = [ir.BufferStore(buffer, held, [*first, *loops]) for buffer, first in places]
        return tir.parallel(loops, self.part, tir.sequence([ir.Bind(held, value(loops)), *stores]))

    def scatter(self, source: TileRegion, axis: int, groups: int) -> list[ir.Stmt]:
        """Part (g, p) of a tile along an axis goes to the device of position p here, to part (g, this device's
        position) of `near`."""
        count = groups * self.inside
        part, begins = parts(source, axis, count)
        if not source.in_registers:
            moves = []
            for number, begin in enumerate(begins):
                group, place = divmod(number, self.inside)
                peers, first = self.to_peer("near", count, group * self.inside + self.place, place)
                space = [*first, *[0] * len(part)], [1, 1, *part]
                moves.append(stored(source.region("r", begin, part), peers, *space))
            return moves
        loops, number, index = whole_loops(axis, part)
        group, place = number // self.inside, number % self.inside
        peers, first = self.to_peer("near", count, group * self.inside + self.place, place)
        value = ir.BufferLoad(source.buffer, source.at(loops))
        return [tir.parallel(loops, source.extents, ir.BufferStore(peers, value, [*first, *index]))]

    def summed_inside(self, groups: int, op: str) -> list[ir.Stmt]:
        """The sum of the parts in `near` for each group, at the position from which it is sent along the rail."""
        moves, count = [], groups * self.inside
        for group in range(groups):
            senders = [self.received("near", count, group * self.inside + place) for place in range(self.inside)]

            def total(index: list[Any], senders: list[TileElement] = senders) -> Any:
                return reduced([sender(index) for sender in senders], op, self.dtype, self.dtype)

            moves.append(self._each(total, self.sent(groups, group)))
        return moves

    def along_rail(self, source: Callable[[int], tuple[ir.Buffer, list[Any]]], count: int = 1) -> list[ir.Stmt]:
        """Send `count` consecutive parts to each group's device of this rail, into this group's parts of `rail`, and
        wait for arrival."""
        space, begin = self.here("rail", self.across * count), self.at(self.across * count, self.group * count)
        extents, rest = [count, *self.part], [0] * len(self.part)
        received = nvshmem.StridedTile.of(space, [begin, *rest], extents)
        moves = []
        for group in range(self.across):
            buffer, first = source(group)
            number = self.stage.device_number(self.level, group * self.inside + self.place)
            sent = nvshmem.StridedTile.of(buffer, [*first, *rest], extents)
            moves.append(nvshmem.put_part(sent, received, number % self.stage.target.devices))
        return [*moves, nvshmem.complete()]

    def total(self, op: str, result: str) -> TileElement:
        """The sum of the parts received along the rail, as a value of a type."""
        groups = [self.received("rail", self.across, group) for group in range(self.across)]
        return lambda index: reduced([part(index) for part in groups], op, self.dtype, result)

    def to_all(self, count: int, number: Any) -> list[tuple[ir.Buffer, list[Any]]]:
        """The position of part `number` of `spread` at each device of the group."""
        return [self.to_peer("spread", count, number, place) for place in range(self.inside)]

    def spread(self, value: TileElement, count: int, number: Any) -> ir.Stmt:
        """Send a part to all devices of the group, into part `number` of `spread`."""
        return self._each(value, *self.to_all(count, number))

    def take(self, name: str, count: int, target: TileRegion, axis: int) -> list[ir.Stmt]:
        """Copy the parts of a workspace into those of a tile along an axis."""
        extents = parts(target, axis, count)[0]

        def copied(number: int, part: ir.Call) -> ir.Stmt:
            begins = [self.at(count, number), *[0] * len(extents)]
            return tir.tile_call("copy", tir.region(self.here(name, count), begins, [1, *extents], "r"), part)

        return take_parts(target, axis, count, lambda number, at: self.received(name, count, number)(at), copied)

    def barrier_inside(self) -> ir.Stmt:
        """Wait for the parts of the group."""
        return barrier_inside(self.stage, self.what, self.level)

    def barrier_of_rail(self) -> ir.Stmt:
        """Wait for the parts of the rail."""
        return barrier_of_rail(self.stage, self.what, self.level)


@dataclass(frozen=True)
class _WorkspaceParts:
    """The parts of a workspace as the values of units, for a user's combination."""

    rails: HierarchicalExchange
    name: str
    devices: int

    def received(self, sender: Any, index: list[Any]) -> ir.PrimExpr:
        return self.rails.received(self.name, self.devices, sender)(index)


def _with_function(stage: DeviceStage, call: ir.Call, combine: Combine, axis: int, inside: int) -> ir.Stmt:
    """An all-reduce of tiles that belong together: a fold over the values inside, and then between groups."""
    tiles = [tile_of(stage, region) for region in Collective.of(call).tiles]
    shared = [replace(tile, extents=parts(tile, axis, inside)[0]) for tile in tiles]
    several = [HierarchicalExchange(stage, call, part.extents, part.dtype) for part in shared]
    first = several[0]
    for other in several[1:]:
        other.parity = first.parity

    def folded(
        name: str, devices: int, to: Callable[[HierarchicalExchange], Sequence[tuple[ir.Buffer, list[Any]]]]
    ) -> list[ir.Stmt]:
        came = [_WorkspaceParts(rails, name, devices) for rails in several]
        made = []
        for which, rails in enumerate(several):

            def store(value: ir.PrimExpr, index: list[ir.Var], rails: HierarchicalExchange = rails) -> ir.Stmt:
                held = ir.Var("held", rails.dtype)
                stores = [ir.BufferStore(buffer, held, [*at, *index]) for buffer, at in to(rails)]
                return tir.sequence([ir.Bind(held, value), *stores])

            made.append(fold(stage.unsupported, combine, which, shared, came, store))
        return made

    def along(rails: HierarchicalExchange) -> list[ir.Stmt]:
        return rails.along_rail(lambda group: rails.sent(1, 0))

    pairs = list(zip(several, tiles, strict=True))
    return tir.sequence(
        [
            first.begin(),
            *(move for rails, tile in pairs for move in rails.scatter(tile, axis, 1)),
            first.barrier_inside(),
            *folded("near", inside, lambda rails: [rails.sent(1, 0)]),
            *(move for rails in several for move in along(rails)),
            first.barrier_of_rail(),
            *folded("rail", first.across, lambda rails: rails.to_all(inside, rails.place)),
            first.barrier_inside(),
            *(move for rails, tile in pairs for move in rails.take("spread", inside, tile, axis)),
        ]
    )


@lowers(ops.ALLREDUCE.name, impl=BETWEEN)
def _allreduce(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made, groups = Collective.of(call), split(stage.target, Collective.of(call).level)
    axis = None if groups is None else shared_axis(made, groups.inside)
    assert groups is not None and axis is not None, "the choice of the algorithm has asked for it"
    if made.combine is not None:
        return _with_function(stage, call, made.combine, axis, groups.inside)
    tile = tile_of(stage, made.target)
    rails = HierarchicalExchange(stage, call, parts(tile, axis, groups.inside)[0], tile.dtype)
    return tir.sequence(
        [
            rails.begin(),
            *rails.scatter(tile, axis, 1),
            rails.barrier_inside(),
            *rails.summed_inside(1, made.reduction),
            *rails.along_rail(lambda group: rails.sent(1, 0)),
            rails.barrier_of_rail(),
            rails.spread(rails.total(made.reduction, tile.dtype), rails.inside, rails.place),
            rails.barrier_inside(),
            *rails.take("spread", rails.inside, tile, axis),
        ]
    )


@lowers(ops.REDUCE_SCATTER.name, impl=BETWEEN)
def _reduce_scatter(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    source, target, axis = tile_of(stage, made.source), tile_of(stage, made.target), made.axis
    rails = HierarchicalExchange(stage, call, parts(source, axis, siblings(stage, made))[0], source.dtype)
    return tir.sequence(
        [
            rails.begin(),
            *rails.scatter(source, axis, rails.across),
            rails.barrier_inside(),
            *rails.summed_inside(rails.across, made.reduction),
            *rails.along_rail(lambda group: rails.sent(rails.across, group)),
            rails.barrier_of_rail(),
            target.store(rails.total(made.reduction, target.dtype)),
        ]
    )


@lowers(ops.ALL_GATHER.name, impl=BETWEEN)
def _all_gather(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made, count = Collective.of(call), siblings(stage, Collective.of(call))
    if made.is_in_place:
        raise stage.unsupported("T.all_gather of a view has no CUDA lowering")
    source, target, axis = tile_of(stage, made.source), tile_of(stage, made.target), made.axis
    rails = HierarchicalExchange(stage, call, parts(target, axis, count)[0], source.dtype)
    buffer, first = rails.sent(1, 0)
    rest = [0] * len(rails.part)
    return tir.sequence(
        [
            rails.begin(),
            stored(source.region("r"), buffer, [*first, *rest], [1, *rails.part]),
            *rails.along_rail(lambda group: (buffer, first)),
            rails.barrier_of_rail(),
            *(
                rails.spread(rails.received("rail", rails.across, g), count, g * rails.inside + rails.place)
                for g in range(rails.across)
            ),
            rails.barrier_inside(),
            *rails.take("spread", count, target, axis),
        ]
    )


@lowers(ops.ALL_TO_ALL.name, impl=BETWEEN)
def _all_to_all(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made, count = Collective.of(call), siblings(stage, Collective.of(call))
    source, target, axis = tile_of(stage, made.source), tile_of(stage, made.target), made.axis
    rails = HierarchicalExchange(stage, call, parts(source, axis, count)[0], source.dtype)
    near = rails.here("near", count)
    return tir.sequence(
        [
            rails.begin(),
            *rails.scatter(source, axis, rails.across),
            rails.barrier_inside(),
            *rails.along_rail(lambda group: (near, [rails.at(count, group * rails.inside)]), rails.inside),
            rails.barrier_of_rail(),
            *rails.take("rail", count, target, axis),
        ]
    )


@lowers(ops.BROADCAST.name, impl=BETWEEN)
def _broadcast(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    tile, root = tile_of(stage, made.target), stage.expr(made.root)
    rails = HierarchicalExchange(stage, call, tile.extents, tile.dtype)
    buffer, first = rails.sent(1, 0)
    rest = [0] * len(rails.part)
    put = [
        stored(tile.region("r"), buffer, [*first, *rest], [1, *rails.part]),
        *rails.along_rail(lambda group: (buffer, first)),
    ]
    home = rails.received("rail", rails.across, root // rails.inside)
    on_rail = rails.place == root % rails.inside
    return tir.sequence(
        [
            rails.begin(),
            when(rails.rank == root, tir.sequence(put)),
            rails.barrier_of_rail(),
            when(on_rail, rails.spread(home, 1, 0)),
            rails.barrier_inside(),
            *rails.take("spread", 1, tile, 0),
        ]
    )
