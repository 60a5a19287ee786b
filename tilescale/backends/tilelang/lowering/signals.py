# SPDX-License-Identifier: MIT
"""Rules for signals, waits and barriers between devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.arguments import SlotShift
from tilescale.backends.tilelang.lowering.broadcast import broadcast_to_all
from tilescale.backends.tilelang.lowering.completion import C_TYPES, published, signal_kind
from tilescale.backends.tilelang.lowering.deferred_stores import KEPT
from tilescale.backends.tilelang.lowering.devices import DeviceStage
from tilescale.backends.tilelang.lowering.markers import BY_PRODUCER, BY_PRODUCER_FUNCTION, BY_THREAD
from tilescale.backends.tilelang.lowering.reach import split
from tilescale.backends.tilelang.lowering.registry import lowers
from tilescale.backends.tilelang.nvshmem_link import IMPL
from tilescale.program import ops
from tilescale.program.operations import Copy, Signal, Wait

_COMPARE = {"==": "EQ", "!=": "NE", ">=": "GE", ">": "GT", "<=": "LE", "<": "LT"}


def place_of(stage: DeviceStage, region: ir.Call) -> tuple[ir.Buffer, Any, Any]:
    """The tensor of a region's first element, its number within it, and how many there are."""
    buffer, begins, _ = ir.region_parts(region)
    index: Any = ir.IntImm("int64", 0)
    extent: Any = ir.IntImm("int64", 1)
    for begin, size in zip(begins, buffer.shape, strict=True):
        index = index * stage.expr(size) + stage.expr(begin)
        extent = extent * stage.expr(size)
    return buffer, index, extent


def flag_of(stage: DeviceStage, region: ir.Call) -> tuple[ir.Buffer, Any, Any, str]:
    """A flag's tensor, its number within it, how many there are, and their type."""
    buffer, index, extent = place_of(stage, region)
    dtype = str(buffer.dtype)
    if dtype not in C_TYPES:
        raise stage.unsupported(f"flags of type {dtype}: {buffer.name!r}; use one of {', '.join(C_TYPES)}")
    return buffer, index, extent, C_TYPES[dtype]


@dataclass(frozen=True)
class SignalUpdate:
    """An update of a peer's flag by NVSHMEM.

    Attributes:
        kind: template arguments of the device function: 1 to set or 0 to add, and the flag's type.
        flag: pointer to the first flag, the number of this one, how many there are.
        report: the record for an out-of-bounds number, and its site.
    """

    kind: str
    flag: tuple[Any, Any, Any]
    value: Any
    report: tuple[Any, Any]

    @classmethod
    def of(cls, stage: DeviceStage, what: str, flag: ir.Call, op: str | None, value: ir.PrimExpr) -> SignalUpdate:
        """The update of an operation; `what` describes it, with `{}` for the tensor of flags."""
        buffer, index, extent, c_type = flag_of(stage, flag)
        pointer = tir.address_of(stage.symmetric(buffer.data))
        site = stage.site(what.format(buffer.name), flag=buffer.name)
        kind = f"{1 if op == 'set' else 0}, {c_type}"
        return cls(kind, (pointer, index, extent), ir.Cast("int64", stage.expr(value)), (stage.record(), site))


def first_of(buffer: ir.Buffer, slot: Any) -> ir.PrimExpr:
    """The address of one device's instance of a tensor."""
    load = ir.BufferLoad(buffer, [slot, *[ir.IntImm("int32", 0)] * (len(buffer.shape) - 1)])
    return tir.call(tl.ADDRESS_OF, load)


def _signal_of(call: ir.Call) -> tuple[ir.Call, ir.PrimExpr]:
    """The flag that a copy or signal updates, and the value."""
    if call.op.same_as(ops.COPY):
        copy = Copy.of(call)
        return copy.signal, copy.value
    signal = Signal.of(call)
    return signal.flag, signal.value


def signal_peer(stage: DeviceStage, call: ir.Call, slot: Any) -> ir.Stmt:
    """Update the flag of the device at `slot` that a copy or signal names."""
    buffer = ir.region_parts(_signal_of(call)[0])[0]
    return _signal_at(stage, call, first_of(stage.far(buffer), slot))


def signal_here(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    """Update the flag of this device that a copy or signal names, after all writes of the program."""
    buffer = ir.region_parts(_signal_of(call)[0])[0]
    return _signal_at(stage, call, tir.address_of(stage.local(buffer.data)), _scope(stage, buffer))


def _scope(stage: DeviceStage, flags: ir.Buffer) -> str:
    """Template argument for the scope of flags: the system's is the default."""
    return ", tilescale::DEVICE" if flags.data in stage.device_flags else ""


def _signal_at(stage: DeviceStage, call: ir.Call, flags: ir.PrimExpr, scope: str = "") -> ir.Stmt:
    """Update a flag that a copy or signal names; `flags` is the first one of its instance."""
    region, value = _signal_of(call)
    buffer, index, extent, _ = flag_of(stage, region)
    site = stage.site(f"T.signal({buffer.name})", flag=buffer.name)
    if (number := ir.attribute(call, KEPT)) is not None:
        address = tir.extern("tilescale::address", flags, index, extent, stage.record(), site, dtype="int64")
        return ir.BufferStore(stage.roles.kept[number].variable, address, [ir.IntImm("int32", 0)])
    kind, wanted = signal_kind(buffer, ir.attribute(call, "op")), ir.Cast("int64", stage.expr(value))
    is_alone = ir.attribute(call, BY_THREAD) is not None
    name = "signal_by_thread" if is_alone else "signal"
    update = tir.extern(f"tilescale::{name}<{kind}{scope}>", flags, index, extent, wanted, stage.record(), site)
    if is_alone:
        return tir.evaluate(update)
    return published(stage, tir.evaluate(update))


@lowers(ops.SIGNAL.name)
def _signal(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    signal = Signal.of(call)
    if signal.level is None:
        return signal_here(stage, call)
    peer = stage.device_number(signal.level, stage.expr(signal.peer))
    return signal_peer(stage, call, stage.slot(peer))


@lowers(ops.SIGNAL.name, impl=IMPL)
def _signal_by_nvshmem(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    signal = Signal.of(call)
    assert signal.level is not None, "a local signal has no peer"
    update = SignalUpdate.of(stage, "T.signal({})", signal.flag, signal.op, signal.value)
    stage.call_nvshmem()
    stage.notes.append(f"T.signal of {ir.region_parts(signal.flag)[0].name} between {signal.level}s: {IMPL}")
    peer = stage.device_number(signal.level, stage.expr(signal.peer)) % stage.target.devices
    put = tir.extern(f"tilescale::signal_pe<{update.kind}>", *update.flag, update.value, peer, *update.report)
    return published(stage, tir.evaluate(put), drains=True)


@lowers(ops.WAIT.name)
def _wait(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    wait = Wait.of(call)
    buffer, begins, extents = ir.region_parts(wait.flag)
    compare = wait.compare
    site = stage.site(f"T.wait({buffer.name} {compare})", flag=buffer.name, compare=compare)
    if wait.index is not None:
        return _wait_any(stage, wait, site)
    along = [axis for axis, n in enumerate(extents) if ir.constant(n) != 1]
    loops = tir.loop_variables([extents[axis] for axis in along])
    places = list(begins)
    for axis, var in zip(along, loops, strict=True):
        places[axis] = begins[axis] + var
    by_producer, alone = (ir.attribute(call, mark) is not None for mark in (BY_PRODUCER, BY_THREAD))
    if by_producer:
        stage.include("producer.cuh")
    name = BY_PRODUCER_FUNCTION if by_producer else f"tilescale::wait{'_by_thread' if alone else ''}"
    scope = "" if by_producer else _scope(stage, buffer)
    poll = tir.evaluate(_poll(stage, name, wait, tir.beginning(wait.flag, places), site, scope=scope))
    for axis, var in reversed(list(zip(along, loops, strict=True))):
        poll = ir.For(var, ir.IntImm("int32", 0), stage.expr(extents[axis]), ir.ForKind.SERIAL, poll)
    return poll if by_producer or alone else stage.after_wait(stage.one_thread(poll))


def _poll(
    stage: DeviceStage,
    name: str,
    wait: Wait,
    region: ir.Call,
    site: int,
    *more: Any,
    dtype: str = "handle",
    scope: str = "",
) -> ir.PrimExpr:
    """A call of a device function that waits for the first flag of a region; `more` follows its number."""
    buffer, index, extent, c_type = flag_of(stage, region)
    return tir.extern(
        f"{name}<tilescale::{_COMPARE[wait.compare]}, {c_type}{scope}>",
        tir.address_of(stage.local(buffer.data)),
        index,
        *more,
        extent,
        ir.Cast("int64", stage.expr(wait.value)),
        stage.limit(),
        stage.record(),
        site,
        dtype=dtype,
    )


def _wait_any(stage: DeviceStage, wait: Wait, site: int) -> ir.Stmt:
    """One thread finds a flag that compares true; all get its number and see what it acquired."""
    buffer, _, extents = ir.region_parts(wait.flag)
    along = next((axis for axis, n in enumerate(extents) if ir.constant(n) != 1), len(extents) - 1)
    stride: Any = ir.IntImm("int64", 1)
    for size in buffer.shape[along + 1 :]:
        stride = stride * stage.expr(size)
    count = ir.Cast("int64", stage.expr(extents[along]))
    name = "tilescale::wait_any_by_thread" if ir.attribute(wait.call, BY_THREAD) is not None else "tilescale::wait_any"
    found = _poll(stage, name, wait, wait.flag, site, stride, count, dtype="int32")
    return broadcast_to_all(stage, wait.call, found, wait.index, acquires=True)


@lowers(ops.BARRIER.name)
def _barrier(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    level = stage.level_of(call).name
    return barrier(stage, f"T.barrier of level {level!r}", level)


def epochs(stage: DeviceStage, level: str, part: str = "") -> ir.Buffer:
    """Number of barriers of this device's programs with their counterparts on the siblings of a level, or a part of
    them, at each slot."""
    name = f"barrier_epochs{_suffix(stage, level)}{part}"
    return stage.workspace(name, (stage.window,), "int32", symmetric=False)


def _suffix(stage: DeviceStage, level: str) -> str:
    return "" if len(stage.target.sizes) == 1 else f"_{level}"


def barrier(stage: DeviceStage, what: str, level: str) -> ir.Stmt:
    """A barrier of the programs with this index on all siblings of a level; each then sees the others' earlier writes.

    Where they do not all share memory, those that do synchronize first, then those of one position in each such group.
    Raises UnsupportedError: groups of different sizes.
    """
    groups, size = split(stage.target, level), stage.target.mesh.count(level)
    if groups is None:
        raise stage.unsupported(f"{what}, of which nodes have different numbers, has no CUDA lowering")
    rank = stage.rank(level)
    if size == stage.target.devices == stage.target.group_size:
        return _barrier_of(stage, what, level, "", size, "tilescale::barrier", [stage.slot(rank), rank, size])
    siblings = siblings_of(stage, level)
    if groups.across == 1:
        return _barrier_of(stage, what, level, "", size, "tilescale::barrier_of_siblings", [siblings])
    stage.notes.append(f"{what}: by peer memory inside, by {IMPL} between")
    return _barrier_of(stage, what, level, "", size, GROUPS, [siblings, groups.inside])


GROUPS = "tilescale::barrier_of_groups"
"""The device function of a barrier that needs NVSHMEM."""

INSIDE, RAIL = "_inside", "_rail"
"""Suffixes: the siblings that share memory, and those of one position in each such group."""


def barrier_inside(stage: DeviceStage, what: str, level: str) -> ir.Stmt:
    """`barrier` of the siblings that share memory with this one."""
    groups, rank = split(stage.target, level), stage.rank(level)
    assert groups is not None, "who asks has split them"
    place = rank % groups.inside
    near = _siblings(stage, level, place, groups.inside, rank - place)
    return _barrier_of(stage, what, level, INSIDE, groups.inside, "tilescale::barrier_of_siblings", [near])


def barrier_of_rail(stage: DeviceStage, what: str, level: str) -> ir.Stmt:
    """`barrier` of the siblings at this one's position in all groups that share memory."""
    groups, rank = split(stage.target, level), stage.rank(level)
    assert groups is not None, "who asks has split them"
    rail = _siblings(stage, level, rank // groups.inside, groups.across, rank % groups.inside, groups.inside)
    return _barrier_of(stage, what, level, RAIL, groups.across, GROUPS, [rail, 1])


def _barrier_of(
    stage: DeviceStage, what: str, level: str, part: str, size: int, function: str, members: list[Any]
) -> ir.Stmt:
    """A call of a device function for a barrier of `size` siblings, after which all threads see the others' writes."""
    if function == GROUPS:
        stage.call_nvshmem()
    if function != "tilescale::barrier":
        stage.include("siblings.cuh")
    name = f"barrier_counters{_suffix(stage, level)}{part}"
    counters = stage.workspace_peers(name, (stage.window * size,), "int32")
    stride = ir.IntImm("int64", stage.target.stride // 4)
    behind = (
        ir.Cast("int64", stage.place()), tir.address_of(epochs(stage, level, part)), stage.limit(),
        stage.record(), stage.site(what),
    )  # fmt: skip
    arrive = tir.extern(function, tir.address_of(counters), stride, *members, *behind)
    return stage.after_wait(published(stage, tir.evaluate(arrive), drains=True))


def siblings_of(stage: DeviceStage, level: str) -> ir.PrimExpr:
    """The device functions' argument for all siblings of a level."""
    return _siblings(stage, level, stage.rank(level), stage.target.mesh.count(level), ir.IntImm("int32", 0))


def _siblings(stage: DeviceStage, level: str, rank: Any, size: int, first: Any, apart: int = 1) -> ir.PrimExpr:
    """The device functions' arguments for `size` siblings of a level, `apart` in their ranks from the first one on."""
    step = apart * stage.target.mesh.step(level)
    shift = stage.scalar(SlotShift(), "slot_shift", "int32")
    return tir.extern(
        "tilescale::siblings", rank, size, stage.device_number(level, first), step, shift, stage.target.slots
    )
