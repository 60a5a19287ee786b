# SPDX-License-Identifier: MIT
"""Rules for signals, waits and barriers between devices."""

from __future__ import annotations

from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering.completion import C_TYPES, published, signal_kind
from tilescale.backends.cuda.lowering.deferred import KEPT
from tilescale.backends.cuda.lowering.devices import DeviceStage
from tilescale.backends.cuda.lowering.registry import lowers
from tilescale.backends.cuda.lowering.roles import BY_WARP, BY_WARP_FUNCTION
from tilescale.program import ops
from tilescale.program.operations import Copy, Signal, Wait

_COMPARE = {"==": "EQ", "!=": "NE", ">=": "GE", ">": "GT", "<=": "LE", "<": "LT"}


def device_number(stage: DeviceStage, level: str, rank: Any) -> Any:
    """The number, over all devices, of the one that `rank` at `level` names as seen from this one."""
    number: Any = ir.IntImm("int32", 0)
    for name, size in stage.target.sizes:
        number = number * size + (rank if name == level else stage.rank(name))
    return number


def flag_of(stage: DeviceStage, region: ir.Call) -> tuple[ir.Buffer, Any, int | Any, str]:
    """A flag's tensor, its number within it, how many there are, and their type."""
    buffer, begins, _ = ir.region_parts(region)
    index: Any = ir.IntImm("int64", 0)
    extent: Any = ir.IntImm("int64", 1)
    for begin, size in zip(begins, buffer.shape, strict=True):
        index = index * stage.expr(size) + stage.expr(begin)
        extent = extent * stage.expr(size)
    dtype = str(buffer.dtype)
    if dtype not in C_TYPES:
        raise stage.unsupported(f"flags of type {dtype}: {buffer.name!r}; use one of {', '.join(C_TYPES)}")
    return buffer, index, extent, C_TYPES[dtype]


def _first(buffer: ir.Buffer, slot: Any) -> ir.PrimExpr:
    """The address of one device's instance of a tensor."""
    load = ir.BufferLoad(buffer, [slot, *[ir.IntImm("int32", 0)] * (len(buffer.shape) - 1)])
    return tir.call(tl.ADDRESS_OF, load)


def _told(call: ir.Call) -> tuple[ir.Call, ir.PrimExpr]:
    """The flag that a copy or signal updates, and the value."""
    if call.op.same_as(ops.COPY):
        copy = Copy.of(call)
        return copy.signal, copy.value
    signal = Signal.of(call)
    return signal.flag, signal.value


def signal_peer(stage: DeviceStage, call: ir.Call, slot: Any) -> ir.Stmt:
    """Update the flag of the device at `slot` that a copy or signal names."""
    buffer = ir.region_parts(_told(call)[0])[0]
    return _signal_at(stage, call, _first(stage.peers(buffer.data), slot))


def signal_here(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    """Update the flag of this device that a copy or signal names, after everything that the program wrote."""
    buffer = ir.region_parts(_told(call)[0])[0]
    return _signal_at(stage, call, tir.address_of(stage.local(buffer.data)))


def _signal_at(stage: DeviceStage, call: ir.Call, flags: ir.PrimExpr) -> ir.Stmt:
    """The same, `flags` being the first one of the instance meant."""
    region, value = _told(call)
    buffer, index, extent, _ = flag_of(stage, region)
    site = stage.site(f"T.signal({buffer.name})", flag=buffer.name)
    if (number := ir.attribute(call, KEPT)) is not None:
        address = tir.extern("tilescale::address", flags, index, extent, stage.record(), site, dtype="int64")
        return ir.BufferStore(stage.roles.kept[number].variable, address, [ir.IntImm("int32", 0)])
    kind, wanted = signal_kind(buffer, ir.attribute(call, "op")), ir.Cast("int64", stage.expr(value))
    update = tir.extern(f"tilescale::signal<{kind}>", flags, index, extent, wanted, stage.record(), site)
    return published(stage, tir.evaluate(update))


@lowers(ops.SIGNAL.name)
def _signal(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    signal = Signal.of(call)
    if signal.level is None:
        return signal_here(stage, call)
    peer = device_number(stage, signal.level, stage.expr(signal.peer))
    return signal_peer(stage, call, stage.slot(peer))


@lowers(ops.WAIT.name)
def _wait(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    wait = Wait.of(call)
    buffer, index, extent, c_type = flag_of(stage, wait.flag)
    compare = wait.compare
    site = stage.site(f"T.wait({buffer.name} {compare})", flag=buffer.name, compare=compare)
    by_warp = ir.attribute(call, BY_WARP)
    poll = tir.extern(
        f"{BY_WARP_FUNCTION if by_warp else 'tilescale::wait'}<tilescale::{_COMPARE[compare]}, {c_type}>",
        tir.address_of(stage.local(buffer.data)),
        index,
        extent,
        ir.Cast("int64", stage.expr(wait.value)),
        stage.limit(),
        stage.record(),
        site,
    )
    return tir.evaluate(poll) if by_warp else stage.after_wait(stage.one_thread(tir.evaluate(poll)))


@lowers(ops.BARRIER.name)
def _barrier(stage: DeviceStage, call: ir.Call) -> ir.Stmt:
    level = stage.level_of(call)
    return barrier(stage, f"T.barrier of level {level.name!r}")


def epochs(stage: DeviceStage) -> ir.Buffer:
    """How often each program of this device has met its counterparts."""
    return stage.workspace("barrier_epochs", (stage.programs(),), "int32", symmetric=False)


def barrier(stage: DeviceStage, what: str) -> ir.Stmt:
    """The programs with this index on all devices meet; what each wrote before is then visible to the others.

    Raises:
        UnsupportedError: devices of several levels.
    """
    if len(stage.target.sizes) != 1:
        raise stage.unsupported(f"{what} in a launch over {len(stage.target.sizes)} levels has no CUDA lowering")
    count, devices = stage.programs(), stage.target.devices
    counters = stage.workspace_peers("barrier_counters", (count * devices,), "int32")
    rank = stage.rank(stage.target.sizes[0][0])
    arrive = tir.extern(
        "tilescale::barrier",
        tir.address_of(counters),
        ir.IntImm("int64", stage.target.stride // 4),
        stage.slot(rank),
        rank,
        devices,
        ir.Cast("int64", stage.program_number()),
        tir.address_of(epochs(stage)),
        stage.limit(),
        stage.record(),
        stage.site(what),
    )
    return stage.after_wait(published(stage, tir.evaluate(arrive), drains=True))
