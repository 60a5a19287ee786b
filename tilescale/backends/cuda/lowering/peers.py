# SPDX-License-Identifier: MIT
"""Lowering of copies, signals, waits and barriers between devices."""

from __future__ import annotations

import math
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering import nvshmem
from tilescale.backends.cuda.lowering.lower import C_TYPES, GridLowering, level_of, lowers
from tilescale.cost.choose import Choice
from tilescale.cost.operations import copy_choice
from tilescale.errors import UnsupportedError
from tilescale.program import ops
from tilescale.program.operations import Copy, Signal, Wait

_INSTRUCTIONS: dict[str, dict[str, Any]] = {
    "tma": {"prefer_instruction": ir.StringImm("tma")},
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
    machine, grid = lowering.target.machine, [ir.constant(lowering.expr(n)) for n in lowering.launch.grid]
    units = machine.count(machine.program_level.name, machine.tensor_level.name)
    programs = units if None in grid else min(units, math.prod(grid))
    try:
        choice = copy_choice(call, machine, dict(lowering.target.sizes), programs)
    except UnsupportedError as error:
        raise error.at(lowering.where) if lowering.where else error from None
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
    copy = tir.tile_call("copy", *pair, **_INSTRUCTIONS[choice.name])
    if asked.signal is None:
        return copy
    told = _signal_peer(lowering, asked.signal, asked.value, asked.op, slot)
    return tir.sequence([copy, told])


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


def _signal_peer(lowering: GridLowering, region: ir.Call, value: Any, op: str, slot: Any) -> ir.Stmt:
    buffer, index, extent, c_type = _flag(lowering, region)
    pointer = _first(lowering.peers(buffer.data), slot)
    return _signal_at(lowering, pointer, index, extent, value, f"{1 if op == 'set' else 0}, {c_type}", buffer.name)


def _signal_at(
    lowering: GridLowering, pointer: Any, index: Any, extent: Any, value: Any, kind: str, name: str
) -> ir.Stmt:
    site = lowering.site(f"T.signal({name})", flag=name)
    wanted = ir.Cast("int64", lowering.expr(value))
    update = tir.extern(f"tilescale::signal<{kind}>", pointer, index, extent, wanted, lowering.record(), site)
    return lowering.published(tir.evaluate(update))


@lowers(ops.SIGNAL)
def _signal(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    signal = Signal.of(call)
    if signal.peer is not None:
        slot = lowering.slot(device_number(lowering, signal.level, lowering.expr(signal.peer)))
        return _signal_peer(lowering, signal.flag, signal.value, signal.op, slot)
    return signal_here(lowering, signal.flag, signal.value, signal.op)


def signal_here(lowering: GridLowering, region: ir.Call, value: Any, op: str) -> ir.Stmt:
    """Update a flag of this device after everything that the program wrote."""
    buffer, index, extent, c_type = _flag(lowering, region)
    pointer = tir.address_of(lowering.local(buffer.data))
    kind = f"{1 if op == 'set' else 0}, {c_type}"
    return _signal_at(lowering, pointer, index, extent, value, kind, buffer.name)


@lowers(ops.WAIT)
def _wait(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    wait = Wait.of(call)
    buffer, index, extent, c_type = _flag(lowering, wait.flag)
    compare = wait.compare
    site = lowering.site(f"T.wait({buffer.name} {compare})", flag=buffer.name, compare=compare)
    poll = tir.extern(
        f"tilescale::wait<tilescale::{_COMPARE[compare]}, {c_type}>",
        tir.address_of(lowering.local(buffer.data)),
        index,
        extent,
        ir.Cast("int64", lowering.expr(wait.value)),
        lowering.limit(),
        lowering.record(),
        site,
    )
    return lowering.after_wait(tir.evaluate(poll))


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
    whole = [tir.evaluate(tir.extern("tilescale::drain")), lowering.sync()]
    return tir.sequence([*whole, lowering.after_wait(tir.evaluate(arrive))])
