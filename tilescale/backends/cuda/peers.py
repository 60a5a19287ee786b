# SPDX-License-Identifier: MIT
"""Lowering of copies, signals, waits and barriers between devices."""

from __future__ import annotations

from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lower import C_TYPES, GridLowering, level_of, lowers
from tilescale.program import ops

_COMPARE = {"==": "EQ", "!=": "NE", ">=": "GE", ">": "GT", "<=": "LE", "<": "LT"}


def device_number(lowering: GridLowering, level: str, rank: Any) -> Any:
    """The number, over all devices, of the one that `rank` at `level` names as seen from this one."""
    number: Any = ir.IntImm("int32", 0)
    for name, size in lowering.target.sizes:
        number = number * size + (rank if name == level else lowering.rank(name))
    return number


@lowers(ops.COPY)
def _copy(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    level = level_of(lowering, call)
    if level.kind != "unit":
        raise lowering.unsupported(f"T.copy between units of level {level.name!r} has no CUDA lowering")
    to_peer = ir.attribute(call, "far") == "dst"
    near, far = (call.args[0], call.args[1]) if to_peer else (call.args[1], call.args[0])
    buffer, begins, extents = ir.region_parts(far)
    slot = lowering.slot(device_number(lowering, level.name, lowering.expr(call.args[2])))
    begins, extents = ([lowering.expr(n) for n in part] for part in (begins, extents))
    remote = tir.region(lowering.peers(buffer.data), [slot, *begins], [1, *extents], "w" if to_peer else "r")
    local = lowering.expr(near)
    impl = ir.attribute(call, "impl")
    lowering.notes.append(f"T.copy({'dst' if to_peer else 'src'}=) of {buffer.name}: {impl or 'as TileLang chooses'}")
    pair = (local, remote) if to_peer else (remote, local)
    copy = tir.tile_call("copy", *pair, **({"disable_tma": 1} if impl == "lsu" else {}))
    if len(call.args) == 3:
        return copy
    told = _signal_peer(lowering, call.args[3], call.args[4], ir.attribute(call, "op"), slot)
    return tir.sequence([copy, told])


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
    site = lowering.site(f"signal of {name}")
    wanted = ir.Cast("int64", lowering.expr(value))
    update = tir.extern(f"tilescale::signal<{kind}>", pointer, index, extent, wanted, lowering.record(), site)
    return lowering.published(tir.evaluate(update))


@lowers(ops.SIGNAL)
def _signal(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    op = ir.attribute(call, "op")
    if len(call.args) > 2:
        slot = lowering.slot(device_number(lowering, ir.attribute(call, "level"), lowering.expr(call.args[2])))
        return _signal_peer(lowering, call.args[0], call.args[1], op, slot)
    buffer, index, extent, c_type = _flag(lowering, call.args[0])
    pointer = tir.address_of(lowering.local(buffer.data))
    kind = f"{1 if op == 'set' else 0}, {c_type}"
    return _signal_at(lowering, pointer, index, extent, call.args[1], kind, buffer.name)


@lowers(ops.WAIT)
def _wait(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    buffer, index, extent, c_type = _flag(lowering, call.args[0])
    compare = ir.attribute(call, "compare")
    site = lowering.site(f"{buffer.name} {compare}")
    poll = tir.extern(
        f"tilescale::wait<tilescale::{_COMPARE[compare]}, {c_type}>",
        tir.address_of(lowering.local(buffer.data)),
        index,
        extent,
        ir.Cast("int64", lowering.expr(call.args[1])),
        lowering.limit(),
        lowering.record(),
        site,
    )
    return lowering.after_wait(tir.evaluate(poll))


@lowers(ops.BARRIER)
def _barrier(lowering: GridLowering, call: ir.Call) -> ir.Stmt:
    level = level_of(lowering, call)
    if level.kind != "unit":
        raise lowering.unsupported(f"T.barrier of level {level.name!r} has no CUDA lowering")
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
    counters = lowering.workspace_peers("barrier_counters", (count,), "int32")
    rank = lowering.rank(lowering.target.sizes[0][0])
    arrive = tir.extern(
        "tilescale::barrier",
        tir.address_of(counters),
        ir.IntImm("int64", lowering.target.stride // 4),
        lowering.slot(rank),
        devices,
        ir.Cast("int64", lowering.program_number()),
        tir.address_of(epochs(lowering)),
        lowering.limit(),
        lowering.record(),
        lowering.site(what),
    )
    whole = [tir.evaluate(tir.extern("tilescale::drain")), lowering.sync()]
    return tir.sequence([*whole, lowering.after_wait(tir.evaluate(arrive))])
