# SPDX-License-Identifier: MIT
"""Lowering of copies, signals, waits and barriers between devices."""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering import nvshmem
from tilescale.backends.cuda.lowering.completion import BULK, C_TYPES, published, signal_kind
from tilescale.backends.cuda.lowering.deferred import KEPT
from tilescale.backends.cuda.lowering.lower import GridLowering, level_of, lowers
from tilescale.backends.cuda.lowering.roles import BY_WARP, BY_WARP_FUNCTION
from tilescale.cost.choose import Choice
from tilescale.program import ops
from tilescale.program.operations import Copy, Signal, Wait

_INSTRUCTIONS: dict[str, dict[str, Any]] = {
    BULK: {"prefer_instruction": ir.StringImm("tma")},
    "lsu": {"disable_tma": 1},
}
"""Mechanism of the machine -> what makes stock TileLang use it in a copy."""

_COMPARE = {"==": "EQ", "!=": "NE", ">=": "GE", ">": "GT", "<=": "LE", "<": "LT"}


def device_number(lowering: GridLowering, level: str, rank: Any) -> Any:
    """The number, over all devices, of the one that `rank` at `level` names as seen from this one."""
    number: Any = ir.IntImm("int32", 0)
    for name, size in lowering.target.sizes:
        number = number * size + (rank if name == level else lowering.rank(name))
    return number


def chosen(lowering: GridLowering, call: ir.Call) -> Choice:
    """The mechanism of a copy of tiles, by the machine model."""
    choice = lowering.choice(call)
    if choice.name not in _INSTRUCTIONS:
        raise lowering.unsupported(f"T.copy by {choice.name} has no CUDA lowering")
    return choice


@lowers(ops.COPY)
def _copy(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    asked = Copy.of(call)
    if asked.impl == nvshmem.IMPL:
        return _by_nvshmem(lowering, asked)
    to_peer, near = asked.to_peer, asked.near
    buffer, begins, extents = ir.region_parts(asked.far)
    slot = lowering.slot(device_number(lowering, asked.level, lowering.expr(asked.peer)))
    begins, extents = ([lowering.expr(n) for n in part] for part in (begins, extents))
    remote = tir.region(lowering.peers(buffer.data), [slot, *begins], [1, *extents], "w" if to_peer else "r")
    local = lowering.expr(near)
    choice = chosen(lowering, call)
    names = [name.removesuffix("_view") for name in (ir.region_parts(near)[0].name, buffer.name)]
    lowering.notes.append(f"T.copy({names[0]}, {names[1]}, {'dst' if to_peer else 'src'}=): {choice}")
    pair = (local, remote) if to_peer else (remote, local)
    is_left_open = ir.attribute(call, KEPT) is not None
    if choice.name == BULK and to_peer and (is_left_open or (asked.signal is not None and lowering.roles.elects)):
        copy = tir.tile_call("tma_copy", *pair)
    else:
        copy = tir.tile_call("copy", *pair, **_INSTRUCTIONS[choice.name])
    if asked.signal is None:
        return copy
    return tir.sequence([copy, _signal_peer(lowering, call, slot)])


def _by_nvshmem(lowering: GridLowering, copy: Copy) -> ir.Stmt:
    peer = device_number(lowering, copy.level, lowering.expr(copy.peer)) % lowering.target.devices
    told = None
    if copy.signal is not None:
        buffer, index, extent, c_type = _flag(lowering, copy.signal)
        pointer = tir.address_of(lowering.symmetric(buffer.data))
        site = lowering.site(f"T.copy(signal={buffer.name})", flag=buffer.name)
        kind = f"{1 if copy.op == 'set' else 0}, {c_type}"
        value = ir.Cast("int64", lowering.expr(copy.value))
        told = nvshmem.Told(kind, (pointer, index, extent), value, (lowering.record(), site))
    return nvshmem.copy(lowering, (copy.source, copy.target), copy.to_peer, peer, told)


def _flag(lowering: GridLowering, region: ir.Call) -> tuple[ir.Buffer, Any, int | Any, str]:
    """A flag's tensor, its number within it, how many there are, and their type."""
    buffer, begins, _ = ir.region_parts(region)
    index: Any = ir.IntImm("int64", 0)
    extent: Any = ir.IntImm("int64", 1)
    for begin, size in zip(begins, buffer.shape, strict=True):
        index = index * lowering.expr(size) + lowering.expr(begin)
        extent = extent * lowering.expr(size)
    dtype = str(buffer.dtype)
    if dtype not in C_TYPES:
        raise lowering.unsupported(f"flags of type {dtype}: {buffer.name!r}; use one of {', '.join(C_TYPES)}")
    return buffer, index, extent, C_TYPES[dtype]


def _first(buffer: ir.Buffer, slot: Any) -> ir.PrimExpr:
    """The address of one device's instance of a tensor."""
    load = ir.BufferLoad(buffer, [slot, *[ir.IntImm("int32", 0)] * (len(buffer.shape) - 1)])
    return tir.call("tirx.address_of", load)


def _told(call: ir.Call) -> tuple[ir.Call, ir.PrimExpr]:
    """The flag that a copy or signal updates, and the value."""
    if call.op.same_as(ops.COPY):
        copy = Copy.of(call)
        return copy.signal, copy.value
    signal = Signal.of(call)
    return signal.flag, signal.value


def _signal_peer(lowering: GridLowering, call: ir.Call, slot: Any) -> ir.Stmt:
    """Update the flag of the device at `slot` that a copy or signal names."""
    buffer = ir.region_parts(_told(call)[0])[0]
    return _signal_at(lowering, call, _first(lowering.peers(buffer.data), slot))


def signal_here(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    """Update the flag of this device that a copy or signal names, after everything that the program wrote."""
    buffer = ir.region_parts(_told(call)[0])[0]
    return _signal_at(lowering, call, tir.address_of(lowering.local(buffer.data)))


def _signal_at(lowering: GridLowering, call: ir.Call, flags: ir.PrimExpr) -> ir.Stmt:
    """The same, `flags` being the first one of the instance meant."""
    region, value = _told(call)
    buffer, index, extent, _ = _flag(lowering, region)
    site = lowering.site(f"T.signal({buffer.name})", flag=buffer.name)
    if (number := ir.attribute(call, KEPT)) is not None:
        address = tir.extern("tilescale::address", flags, index, extent, lowering.record(), site, dtype="int64")
        return ir.BufferStore(lowering.roles.kept[number].variable, address, [ir.IntImm("int32", 0)])
    kind, wanted = signal_kind(buffer, ir.attribute(call, "op")), ir.Cast("int64", lowering.expr(value))
    update = tir.extern(f"tilescale::signal<{kind}>", flags, index, extent, wanted, lowering.record(), site)
    return published(lowering, tir.evaluate(update))


@lowers(ops.SIGNAL)
def _signal(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    signal = Signal.of(call)
    if signal.level is None:
        return signal_here(lowering, call)
    peer = device_number(lowering, signal.level, lowering.expr(signal.peer))
    return _signal_peer(lowering, call, lowering.slot(peer))


@lowers(ops.WAIT)
def _wait(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    wait = Wait.of(call)
    buffer, index, extent, c_type = _flag(lowering, wait.flag)
    compare = wait.compare
    site = lowering.site(f"T.wait({buffer.name} {compare})", flag=buffer.name, compare=compare)
    by_warp = ir.attribute(call, BY_WARP)
    poll = tir.extern(
        f"{BY_WARP_FUNCTION if by_warp else 'tilescale::wait'}<tilescale::{_COMPARE[compare]}, {c_type}>",
        tir.address_of(lowering.local(buffer.data)),
        index,
        extent,
        ir.Cast("int64", lowering.expr(wait.value)),
        lowering.limit(),
        lowering.record(),
        site,
    )
    return tir.evaluate(poll) if by_warp else lowering.after_wait(lowering.one_thread(tir.evaluate(poll)))


@lowers(ops.BARRIER)
def _barrier(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    level = level_of(lowering, call)
    return meet(lowering, f"T.barrier of level {level.name!r}")


def epochs(lowering: GridLowering) -> ir.Buffer:
    """How often each program of this device has met its counterparts."""
    return lowering.workspace("barrier_epochs", (lowering.programs(),), "int32", symmetric=False)


def meet(lowering: GridLowering, what: str) -> ir.Stmt:
    """The programs with this index on all devices meet; what each wrote before is then visible to the others.

    Raises:
        UnsupportedError: devices of several levels.
    """
    if len(lowering.target.sizes) != 1:
        raise lowering.unsupported(f"{what} in a launch over {len(lowering.target.sizes)} levels has no CUDA lowering")
    count, devices = lowering.programs(), lowering.target.devices
    counters = lowering.workspace_peers("barrier_counters", (count * devices,), "int32")
    rank = lowering.rank(lowering.target.sizes[0][0])
    arrive = tir.extern(
        "tilescale::barrier",
        tir.address_of(counters),
        ir.IntImm("int64", lowering.target.stride // 4),
        lowering.slot(rank),
        rank,
        devices,
        ir.Cast("int64", lowering.program_number()),
        tir.address_of(epochs(lowering)),
        lowering.limit(),
        lowering.record(),
        lowering.site(what),
    )
    return lowering.after_wait(published(lowering, tir.evaluate(arrive), drains=True))
