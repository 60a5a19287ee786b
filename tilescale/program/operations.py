# SPDX-License-Identifier: MIT
"""Typed views of our operations: the one place that knows the position, or the key, of each argument.

`Copy.of(call).signal` reads one argument of a call that is known to be a copy; `operation(node)` finds the operation of
a node. Tiles and flags are regions as the call has them (`ir.region_parts`), or a plain load of one element; they are
None where the call leaves them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from tilelang_core import ir
from tilelang_core.tiles import is_region
from tilescale.program import ops
from tilescale.program.layout import Layout
from tilescale.program.norm import Norm


@dataclass(frozen=True)
class Signal:
    """`T.signal`.

    Attributes:
        flag: the element that is updated.
        value: the operand, which `op` adds ("add") or stores ("set").
        peer: whose flag, a rank of `level`; None for the unit's own, which has no level either.
    """

    call: ir.Call
    flag: ir.Call
    value: ir.PrimExpr
    op: str
    peer: ir.PrimExpr | None = None
    level: str | None = None

    @classmethod
    def of(cls, call: ir.Call) -> Signal:
        flag, value, *peer = call.args
        return cls(call, flag, value, _text(call, "op"), peer[0] if peer else None, ir.attribute(call, "level"))


@dataclass(frozen=True)
class Wait:
    """`T.wait`, `T.wait_any`, or the condition under which an asynchronous copy starts: `flag compare value`.

    Attributes:
        flag: an element of the waiting unit, or several, and `compare` one of `ops.COMPARISONS`.
        index: a variable that gets the number of the first flag found to compare true; None where all must.
    """

    call: ir.Call
    flag: ir.Call
    compare: str
    value: ir.PrimExpr
    index: ir.Call | None = None

    @classmethod
    def of(cls, call: ir.Call) -> Wait:
        flag, value, *index = call.args
        return cls(call, flag, _text(call, "compare"), value, index[0] if index else None)

    @property
    def is_of_one_flag(self) -> bool:
        """Whether the wait is for one flag, known when it is written."""
        return self.index is None and all(ir.constant(n) == 1 for n in ir.region_parts(self.flag)[2])


@dataclass(frozen=True)
class AtomicAdd:
    """`T.atomic_add(dst=)`.

    Attributes:
        target: an element, or a tile, of `peer`, a rank of `level`.
        value: the addend: a number for an element, the region of a tile for a tile.
        order: one of `ops.ORDERS`.
        previous: a variable that gets the element's previous value.
        impl: the mechanism that was asked for.
    """

    call: ir.Call
    target: ir.Call
    value: ir.PrimExpr
    peer: ir.PrimExpr
    level: str
    order: str
    previous: ir.Call | None = None
    impl: str | None = None

    @classmethod
    def of(cls, call: ir.Call) -> AtomicAdd:
        target, value, peer, *previous = call.args
        return cls(
            call,
            target,
            value,
            peer,
            level=_text(call, "level"),
            order=_text(call, "order"),
            previous=previous[0] if previous else None,
            impl=ir.attribute(call, "impl"),
        )

    @property
    def is_of_tiles(self) -> bool:
        """Whether a tile is added, not a number."""
        return is_region(self.value)


@dataclass(frozen=True)
class InvokeOne:
    """`T.invoke_one`.

    Attributes:
        value: the expression that one thread evaluates.
        result: a variable of all threads that gets the value; None where it has none.
    """

    call: ir.Call
    value: ir.PrimExpr
    result: ir.Call | None = None

    @classmethod
    def of(cls, call: ir.Call) -> InvokeOne:
        value, *result = call.args
        return cls(call, value, result[0] if result else None)


@dataclass(frozen=True)
class Copy:
    """`T.copy` from or to another unit.

    Attributes:
        peer: rank of the far side among the units of `level`.
        to_peer: whether the target is the peer's (a put); else the source is (a get).
        signal: a flag of the peer that is updated when the tile has arrived there, with `value` and `op` as a signal's.
        after: the condition that a copy of the device's queue waits for, on the sending device, before it starts.
        impl: the mechanism that was asked for.
    """

    call: ir.Call
    source: ir.Call
    target: ir.Call
    peer: ir.PrimExpr
    level: str
    to_peer: bool
    impl: str | None = None
    signal: ir.Call | None = None
    value: ir.PrimExpr | None = None
    op: str | None = None
    after: Wait | None = None

    @property
    def update(self) -> str:
        """The operation of the signal on its flag, of a copy that has one."""
        assert self.op is not None
        return self.op

    @classmethod
    def of(cls, call: ir.Call) -> Copy:
        source, target, peer, *rest = call.args
        compare = ir.attribute(call, "after")
        update, after = (rest[:-2], Wait(call, rest[-2], compare, rest[-1])) if compare is not None else (rest, None)
        flag, value = update or (None, None)
        return cls(
            call,
            source,
            target,
            peer,
            level=_text(call, "level"),
            to_peer=ir.attribute(call, "far") == "dst",
            impl=ir.attribute(call, "impl"),
            signal=flag,
            value=value,
            op=ir.attribute(call, "op"),
            after=after,
        )

    def between(self, source: ir.Call, target: ir.Call, **notes: Any) -> ir.Call:
        """The same copy between other regions, with more annotations."""
        _, _, *rest = self.call.args
        annotations = {**dict(self.call.annotations), **notes}
        return ir.Call(self.call.dtype, self.call.op, [source, target, *rest], annotations)

    @property
    def near(self) -> ir.Call:
        """The tile of the unit that copies."""
        return self.source if self.to_peer else self.target

    @property
    def far(self) -> ir.Call:
        """The tile of the peer."""
        return self.target if self.to_peer else self.source


@dataclass(frozen=True)
class Barrier:
    """`T.barrier` of a level."""

    call: ir.Call
    level: str

    @classmethod
    def of(cls, call: ir.Call) -> Barrier:
        return cls(call, _text(call, "level"))


@dataclass(frozen=True)
class Collective:
    """A collective that moves data.

    Attributes:
        name: as the language has it, "all_gather".
        tiles: its tile arguments, in order.
        impl: the implementation that was asked for.
        op: a combining operation, one of `ops.REDUCTIONS`; None where the tiles are not combined, or by `combine`.
        dim: the dimension that is split or joined.
        root: whose tile a broadcast sends, a rank of `level`.
        combine: the user's combination (`Combine`).
        flags: the tensor of flags, (size, chunks), that an asynchronous all-gather or all-to-all raises: [r, c] when
            the rows [c * chunk, (c + 1) * chunk) of rank r's part are there. No `chunk`: each part is one.
        slots: of an asynchronous all-to-all, whether its tensors have a dimension for the ranks, in front of the rows.
        sent: of an all-to-all of unequal parts, the tensor (size,) that says how many rows go to each rank.
        counts: the same as numbers, of all ranks: those of rank r to rank s at r * size + s.
        received: the tensor (size,) that gets how many rows have come from each rank.
        norm: the norm that an all-reduce applies to the rows of its result.
        wire: the type in which floats are sent (wire.py); None for theirs.
    """

    call: ir.Call
    name: str
    level: str
    tiles: tuple[ir.Call, ...]
    impl: str | None = None
    op: str | None = None
    dim: int | None = None
    root: ir.PrimExpr | None = None
    combine: Combine | None = None
    flags: ir.Call | None = None
    chunk: int | None = None
    slots: bool | None = None
    sent: ir.Call | None = None
    counts: tuple[int, ...] = ()
    received: ir.Call | None = None
    norm: Norm | None = None
    wire: str | None = None

    @classmethod
    def of(cls, call: ir.Call) -> Collective:
        """A call of one of our collectives but the barrier."""
        tiles, root, combine, flags = list(call.args), None, None, None
        sent, received, counts, norm = None, None, tuple[int, ...](), Norm.of(call, tiles)
        if norm is not None:
            tiles = tiles[:2]
        if call.op.name == ops.BROADCAST.name:
            root = tiles.pop()
        elif call.op.name == ops.ALL_TO_ALL_V.name:
            *tiles, row_counts, received = tiles if len(tiles) == 4 else (*tiles, None)
            is_known = ir.op_name(row_counts) == ops.COUNTS.name
            sent, counts = (None, tuple(int(n) for n in row_counts.args)) if is_known else (row_counts, ())
        elif ir.op_name(tiles[-1]) == ops.COMBINE.name:
            combine = Combine.of(tiles.pop())
        elif call.op.name in (ops.ALL_GATHER.name, ops.ALL_TO_ALL.name) and len(tiles) > 2:
            flags = tiles.pop()
        return cls(
            call,
            name=call.op.name.removeprefix("tilescale."),
            level=_text(call, "level"),
            tiles=tuple(tiles),
            impl=ir.attribute(call, "impl"),
            op=ir.attribute(call, "op"),
            dim=ir.attribute(call, "dim"),
            root=root,
            combine=combine,
            flags=flags,
            chunk=ir.attribute(call, "chunk"),
            slots=ir.attribute(call, "slots"),
            sent=sent,
            counts=counts,
            received=received,
            norm=norm,
            wire=ir.attribute(call, "wire"),
        )

    @property
    def is_in_place(self) -> bool:
        """Whether its tiles are both input and result; else they are a source and a target."""
        return self.name == "broadcast" or self.combine is not None or len(self.tiles) == 1

    @property
    def axis(self) -> int:
        """The dimension that is split or joined, of one that has it."""
        assert self.dim is not None
        return self.dim

    @property
    def reduction(self) -> str:
        """The combining operation, of one that has it."""
        assert self.op is not None
        return self.op

    @property
    def dtype(self) -> str:
        """The type of the elements that each unit contributes: that of its first tile."""
        return str(ir.region_parts(self.source)[0].dtype)

    @property
    def source(self) -> ir.Call:
        """The tensor that each unit contributes."""
        return self.tiles[0]

    @property
    def target(self) -> ir.Call:
        """The tensor that each unit receives; the source, where it works in place."""
        return self.tiles[0] if self.is_in_place else self.tiles[1]

    @property
    def whole(self) -> tuple[ir.Call, ...]:
        """The whole tiles: the result of an all-gather, the inputs of other collectives."""
        if self.is_in_place:
            return self.tiles
        return (self.target if self.name == "all_gather" else self.source,)


@dataclass(frozen=True)
class Combine:
    """A traced combining function of n values: the variables of both sides, and the n results."""

    left: tuple[ir.Var, ...]
    right: tuple[ir.Var, ...]
    results: tuple[ir.PrimExpr, ...]

    @classmethod
    def of(cls, call: ir.Call) -> Combine:
        count, parts = len(call.args) // 3, tuple(call.args)
        return cls(parts[:count], parts[count : 2 * count], parts[2 * count :])


@dataclass(frozen=True)
class TileView:
    """`T.view(layout=)`: the part of a tile that one unit of `level` holds, and its shape."""

    call: ir.Call
    region: ir.Call
    level: str
    layout: Layout
    shape: tuple[ir.PrimExpr, ...]

    @classmethod
    def of(cls, call: ir.Call) -> TileView:
        layout = Layout(ir.attribute(call, "dim"), ir.attribute(call, "block"))
        return cls(call, call.args[0], _text(call, "level"), layout, tuple(call.args[1:]))

    @property
    def base(self) -> ir.Buffer:
        """The buffer of which it is a part; it may be a view itself."""
        return ir.region_parts(self.region)[0]

    @property
    def axis(self) -> int:
        """The dimension that is split; the layout is not a replica."""
        assert self.layout.dim is not None
        return self.layout.dim


@dataclass(frozen=True)
class Rank:
    """`T.rank` of a level above the threads'."""

    call: ir.Call
    level: str

    @classmethod
    def of(cls, call: ir.Call) -> Rank:
        return cls(call, str(call.args[0].value))


Operation: TypeAlias = Signal | Wait | AtomicAdd | InvokeOne | Copy | Barrier | Collective | TileView | Rank

_VIEWS: dict[str, Any] = {
    ops.SIGNAL.name: Signal,
    ops.WAIT.name: Wait,
    ops.ATOMIC_ADD.name: AtomicAdd,
    ops.INVOKE_ONE.name: InvokeOne,
    ops.COPY.name: Copy,
    ops.BARRIER.name: Barrier,
    ops.VIEW.name: TileView,
    ops.RANK.name: Rank,
    **{name: Collective for name in ops.COLLECTIVES - {ops.BARRIER.name}},
}


def operation(node: ir.Node) -> Operation | None:
    """The typed view of a node; None if it is not a call of one of our operations."""
    view = _VIEWS.get(ir.op_name(node) or "")
    return None if view is None else view.of(node)


def signalled(found: Operation | None) -> tuple[ir.Call, ...]:
    """The flags that an operation updates."""
    if isinstance(found, Signal):
        return (found.flag,)
    flag = found.signal if isinstance(found, Copy) else found.flags if isinstance(found, Collective) else None
    return () if flag is None else (flag,)


def waited(found: Operation | None) -> Wait | None:
    """The wait of an operation: a wait itself, or a copy's before it starts."""
    return found.after if isinstance(found, Copy) else found if isinstance(found, Wait) else None


def _text(call: ir.Call, key: str) -> str:
    return str(ir.attribute(call, key))
