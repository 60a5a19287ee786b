# SPDX-License-Identifier: MIT
"""Typed views name a call's arguments, for every form of this project's calls."""

from typing import Any

import pytest

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.program import ops
from tilescale.program.layout import Layout
from tilescale.program.operations import (
    AtomicAdd,
    Barrier,
    Collective,
    Copy,
    InvokeOne,
    Rank,
    Signal,
    TileView,
    Wait,
    operation,
)

X = tir.local_buffer("X", [8, 4], "float32", "global")
FLAGS = tir.local_buffer("flags", [4], "int32", "global")


def tile(access: str) -> ir.Call:
    return tir.region(X, [0, 0], [8, 4], access)


def flag(index: int) -> ir.Call:
    return tir.region(FLAGS, [index], [1], "rw")


def number(value: int) -> ir.IntImm:
    return ir.IntImm("int32", value)


def call(op: object, /, *args: object, **notes: object) -> ir.Call:
    annotations = {k: ir.StringImm(v) if isinstance(v, str) else number(v) for k, v in notes.items()}
    return tir.call(op.name, *args, annotations=annotations or None)


def test_a_copy_without_a_signal():
    view = Copy.of(call(ops.COPY, tile("r"), tile("w"), number(1), level="device", far="src", impl="lsu"))
    assert not view.to_peer and view.near.same_as(view.target) and view.far.same_as(view.source)
    assert (view.level, view.impl, ir.constant(view.peer)) == ("device", "lsu", 1)
    assert (view.signal, view.value, view.op, view.after) == (None, None, None, None)


def test_a_copy_that_tells_the_peer():
    told = flag(2), number(7)
    view = Copy.of(call(ops.COPY, tile("r"), tile("w"), number(1), *told, level="device", far="dst", op="set"))
    assert view.to_peer and view.near.same_as(view.source) and view.far.same_as(view.target)
    assert (ir.constant(view.value), view.op, view.after) == (7, "set", None)
    assert view.signal.same_as(told[0])


def test_a_copy_that_waits_before_it_starts():
    told, after = (flag(2), number(7)), (flag(3), number(9))
    notes = {"level": "device", "far": "dst", "op": "add", "after": ">="}
    view = Copy.of(call(ops.COPY, tile("r"), tile("w"), number(1), *told, *after, **notes))
    assert view.signal.same_as(told[0]) and view.after.flag.same_as(after[0])
    assert (view.after.compare, ir.constant(view.after.value)) == (">=", 9)
    untold = Copy.of(call(ops.COPY, tile("r"), tile("w"), number(1), *after, level="device", far="dst", after="=="))
    assert untold.signal is None and untold.after.flag.same_as(after[0])


def test_signals_and_waits():
    own = Signal.of(call(ops.SIGNAL, flag(0), number(1), op="add"))
    assert (own.peer, own.level, own.op) == (None, None, "add")
    far = Signal.of(call(ops.SIGNAL, flag(0), number(1), number(3), op="set", level="device"))
    assert (ir.constant(far.peer), far.level, far.op) == (3, "device", "set")
    wait = Wait.of(call(ops.WAIT, flag(1), number(5), compare="<"))
    assert (wait.compare, ir.constant(wait.value)) == ("<", 5) and ir.region_parts(wait.flag)[0].same_as(FLAGS)


@pytest.mark.parametrize(
    ("op", "tiles", "in_place", "whole"),
    [
        (ops.ALL_GATHER, 2, False, [1]),
        (ops.ALL_GATHER, 1, True, [0]),
        (ops.REDUCE_SCATTER, 2, False, [0]),
        (ops.ALL_TO_ALL, 2, False, [0]),
        (ops.ALLREDUCE, 1, True, [0]),
    ],
)
def test_tiles_of_collectives(op: object, tiles: int, in_place: bool, whole: list[int]):
    regions = [tile("r"), tile("w")][:tiles]
    view = Collective.of(call(op, *regions, level="device", dim=1, impl="direct"))
    assert [a.same_as(b) for a, b in zip(view.tiles, regions, strict=True)] == [True] * tiles
    assert (view.is_in_place, view.dim, view.impl, view.root, view.flags) == (in_place, 1, "direct", None, None)
    assert view.source.same_as(regions[0]) and view.target.same_as(regions[-1])
    assert [t.same_as(regions[i]) for t, i in zip(view.whole, whole, strict=True)] == [True]


def test_an_all_gather_with_flags():
    flags = tir.region(FLAGS, [0], [4], "rw")
    view = Collective.of(call(ops.ALL_GATHER, tile("r"), tile("w"), flags, level="device", dim=0, chunk=2))
    assert len(view.tiles) == 2 and view.flags.same_as(flags) and view.chunk == 2


def test_an_all_to_all_of_unequal_parts():
    sent, received = (tir.region(FLAGS, [0], [4], access) for access in "rw")
    view = Collective.of(call(ops.ALL_TO_ALL_V, tile("r"), tile("w"), sent, received, level="device"))
    assert len(view.tiles) == 2 and not view.is_in_place and view.flags is None and view.counts == ()
    assert view.sent.same_as(sent) and view.received.same_as(received)
    known = tir.call(ops.COUNTS.name, *map(number, (1, 2, 0, 4)))
    view = Collective.of(call(ops.ALL_TO_ALL_V, tile("r"), tile("w"), known, level="device"))
    assert (view.sent, view.received, view.counts) == (None, None, (1, 2, 0, 4))


def test_a_sum_with_a_norm():
    weight, normed, residual, quantized, scales = (tile(access) for access in "rwrww")
    numbers = {key: ir.FloatImm("float32", value) for key, value in (("eps", 1e-5), ("offset", 1))}

    def call_of(scaling: str | None = None, **tiles: Any) -> Any:
        notes = {"level": ir.StringImm("device"), "norm": ir.StringImm(" ".join(tiles)), **numbers}
        notes |= {} if scaling is None else {"scaling": ir.StringImm(scaling)}
        return tir.call(ops.ALLREDUCE.name, tile("r"), tile("w"), *tiles.values(), annotations=notes)

    view = Collective.of(call_of(weight=weight, normed=normed, residual=residual))
    assert len(view.tiles) == 2 and not view.is_in_place and view.norm.columns == 4
    assert view.norm.eps == pytest.approx(1e-5) and view.norm.normed.same_as(normed) and view.norm.offset == 1
    assert view.norm.written == (view.norm.normed,) and view.norm.scaling is None and not view.norm.power
    assert [a.same_as(b) for a, b in zip(view.norm.read, (weight, residual), strict=True)] == [True, True]
    alone = Collective.of(call_of(weight=weight, normed=normed))
    assert alone.norm.residual is None and len(alone.norm.read) == 1
    tiles = {"weight": weight, "quantized": quantized, "scales": scales}
    given, found = (Collective.of(call_of(scaling, **tiles)).norm for scaling in ("tensor", "row"))
    assert given.normed is None and given.scales.same_as(scales)
    assert (len(given.read), len(given.written)) == (2, 1), "scales of tensors are read"
    assert (len(found.read), len(found.written)) == (1, 2), "others are written"


def test_what_only_some_collectives_have():
    assert ir.constant(Collective.of(call(ops.BROADCAST, tile("rw"), number(2), level="device")).root) == 2
    assert Collective.of(call(ops.ALLREDUCE, tile("rw"), level="device", op="max")).op == "max"
    left, right = ([ir.Var(f"{side}{i}", "float32") for i in range(2)] for side in "ab")
    combine = tir.call(ops.COMBINE.name, *left, *right, left[0] + right[0], left[1])
    view = Collective.of(call(ops.ALLREDUCE, tile("rw"), tile("rw"), combine, level="device"))
    assert len(view.tiles) == 2 and view.is_in_place
    assert view.combine.left == tuple(left) and view.combine.right == tuple(right)
    assert view.combine.results[1].same_as(left[1])


def test_every_operation_has_a_view():
    views = {
        ops.COPY: (Copy, [tile("r"), tile("w"), number(0)]),
        ops.SIGNAL: (Signal, [flag(0), number(1)]),
        ops.WAIT: (Wait, [flag(0), number(1)]),
        ops.BARRIER: (Barrier, []),
        ops.RANK: (Rank, [ir.StringImm("device")]),
        ops.VIEW: (TileView, [tile("rw"), number(4), number(4)]),
        ops.BROADCAST: (Collective, [tile("rw"), number(0)]),
        ops.ALL_TO_ALL_V: (Collective, [tile("r"), tile("w"), tir.region(FLAGS, [0], [4], "r")]),
        ops.ATOMIC_ADD: (AtomicAdd, [tile("w"), number(1), number(0)]),
        ops.INVOKE_ONE: (InvokeOne, [number(1)]),
        ops.ALLREDUCE: (Collective, [tile("rw")]),
    } | {op: (Collective, [tile("r"), tile("w")]) for op in (ops.REDUCE_SCATTER, ops.ALL_GATHER, ops.ALL_TO_ALL)}
    assert {op.name for op in views} == ops.ALL_OPS
    for op, (cls, args) in views.items():
        assert type(operation(call(op, *args, level="device"))) is cls
    assert operation(tile("r")) is None and operation(number(1)) is None


def test_a_view_is_a_layout_of_its_buffer():
    view = TileView.of(call(ops.VIEW, tile("rw"), number(4), number(4), level="device", dim=0))
    assert view.base.same_as(X) and view.layout == Layout(0) and [ir.constant(n) for n in view.shape] == [4, 4]
