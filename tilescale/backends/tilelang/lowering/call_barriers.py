# SPDX-License-Identifier: MIT
"""Barriers of all devices at the begin and end of a call, as kernels or as part of one of the call's kernels.

A barrier is a kernel of its own unless one small grid is the only part of the program with other devices: then `enter`
and `leave` of headers/rendezvous.cuh are at the beginning and the end of its blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering import arguments as arg
from tilescale.backends.tilelang.lowering.completion import published
from tilescale.backends.tilelang.lowering.devices import DeviceStage
from tilescale.backends.tilelang.lowering.host_step import HostStep
from tilescale.backends.tilelang.lowering.implemented import ON_TENSORS
from tilescale.backends.tilelang.lowering.markers import SYNC, by_nvshmem, sync
from tilescale.backends.tilelang.lowering.phase import LoweringTarget
from tilescale.backends.tilelang.lowering.role_graph.split import apart, is_apart
from tilescale.program import ops
from tilescale.program.effects import phases
from tilescale.program.model import DevicePhase, GridPhase, Launch, Part, Program
from tilescale.program.operations import Collective, operation
from tilescale.program.rendezvous_need import (
    involves_others,
    needs_rendezvous_at_entry,
    needs_rendezvous_at_exit,
    only_phase_with_others,
)

ENTRY, EXIT = "the barrier at its entry", "the barrier at its exit"

OF_DEVICE = ", tilescale::DEVICE>"
"""End of the names of functions for flags of this device."""

LOCAL = frozenset(f"tilescale::{name}" for name in ("complete_stores", "acquired"))
"""Device functions that reach no flags."""

PATIENCE = 3
"""Limit of a barrier after a wait, in multiples of a wait's: a rank that hangs in a wait must fail first, with the
cause."""


@dataclass(frozen=True)
class CallBarriers:
    """The barriers of a call.

    Attributes:
        entry: all devices have reached the call before any accesses another one's memory.
        exit: all devices are done with each other's memory before any ends the call.
        inside: a kernel of the program executes them.
        patience: the entry's limit, in multiples of a wait's. The entry is the next barrier after the waits of a call
            without an exit, unless the program itself ends with a barrier.
    """

    entry: bool
    exit: bool
    inside: bool = False
    patience: int = 1


def needed(program: Program, body: Part, target: LoweringTarget) -> CallBarriers:
    """The barriers that a program needs; `body` has its planned device phases.

    `tilescale/program/rendezvous_need.py` finds what the order of accesses needs. Collectives have their own order in
    every implementation: those of tiles write to their own double-buffered workspaces, the others end when all parts
    have arrived.

    *Entry*: also where a device accesses another one, signals it, or waits, even if a barrier of the program comes
    first. The barrier detects ranks that make no such call, or make it with other tensors, before anything is written
    into them; and its count shows the watch of the copy queue that a replayed graph makes progress. Before NCCL,
    because NCCL's wait for a missing rank has no bound.

    *Exit*: only if a device's call may end before an access of another device to its memory. Waiting for its own copy
    queue (`JOIN`) is not enough: others' queues write there too, and only flags show when they have.

    A single device needs neither.
    """
    if target.devices == 1:
        return CallBarriers(False, False)
    machine = target.machine
    entry = needs_rendezvous_at_entry(program, machine).needed
    entry = entry or involves_others(program, machine) or _has_collective_of_host(body)
    leaving = needs_rendezvous_at_exit(program, machine, dict(target.sizes))
    return CallBarriers(
        entry, leaving.needed, patience=1 if leaving.needed or leaving.synchronized or not entry else PATIENCE
    )


def _has_collective_of_host(part: Part) -> bool:
    """Whether the host starts a collective that is not a kernel of TileScale."""
    if isinstance(part, HostStep):
        made = None if isinstance(part.stmt, ir.Bind) else operation(part.call)
        if not isinstance(made, Collective):
            return False
        implementations = ON_TENSORS.get((made.name, part.impl), ())  # none for one on the copy queue
        return not any(each.by_kernel for each in implementations)
    if isinstance(part, DevicePhase | GridPhase):
        return False
    return any(map(_has_collective_of_host, [part.body] if isinstance(part, Launch) else part.parts))


# -- inside a kernel ---------------------------------------------------------------------------------------------------


def small_grid(program: Program, body: Part, target: LoweringTarget) -> GridPhase | None:
    """The grid of a planned program that contains its barriers: the only phase with other devices, and small enough;
    None if there is none.

    All of its blocks wait, so a grid that fills the device would keep its SMs from other work. A block's wait is not
    the producer's, so loops that TileLang would give to a producer stay as they are. Loops of units have their own
    loader, which does not wait with the block: it must not load from peers that have not arrived, and if it waits, a
    missing rank must fail at the barrier, not in its wait. Loops of tasks have no producer, as their blocks wait for
    one another anyway, and load from their own device. Devices that do not all share memory synchronize in two steps,
    which the host starts.
    """
    if target.group_size != target.devices:
        return None
    machine = target.machine
    phase = only_phase_with_others(replace(program, body=body), machine)
    if not isinstance(phase, GridPhase):
        return None
    launch = next(launch for one, launch in phases(body) if one is phase)
    extents = ir.constants(launch.grid) if launch is not None else None
    if launch is None or extents is None or launch.cluster_size > 1:
        return None
    if ir.contains(phase.stmt, by_nvshmem):  # which completes its operations itself
        return None
    held = machine.program_units
    finer = {level.name for level in machine.levels if level.kind == "thread_group"}
    has_tasks = ops.TASKS in dict(launch.notes)
    waits = ir.contains(phase.stmt, lambda node: ir.op_name(node) == ops.WAIT.name)

    def has_producer(node: ir.Node) -> bool:
        if not (isinstance(node, ir.For) and "num_stages" in node.annotations):
            return False
        works_alone = not waits and not ir.contains(node, lambda n: ir.op_name(n) == ops.COPY.name)
        return not (works_alone and ir.contains(node, lambda n: _level_of_scale(n) in finer))

    is_small = 0 < math.prod(extents) <= held and (has_tasks or not ir.contains(phase.stmt, has_producer))
    return phase if is_small else None


def _level_of_scale(node: ir.Node) -> str | None:
    is_scale = isinstance(node, ir.AttrStmt) and str(node.attr_key) == ops.SCALE
    return str(node.value.value) if is_scale else None


def enclosed(stage: DeviceStage, body: ir.Stmt, rendezvous: CallBarriers) -> ir.Stmt:
    """The body of a grid with its own barriers: blocks enter before they access other devices, and leave at the end.

    It zeroes the flags at its end, for the next call: a separate launch takes a quarter of a small call. Loads ahead of
    the block, which are of this device's memory, do not wait for the others.
    """
    if is_apart(body):
        return apart(enclosed(stage, body.body, rendezvous))
    stage.headers.append("rendezvous.cuh")
    devices, rank = stage.target.devices, stage.target.mesh.number(stage.rank)
    words = tir.address_of(stage.everywhere(arg.RendezvousWords(), "rendezvous_words", (2 * devices,), "int64"))
    counts = tir.address_of(stage.tensor(arg.RendezvousCounts(), "rendezvous_counts", [3], "int32"))
    stride, slot = ir.IntImm("int64", stage.target.stride // 8), stage.slot(rank)
    limit, record = stage.limit(), stage.record()
    begin, end = stage.site(ENTRY), stage.site(EXIT)
    came = stage.scalar(arg.BarrierPurpose(begin, checked=True), "at_entry", "int32")
    goes = stage.scalar(arg.BarrierPurpose(end), "at_exit", "int32")

    flags = _flags(stage)
    patience = limit * rendezvous.patience
    come = tir.extern("tilescale::come", words, stride, rank, devices, counts, came, record)
    enter = tir.extern("tilescale::enter", words, stride, slot, rank, devices, counts, came, patience, record, begin)
    if rendezvous.exit:
        longest = limit * PATIENCE
        ours = words, stride, slot, rank, devices, counts
        leave = tir.extern("tilescale::leave", *ours, goes, longest, record, end, *flags)
        last = published(stage, tir.evaluate(leave), drains=True)
    else:
        count = tir.extern("tilescale::count", counts, record, *flags)
        together = [sync()] if flags else []  # no thread of the block reads them any more
        last = tir.sequence([*together, stage.one_thread(tir.evaluate(count))])
    before, after = _until_remote(stage, body)
    return tir.sequence(
        [
            stage.one_thread(tir.evaluate(come)),
            *before,
            stage.after_wait(stage.one_thread(tir.evaluate(enter))),
            *after,
            last,
        ]
    )


def _flags(stage: DeviceStage) -> list[ir.PrimExpr]:
    """The flags of a launch on this device: the address of each tensor of them, and its size."""
    found: list[ir.PrimExpr] = []
    for data in stage.launch.flags:
        buffer = stage.local(data)
        extent = ir.IntImm("int64", 1)
        for size in buffer.shape:
            extent = extent * size
        found += [tir.address_of(buffer), extent]
    return found


def _until_remote(stage: DeviceStage, body: ir.Stmt) -> tuple[list[ir.Stmt], list[ir.Stmt]]:
    """The statements of a lowered body before the first one that accesses another device's memory or synchronizes."""
    far = {
        buffer.data
        for (_, buffer), argument in zip(stage.parameters, stage.arguments, strict=True)
        if buffer is not None
        and (isinstance(argument, arg.PeerInstances) or isinstance(argument, arg.KernelWorkspace) and argument.peers)
    }

    def is_remote(node: ir.Node) -> bool:
        touched = node.buffer.data in far if isinstance(node, ir.BufferLoad | ir.BufferStore) else False
        name = tir.extern_name(node)
        return touched or name is not None and not name.endswith(OF_DEVICE) and name not in LOCAL

    statements = ir.in_order(body)
    first = next((i for i, stmt in enumerate(statements) if ir.contains(stmt, is_remote)), len(statements))
    while first and _completes(statements[first - 1]):  # for the signal that follows
        first -= 1
    return statements[:first], statements[first:]


def _completes(stmt: ir.Stmt) -> bool:
    value = stmt.value if isinstance(stmt, ir.Evaluate) else None
    return ir.op_name(value) == SYNC.name or tir.extern_name(value) in LOCAL
