# SPDX-License-Identifier: MIT
"""Where all devices must meet when a call begins and ends, and the two meetings as part of a program's one kernel.

A rendezvous is a kernel of its own unless the program is one small grid: then `enter` and `leave` of
headers/rendezvous.cuh stand at the beginning and the end of its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda import nvshmem_link
from tilescale.backends.cuda.lowering import arguments as arg
from tilescale.backends.cuda.lowering.completion import published
from tilescale.backends.cuda.lowering.plan import JOIN, HostStep
from tilescale.backends.cuda.lowering.signature import Target
from tilescale.hda import Machine
from tilescale.program import ops
from tilescale.program.model import Control, GridPhase, Launch, Part, Sequence
from tilescale.program.operations import Barrier, Collective, Copy, Signal, Wait, operation

if TYPE_CHECKING:
    from tilescale.backends.cuda.lowering.lower import GridLowering

ENTRY, EXIT = "the meeting at its entry", "the meeting at its exit"

EXIT_PATIENCE = 3
"""How many times as long as a wait the exit takes at most: a rank that hangs in a wait is to fail first, saying why."""


@dataclass(frozen=True)
class Rendezvous:
    """What a call needs.

    Attributes:
        entry: all devices have come to the call before any of them touches another one's memory.
        exit: all devices are done with each other's memory before any of them ends the call.
        inside: the program's kernel does it.
    """

    entry: bool
    exit: bool
    inside: bool = False


def needed(body: Part, target: Target) -> Rendezvous:
    """Which meetings a planned program needs, decided on the safe side.

    What must hold: when a call ends on a device, no other device still touches this one's memory, and what was written
    there is visible; so whatever the device's stream does next is safe, and only a call that touches the memory of
    others has to know that these have come to it.

    *Entry*: something in the program reaches arguments or workspaces of the program on other devices (remote copies,
    signals, collectives by copy engine), whose owner may still be using them; or it waits for flags, where a call that
    no other rank makes is to be an error of all; or it runs NCCL, whose waits for ranks that do not come nothing
    bounds. Collectives of tiles need none: they write to workspaces of their own whose halves alternate, and their
    waits are bounded.

    *Exit*: some of these (but for collectives, which end when everybody's part has come) is not followed by a barrier
    of devices that every block, or the device, executes. Waits for flags are no such proof: a flag may have had its
    value before the call.

    A single device needs neither.
    """
    if target.devices == 1:
        return Rendezvous(False, False)
    effects = list(_effects(body, target.machine))
    touches = [i for i, effect in enumerate(effects) if effect == _TOUCHES]
    met = max((i for i, effect in enumerate(effects) if effect == _MEETS), default=-1)
    entry = bool(touches) or _GATHERS in effects
    return Rendezvous(entry, bool(touches) and touches[-1] > met)


_TOUCHES, _GATHERS, _MEETS = "touches others' memory", "a collective that has to begin together", "a barrier"


def _effects(node: Any, machine: Machine) -> Iterator[str]:
    """What parts, and statements of a grid, do between devices, in order. A barrier counts where nobody can pass it."""
    if isinstance(node, Launch):
        yield from _effects(node.body, machine)
    elif isinstance(node, Sequence):
        for part in node.parts:
            yield from _effects(part, machine)
    elif isinstance(node, Control):
        for part in node.parts:
            yield from (effect for effect in _effects(part, machine) if effect != _MEETS)
    elif isinstance(node, HostStep):
        yield from _effects_of_step(node, machine)
    elif isinstance(node, GridPhase):
        yield from _effects(node.stmt, machine)
    elif isinstance(node, ir.SeqStmt):
        for stmt in ir.children(node):
            yield from _effects(stmt, machine)
    elif isinstance(node, ir.AttrStmt) and str(node.attr_key) == ops.SCALE:
        is_whole = machine.level(str(node.value.value)).kind in ("unit", "program")
        for effect in _effects(node.body, machine):
            if is_whole or effect != _MEETS:
                yield effect
    elif isinstance(node, ir.Evaluate):
        yield from _effects_of_call(node.value, machine)
    else:
        found: list[Any] = []
        ir.walk(node, found.append)
        yield from (e for call in found for e in _effects_of_call(call, machine) if e != _MEETS)


def _effects_of_step(step: HostStep, machine: Machine) -> Iterator[str]:
    if isinstance(step.stmt, ir.Bind):
        return
    made = operation(step.call)
    if step.impl == JOIN:
        yield _TOUCHES  # what others have started for this device no barrier of theirs waits for
    elif isinstance(made, Collective):
        # One that raises flags has not ended when the next statement begins.
        yield _GATHERS if made.flags is None else _TOUCHES
    else:
        yield from _effects_of_call(step.call, machine)


def _effects_of_call(node: Any, machine: Machine) -> Iterator[str]:
    made = operation(node)
    if isinstance(made, Wait | Signal) or isinstance(made, Copy) and machine.level(made.level).kind == "unit":
        yield _TOUCHES
    elif isinstance(made, Barrier) and machine.level(made.level).kind == "unit":
        yield _MEETS


# -- inside a kernel ---------------------------------------------------------------------------------------------------


def fits_inside(body: Part, machine: Machine) -> bool:
    """Whether a planned program is one grid that is small enough to meet itself.

    All of its blocks wait at their begin, so a grid that fills the device keeps its processors from others' work; and
    what waits at the begin of a block is no producer's work, so loops that TileLang would give to one stay as they are.
    """
    parts = [(launch, part) for launch, part in _parts(body, None)]
    if len(parts) != 1 or parts[0][0] is None or not isinstance(parts[0][1], GridPhase):
        return False
    launch, phase = parts[0]
    extents = [ir.constant(n) for n in launch.grid]
    if None in extents or launch.cluster_size > 1:
        return False
    if ir.contains(phase.stmt, _is_by_library):
        return False
    held = machine.count(machine.program_level.name, machine.tensor_level.name)
    return 0 < math.prod(extents) <= held and not ir.contains(phase.stmt, _is_pipelined)


def _parts(part: Part, launch: Launch | None) -> Iterator[tuple[Launch | None, Part]]:
    if isinstance(part, Launch):
        yield from _parts(part.body, part)
    elif isinstance(part, Sequence):
        for inner in part.parts:
            yield from _parts(inner, launch)
    elif not (isinstance(part, HostStep) and isinstance(part.stmt, ir.Bind)):
        yield launch, part


def _is_pipelined(node: Any) -> bool:
    return isinstance(node, ir.For) and "num_stages" in node.annotations


def _is_by_library(node: Any) -> bool:
    """Whether a copy is made by a library that completes it in its own way."""
    made = operation(node)
    return isinstance(made, Copy) and made.impl == nvshmem_link.IMPL


def enclosed(lowering: GridLowering, body: ir.Stmt, meets: Rendezvous) -> ir.Stmt:
    """The body of a grid that meets: blocks come first of all, enter before they reach other devices, and leave."""
    lowering.headers.append("rendezvous.cuh")
    devices, rank = lowering.target.devices, ir.IntImm("int32", 0)
    for name, size in lowering.target.sizes:
        rank = rank * size + lowering.rank(name)
    words = tir.address_of(lowering.everywhere(arg.MeetingWords(), "meeting_words", (2 * devices,), "int64"))
    counts = tir.address_of(lowering.tensor(arg.MeetingCounts(), "meeting_counts", [3], "int32"))
    stride, slot = ir.IntImm("int64", lowering.target.stride // 8), lowering.slot(rank)
    limit, record = lowering.limit(), lowering.record()
    begin, end = lowering.site(ENTRY), lowering.site(EXIT)
    came = lowering.scalar(arg.Purpose(begin, checked=True), "at_entry", "int32")
    goes = lowering.scalar(arg.Purpose(end), "at_exit", "int32")

    come = tir.extern("tilescale::come", words, stride, rank, devices, counts, came, record)
    enter = tir.extern("tilescale::enter", words, stride, slot, rank, devices, counts, came, limit, record, begin)
    if meets.exit:
        patience = limit * EXIT_PATIENCE
        leave = tir.extern("tilescale::leave", words, stride, slot, rank, devices, counts, goes, patience, record, end)
        last = published(lowering, tir.evaluate(leave), drains=True)
    else:
        count = tir.extern("tilescale::count", counts, record)
        last = lowering.one_thread(tir.evaluate(count))
    before, after = _until_remote(lowering, body)
    return tir.sequence(
        [
            lowering.one_thread(tir.evaluate(come)),
            *before,
            lowering.after_wait(lowering.one_thread(tir.evaluate(enter))),
            *after,
            last,
        ]
    )


def _until_remote(lowering: GridLowering, body: ir.Stmt) -> tuple[list[ir.Stmt], list[ir.Stmt]]:
    """The statements of a lowered body before the first one that names another device's memory or synchronises."""
    far = {
        buffer.data
        for (_, buffer), argument in zip(lowering.parameters, lowering.arguments, strict=True)
        if isinstance(argument, arg.Peers) or isinstance(argument, arg.Workspace) and argument.peers
    }

    def is_remote(node: Any) -> bool:
        touched = node.buffer.data in far if isinstance(node, ir.BufferLoad | ir.BufferStore) else False
        return touched or tir.is_extern(node)

    statements = list(ir.children(body)) if isinstance(body, ir.SeqStmt) else [body]
    first = next((i for i, stmt in enumerate(statements) if ir.contains(stmt, is_remote)), len(statements))
    return statements[:first], statements[first:]
