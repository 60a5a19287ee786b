# SPDX-License-Identifier: MIT
"""What the units of a program do together: copies to and from siblings, collectives, barriers, through shared memory.

Each unit lays its part down in shared memory, all meet, each takes what it needs, all meet again so that the memory is
free. Tiles that lie in shared memory already are reached where they are. Every unit has its own text of a meeting:
these rules give the part of one. Elements combine in the order of ranks, so all units get the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering.combine import fold, reduced
from tilescale.backends.cuda.lowering.lanes.results import COLUMNS, TURNS_ABOVE
from tilescale.program import ops
from tilescale.program.operations import Collective, Copy

if TYPE_CHECKING:
    from tilescale.backends.cuda.lowering.lanes.clones import Clone
    from tilescale.backends.cuda.lowering.lanes.lanes import LaneLowering, Unit


class Operand:
    """A tile argument: a region of constant extents, as the user wrote it."""

    def __init__(self, clone: Clone, region: ir.Call):
        self.region = region
        self.buffer, self.begins, extents = ir.region_parts(region)
        self.name, self.dtype = self.buffer.name, str(self.buffer.dtype)
        known = ir.constants(clone.expr(e) for e in extents)
        if known is None:
            raise clone.lowering.unsupported(f"an exchange of {self.name!r} between units, whose extents are symbolic")
        self.extents = known

    def at(self, index: Sequence[Any]) -> list[Any]:
        """Indices of an element of the tile in its buffer."""
        return [b + i for b, i in zip(self.begins, index, strict=True)]

    def store(self, value: Callable[[list[ir.Var]], Any]) -> ir.Stmt:
        """Set every element."""
        loops = tir.loop_variables(self.extents)
        return tir.parallel(loops, self.extents, ir.BufferStore(self.buffer, value(loops), self.at(loops)))

    @property
    def in_memory(self) -> bool:
        """Whether siblings can reach it."""
        return not self.buffer.scope().startswith("local")


class Slots:
    """Shared memory with a slot for each unit, which all meetings with the same slots use one after another.

    Args:
        apart: elements between rows.
    """

    def __init__(
        self,
        lanes: LaneLowering,
        unit: Unit,
        shape: Sequence[int],
        dtype: str,
        *,
        one: bool = False,
        number: int = 0,
        apart: int = 0,
    ):
        self.unit, self.shape, self.devices = unit, list(shape), 1 if one else unit.siblings
        self.lanes, self.dtype, self.number, self.apart = lanes, dtype, number, apart

    @cached_property
    def buffer(self) -> ir.Buffer:
        """The slots, side by side."""
        around = self.unit.around.name if self.unit.around is not None else ""
        rows = [self.devices, *self.shape[:-1], self.shape[-1] + self.apart] if self.shape else [self.devices]
        key = ("slots", around, self.unit.siblings, tuple(rows), self.dtype, self.number)
        return self.lanes.make(key, f"slots{around}", rows, self.dtype, "shared.dyn")

    @property
    def size(self) -> int:
        """Bytes of all slots."""
        return math.prod(self.shape) * self.devices * ir.bits(self.dtype) // 8

    def place(self, slot: Any, access: str, begin: Sequence[Any] = (), extents: Sequence[Any] = ()) -> ir.Call:
        """A slot, or a part of it, as the argument of a tile operation."""
        return tir.region(self.buffer, [slot, *(begin or [0] * len(self.shape))], [1, *(extents or self.shape)], access)

    def put(self, region: ir.Call, slot: Any = None) -> ir.Stmt:
        """Lay a tile down in a slot, this unit's if none is named."""
        return _copied(region, self.place(self.unit.number if slot is None else slot, "w"))

    def received(self, sender: Any, index: Sequence[Any]) -> ir.PrimExpr:
        """An element of a slot."""
        return ir.BufferLoad(self.buffer, [sender, *index])

    def all(self, index: Sequence[Any]) -> list[ir.PrimExpr]:
        """An element of every slot."""
        return [self.received(sender, index) for sender in range(self.devices)]


def _copied(source: ir.Call, target: ir.Call) -> ir.Stmt:
    call = tir.tile_call("copy", _as(source, "r"), _as(target, "w"))
    single = all(ir.constant(n) == 1 for n in ir.region_parts(source)[2])
    return tir.copy_nest(call.value) if single else call


def _as(region: ir.Call, access: str) -> ir.Call:
    buffer, begins, extents = ir.region_parts(region)
    return tir.region(buffer, begins, extents, access)


# -- for statements of the program (sharing.py) ------------------------------------------------------------------------


def exchange(
    lanes: LaneLowering, unit: Unit, region: ir.Call, loops: list[ir.Var], finish: Callable[[list[Any]], ir.Stmt]
) -> ir.Stmt:
    """Every unit lays a tile down; then `finish` gets its element at `loops` from all of them."""
    buffer, _, extents = ir.region_parts(region)
    slots = Slots(lanes, unit, [ir.integer(n) for n in extents], str(buffer.dtype))
    return tir.sequence([slots.put(region), lanes.meet(unit), finish(slots.all(loops)), lanes.meet(unit)])


def gather(lanes: LaneLowering, unit: Unit, part: ir.Call, axis: int, target: ir.Call) -> ir.Stmt:
    """Every unit lays its part along an axis down; then it has the whole."""
    buffer, _, extents = ir.region_parts(part)
    extents = [ir.integer(n) for n in extents]
    whole = [n * unit.siblings if a == axis else n for a, n in enumerate(extents)]
    slots = Slots(lanes, unit, whole, str(buffer.dtype), one=True)
    begin = [unit.number * n if a == axis else 0 for a, n in enumerate(extents)]
    steps = [_copied(part, slots.place(0, "w", begin, extents)), lanes.meet(unit), _copied(slots.place(0, "r"), target)]
    return tir.sequence([*steps, lanes.meet(unit)])


def whole_of(lanes: LaneLowering, buffer: ir.Buffer, unit: Unit, *, gathered: bool = False) -> ir.Buffer:
    """All of a fragment that units hold as shares, on a unit: there after a T.all_gather of the shares.

    Raises:
        UnsupportedError: nothing has gathered it.
    """
    held = lanes.holdings.of(buffer)
    assert held is not None
    key = ("whole", buffer.data, unit.inside(held.level.name).name)
    if not gathered and not lanes.has(key):
        raise lanes.lowering.unsupported(
            f"a {held.level.name} names all of {buffer.name!r}, which is held {held}, before T.all_gather of the shares"
        )
    shape = [ir.integer(n) for n in buffer.shape]
    return lanes.make(key, f"{buffer.name}_whole{unit.name}", shape, str(buffer.dtype), buffer.scope())


# -- rules: one unit's part of an operation ----------------------------------------------------------------------------


def _barrier(clone: Clone, call: ir.Call) -> ir.Stmt:
    return clone.lanes.meet(clone.unit)


def _steps(clone: Clone, *steps: ir.Stmt | None) -> ir.Stmt:
    """Statements in the user's names, as this unit runs them; None for a meeting."""
    meet = clone.lanes.meet(clone.unit)
    return tir.sequence([meet if step is None else clone.stmt(step) for step in steps])


def _slots(clone: Clone, tile: Operand, **how: Any) -> Slots:
    return Slots(clone.lanes, clone.unit, tile.extents, tile.dtype, **how)


def _allreduce(clone: Clone, call: ir.Call) -> ir.Stmt:
    _note(clone, call)
    made = Collective.of(call)
    if made.combine is not None:
        tiles = [Operand(clone, region) for region in made.tiles]
        sides = [_slots(clone, tile, number=number) for number, tile in enumerate(tiles)]
        puts = [s.put(tile.region) for s, tile in zip(sides, tiles, strict=True)]
        folds = [fold(clone.lowering, made.combine, which, tiles, sides) for which in range(len(tiles))]
        return _steps(clone, *puts, None, *folds, None)
    tile, op = Operand(clone, made.target), made.reduction
    base = clone.lanes.tile(clone.lanes.holdings.base(tile.buffer))
    if base is not None and clone.lanes.results.has_halves(base) and tile.extents == list(map(ir.constant, base.shape)):
        return _in_halves(clone, tile, op, base.data in clone.lanes.results.stored)
    slots = _slots(clone, tile)
    if slots.size > TURNS_ABOVE:
        return _in_turns(clone, tile, op)
    total = tile.store(lambda loops: reduced(slots.all(loops), op, tile.dtype, tile.dtype))
    return _steps(clone, slots.put(tile.region), None, total, None)


def _in_halves(clone: Clone, tile: Operand, op: str, enough: bool) -> ir.Stmt:
    """Each of two units lays down the other's half of the columns and adds to its own; then the sums go to the other.

    Args:
        enough: to have the sum of the own half.
    """
    unit = clone.unit
    mine, half = unit.number, tile.extents[-1] // 2
    # Threads of a warp hold 8 rows: apart by 8 words they lie in different banks.
    slots = Slots(clone.lanes, unit, [*tile.extents[:-1], half], tile.dtype, apart=COLUMNS)

    def part(number: int, access: str) -> ir.Call:
        return tir.region(tile.buffer, [*tile.begins[:-1], tile.begins[-1] + number * half], slots.shape, access)

    loops = tir.loop_variables(slots.shape)
    at = tile.at([*loops[:-1], loops[-1] + mine * half])
    both = [ir.BufferLoad(tile.buffer, at), slots.received(mine, loops)]
    total = reduced(both if mine == 0 else both[::-1], op, tile.dtype, tile.dtype)
    add = tir.parallel(loops, slots.shape, ir.BufferStore(tile.buffer, total, at))
    steps = [_copied(part(1 - mine, "r"), slots.place(1 - mine, "w")), None, add]
    if not enough:
        sums = _copied(part(mine, "r"), slots.place(mine, "w"))
        steps += [sums, None, _copied(slots.place(1 - mine, "r"), part(1 - mine, "w"))]
    return _steps(clone, *steps, None)


def _in_turns(clone: Clone, tile: Operand, op: str) -> ir.Stmt:
    """One after another lays its tile down and the first unit adds it, whose result then goes round."""
    slots, rank = _slots(clone, tile, one=True), clone.unit.number

    def added(loops: list[ir.Var]) -> Any:
        own = ir.BufferLoad(tile.buffer, tile.at(loops))
        return reduced([own, slots.received(0, loops)], op, tile.dtype, tile.dtype)

    put = slots.put(tile.region, 0)
    steps: list[ir.Stmt | None] = []
    for sender in range(1, clone.unit.siblings):
        steps += [*([put] if rank == sender else []), None, *([tile.store(added)] if rank == 0 else [])]
        steps += [None] if sender + 1 < clone.unit.siblings else []
    last = [put, None] if rank == 0 else [None, _copied(slots.place(0, "r"), tile.region)]
    return _steps(clone, *steps, *last, None)


def _all_gather(clone: Clone, call: ir.Call) -> ir.Stmt:
    made = Collective.of(call)
    part = Operand(clone, made.source)
    if not made.is_in_place:
        _note(clone, call)
        target, axis = Operand(clone, made.target), made.axis
        whole = _slots(clone, target, one=True)
        begin = [clone.unit.number * n if a == axis else 0 for a, n in enumerate(part.extents)]
        put = _copied(part.region, whole.place(0, "w", begin, part.extents))
        return _steps(clone, put, None, _copied(whole.place(0, "r"), target.region), None)
    if part.in_memory:
        return clone.lanes.meet(clone.unit)
    return _gather_view(clone, part)


def _gather_view(clone: Clone, part: Operand) -> ir.Stmt:
    """The shares of a fragment: afterwards every unit has all of it, beside its share."""
    view = clone.views.get(part.buffer.data)
    base = ir.region_parts(view.args[0])[0] if view is not None else part.buffer
    held = clone.lanes.holdings.of(base)
    if held is None or held.axis is None or held.cyclic or part.extents != [ir.constant(n) for n in part.buffer.shape]:
        raise clone.lowering.unsupported(f"T.all_gather of {part.name!r}, which is no contiguous share of a tile")
    shape = [ir.constant(n) for n in base.shape]
    whole = whole_of(clone.lanes, base, clone.unit, gathered=True)
    target = tir.region(whole, [0] * len(shape), shape, "w")
    own = tir.region(clone.lanes.copy_of(base, clone.unit), [0] * len(shape), part.extents, "r")
    return clone.stmt(gather(clone.lanes, clone.unit, own, held.axis, target))


def _reduce_scatter(clone: Clone, call: ir.Call) -> ir.Stmt:
    _note(clone, call)
    made = Collective.of(call)
    source, target = Operand(clone, made.source), Operand(clone, made.target)
    slots, axis = _slots(clone, source), made.axis
    begin = clone.unit.number * target.extents[axis]

    def total(loops: list[ir.Var]) -> Any:
        index = [i + begin if a == axis else i for a, i in enumerate(loops)]
        return reduced(slots.all(index), made.reduction, source.dtype, target.dtype)

    return _steps(clone, slots.put(source.region), None, target.store(total), None)


def _all_to_all(clone: Clone, call: ir.Call) -> ir.Stmt:
    _note(clone, call)
    made = Collective.of(call)
    source, target = Operand(clone, made.source), Operand(clone, made.target)
    slots, axis = _slots(clone, source), made.axis
    part = source.extents[axis] // clone.unit.siblings

    def sent(loops: list[ir.Var]) -> Any:
        index = [i % part + clone.unit.number * part if a == axis else i for a, i in enumerate(loops)]
        return slots.received(loops[axis] // part, index)

    return _steps(clone, slots.put(source.region), None, target.store(sent), None)


def _broadcast(clone: Clone, call: ir.Call) -> ir.Stmt:
    _note(clone, call)
    made = Collective.of(call)
    tile = Operand(clone, made.target)
    slots, root = _slots(clone, tile, one=True), clone.expr(made.root)
    is_root = ir.EQ(ir.int_node(root), ir.int_node(clone.unit.number))
    put = ir.IfThenElse(is_root, slots.put(tile.region, 0), None)
    return _steps(clone, put, None, _copied(slots.place(0, "r"), tile.region), None)


def _copy(clone: Clone, call: ir.Call) -> ir.Stmt:
    """A far tile in memory is reached where it is; one in registers by a meeting of all units."""
    copy = Copy.of(call)
    moved = _direct(clone, copy) if Operand(clone, copy.far).in_memory else _through_slots(clone, copy)
    if copy.signal is None:
        return moved
    told = tir.call(ops.SIGNAL.name, copy.signal, copy.value, annotations={"op": copy.op})
    return tir.sequence([moved, clone.stmt(tir.evaluate(told))])


def _direct(clone: Clone, copy: Copy) -> ir.Stmt:
    peer = clone.expr(copy.peer)
    number = ir.constant(peer)
    if number is not None:
        return _to(clone, copy, number)
    result: ir.Stmt | None = None
    for candidate in range(clone.unit.siblings):
        is_peer = ir.EQ(clone.lowering.expr(peer), ir.int_node(candidate))
        result = ir.IfThenElse(is_peer, _to(clone, copy, candidate), result)
    return result


def _to(clone: Clone, copy: Copy, number: int) -> ir.Stmt:
    buffer, begins, extents = ir.region_parts(copy.far)
    if clone.strided(copy.far):
        raise clone.lowering.unsupported(f"a copy to or from a cyclic view of a sibling, {buffer.name!r}")
    at = [clone.expr(b) for b in begins]
    placed, at = clone.place(buffer, at, clone.unit.sibling(number))
    there = tir.region(placed, at, extents, "w" if copy.to_peer else "r")
    pair = (copy.source, there) if copy.to_peer else (there, copy.target)
    return clone.stmt(_copied(*pair))


def _through_slots(clone: Clone, copy: Copy) -> ir.Stmt:
    if clone.apart:
        raise clone.lowering.unsupported(
            "T.copy to or from the registers of a sibling that only some units reach; copy through a shared tile"
        )
    source, target = Operand(clone, copy.source), Operand(clone, copy.target)
    slots = _slots(clone, source)
    if not copy.to_peer:
        peer = clone.expr(copy.peer)
        return _steps(clone, slots.put(source.region), None, _copied(slots.place(peer, "r"), target.region), None)
    peers = [clone.rank_of(copy.peer, clone.unit.sibling(n)) for n in range(clone.unit.siblings)]
    if None in peers:
        raise clone.lowering.unsupported("T.copy(dst=) to the registers of a sibling whose rank is no constant")
    takes = [_copied(slots.place(n, "r"), target.region) for n, peer in enumerate(peers) if peer == clone.unit.number]
    return _steps(clone, slots.put(source.region), None, *takes[-1:], None)


def _note(clone: Clone, call: ir.Call) -> None:
    if clone.unit.number == 0:
        name = call.op.name.removeprefix("tilescale.")
        clone.lowering.notes.append(f"T.{name} of level {clone.unit.level!r}: through shared memory")


RULES: dict[str, Callable[[Clone, ir.Call], ir.Stmt]] = {
    ops.BARRIER.name: _barrier,
    ops.ALLREDUCE.name: _allreduce,
    ops.ALL_GATHER.name: _all_gather,
    ops.REDUCE_SCATTER.name: _reduce_scatter,
    ops.ALL_TO_ALL.name: _all_to_all,
    ops.BROADCAST.name: _broadcast,
    ops.COPY.name: _copy,
}
"""Operation -> one unit's part of it."""
