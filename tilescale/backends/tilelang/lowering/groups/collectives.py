# SPDX-License-Identifier: MIT
"""Collectives of a program's units: copies to and from siblings, collectives, barriers, through shared memory.

Each unit stores its part in shared memory, all synchronize, each loads the parts it needs, all synchronize again so
that the memory can be reused. Tiles in shared memory are accessed in place. Every unit has its own text of a barrier:
these rules lower one unit's part. Elements combine in the order of ranks, so all units get the same bits.
"""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.combine import fold, reduced
from tilescale.backends.tilelang.lowering.groups.clones import KIND, UnitClone
from tilescale.backends.tilelang.lowering.groups.results import COLUMNS, SLOTS_BELOW, has_halves
from tilescale.backends.tilelang.lowering.groups.slots import UnitSlots, copied, gather
from tilescale.backends.tilelang.lowering.registry import lowers
from tilescale.backends.tilelang.lowering.tile import TileRegion
from tilescale.program import ops
from tilescale.program.operations import Collective


def operand(clone: UnitClone, region: ir.Call) -> TileRegion:
    """A tile argument, as the user wrote it. Raises UnsupportedError: its extents are symbolic."""
    buffer, begins, extents = ir.region_parts(region)
    known = ir.constants(clone.expr(e) for e in extents)
    if known is None:
        raise clone.stage.unsupported(f"an exchange of {buffer.name!r} between units, whose extents are symbolic")
    return TileRegion(buffer, buffer.name, begins, known)


@lowers(ops.BARRIER.name, KIND)
def _barrier(clone: UnitClone, call: ir.Call) -> ir.Stmt:
    return clone.unit.barrier()


def in_steps(clone: UnitClone, *steps: ir.Stmt | None) -> ir.Stmt:
    """Statements in the user's names, as this unit runs them; None for a barrier."""
    barrier = clone.unit.barrier()
    return tir.sequence([barrier if step is None else clone.stmt(step) for step in steps])


def slots_for(clone: UnitClone, tile: TileRegion, **how: Any) -> UnitSlots:
    return UnitSlots(clone.stage, clone.unit, tile.extents, tile.dtype, **how)


@lowers(ops.ALLREDUCE.name, KIND, "one_shot")
def _allreduce(clone: UnitClone, call: ir.Call) -> ir.Stmt:
    _note(clone, call)
    made = Collective.of(call)
    if made.combine is not None:
        tiles = [operand(clone, region) for region in made.tiles]
        sides = [slots_for(clone, tile, number=number) for number, tile in enumerate(tiles)]
        puts = [s.put(tile.region("r")) for s, tile in zip(sides, tiles, strict=True)]
        folds = [fold(clone.stage.unsupported, made.combine, which, tiles, sides) for which in range(len(tiles))]
        return in_steps(clone, *puts, None, *folds, None)
    tile, op = operand(clone, made.target), made.reduction
    base = clone.stage.tile(clone.stage.distributions.base(tile.buffer))
    if base is not None and has_halves(clone.stage, base) and tile.extents == list(map(ir.constant, base.shape)):
        return _in_halves(clone, tile, op, base.data in clone.stage.stored)
    slots = slots_for(clone, tile)
    if slots.size > SLOTS_BELOW:
        return _one_by_one(clone, tile, op)
    total = tile.store(lambda loops: reduced(slots.all(loops), op, tile.dtype, tile.dtype))
    return in_steps(clone, slots.put(tile.region("r")), None, total, None)


def _in_halves(clone: UnitClone, tile: TileRegion, op: str, enough: bool) -> ir.Stmt:
    """Each of two units stores the other's half of the columns, and adds to its half; then they exchange the sums.
    `enough`: whether the sum of the unit's half is enough."""
    unit = clone.unit
    mine, half = unit.number, tile.extents[-1] // 2
    # Threads of a warp hold 8 rows: apart by 8 words they lie in different banks.
    slots = UnitSlots(clone.stage, unit, [*tile.extents[:-1], half], tile.dtype, apart=COLUMNS)

    def part(number: int, access: str) -> ir.Call:
        return tir.region(tile.buffer, [*tile.begins[:-1], tile.begins[-1] + number * half], slots.shape, access)

    loops = tir.loop_variables(slots.shape)
    at = tile.at([*loops[:-1], loops[-1] + mine * half])
    both = [ir.BufferLoad(tile.buffer, at), slots.received(mine, loops)]
    total = reduced(both if mine == 0 else both[::-1], op, tile.dtype, tile.dtype)
    add = tir.parallel(loops, slots.shape, ir.BufferStore(tile.buffer, total, at))
    steps = [copied(part(1 - mine, "r"), slots.place(1 - mine, "w")), None, add]
    if not enough:
        sums = copied(part(mine, "r"), slots.place(mine, "w"))
        steps += [sums, None, copied(slots.place(1 - mine, "r"), part(1 - mine, "w"))]
    return in_steps(clone, *steps, None)


def _one_by_one(clone: UnitClone, tile: TileRegion, op: str) -> ir.Stmt:
    """One after another lays its tile down and the first unit adds it, whose result then goes round."""
    slots, rank = slots_for(clone, tile, one=True), clone.unit.number

    def added(loops: list[ir.Var]) -> Any:
        own = ir.BufferLoad(tile.buffer, tile.at(loops))
        return reduced([own, slots.received(0, loops)], op, tile.dtype, tile.dtype)

    put = slots.put(tile.region("r"), 0)
    steps: list[ir.Stmt | None] = []
    for sender in range(1, clone.unit.siblings):
        steps += [*([put] if rank == sender else []), None, *([tile.store(added)] if rank == 0 else [])]
        steps += [None] if sender + 1 < clone.unit.siblings else []
    last = [put, None] if rank == 0 else [None, copied(slots.place(0, "r"), tile.region("r"))]
    return in_steps(clone, *steps, *last, None)


@lowers(ops.ALL_GATHER.name, KIND, "direct")
def _all_gather(clone: UnitClone, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    part = operand(clone, made.source)
    if not made.is_in_place:
        _note(clone, call)
        target, axis = operand(clone, made.target), made.axis
        whole = slots_for(clone, target, one=True)
        begin = [clone.unit.number * n if a == axis else 0 for a, n in enumerate(part.extents)]
        put = copied(part.region("r"), whole.place(0, "w", begin, part.extents))
        return in_steps(clone, put, None, copied(whole.place(0, "r"), target.region("r")), None)
    if part.in_memory:
        return clone.unit.barrier()
    return _gather_view(clone, part)


def _gather_view(clone: UnitClone, part: TileRegion) -> ir.Stmt:
    """Gather the shares of a fragment: afterwards every unit has the whole tile in addition to its share."""
    view = clone.views.get(part.buffer.data)
    base = view.base if view is not None else part.buffer
    held = clone.stage.distributions.of(base)
    if held is None or held.axis is None or held.cyclic or part.extents != [ir.constant(n) for n in part.buffer.shape]:
        raise clone.stage.unsupported(f"T.all_gather of {part.name!r}, which is no contiguous share of a tile")
    shape = [ir.constant(n) for n in base.shape]
    whole = clone.stage.whole_of(base, clone.unit, gathered=True)
    target = tir.region(whole, [0] * len(shape), shape, "w")
    own = tir.region(clone.stage.copy_of(base, clone.unit), [0] * len(shape), part.extents, "r")
    return clone.stmt(gather(clone.stage, clone.unit, own, held.axis, target))


@lowers(ops.REDUCE_SCATTER.name, KIND, "direct")
def _reduce_scatter(clone: UnitClone, call: ir.Call) -> ir.Stmt:
    _note(clone, call)
    made = Collective.of(call)
    source, target = operand(clone, made.source), operand(clone, made.target)
    slots, axis = slots_for(clone, source), made.axis
    begin = clone.unit.number * target.extents[axis]

    def total(loops: list[ir.Var]) -> Any:
        index = [i + begin if a == axis else i for a, i in enumerate(loops)]
        return reduced(slots.all(index), made.reduction, source.dtype, target.dtype)

    return in_steps(clone, slots.put(source.region("r")), None, target.store(total), None)


@lowers(ops.ALL_TO_ALL.name, KIND, "direct")
def _all_to_all(clone: UnitClone, call: ir.Call) -> ir.Stmt:
    _note(clone, call)
    made = Collective.of(call)
    source, target = operand(clone, made.source), operand(clone, made.target)
    slots, axis = slots_for(clone, source), made.axis
    part = source.extents[axis] // clone.unit.siblings

    def sent(loops: list[ir.Var]) -> Any:
        index = [i % part + clone.unit.number * part if a == axis else i for a, i in enumerate(loops)]
        return slots.received(loops[axis] // part, index)

    return in_steps(clone, slots.put(source.region("r")), None, target.store(sent), None)


@lowers(ops.BROADCAST.name, KIND, "direct")
def _broadcast(clone: UnitClone, call: ir.Call) -> ir.Stmt:
    _note(clone, call)
    made = Collective.of(call)
    tile = operand(clone, made.target)
    slots, root = slots_for(clone, tile, one=True), clone.expr(made.root)
    is_root = ir.EQ(ir.int_node(root), ir.int_node(clone.unit.number))
    put = ir.IfThenElse(is_root, slots.put(tile.region("r"), 0), None)
    return in_steps(clone, put, None, copied(slots.place(0, "r"), tile.region("r")), None)


def _note(clone: UnitClone, call: ir.Call) -> None:
    if clone.unit.number == 0:
        name = call.op.name.removeprefix("tilescale.")
        clone.stage.notes.append(f"T.{name} of level {clone.unit.level!r}: through shared memory")
