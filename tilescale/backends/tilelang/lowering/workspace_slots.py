# SPDX-License-Identifier: MIT
"""Workspace slots of collectives and barriers, for resident programs.

Why: with a slot for each program, a grid of thousands takes gigabytes, few of which are in use at any time. Before: a
lowered phase whose collectives use slot `program % window` of their workspaces. After: the same, in which a program
waits before its first collective until the previous user of its slot, lower by `window` in number, is done with its
last one. Declines, with a slot for each program, where all are resident at once, and where progress of the lowest
unfinished number is not guaranteed.

The next user of a slot continues its count of barriers, as if one program did the work of both: so devices agree on the
next half of a workspace, and none writes into one that a peer still reads (exchange.py). The lowest unfinished number
makes progress: it has started on all devices, as programs start in the order of their numbers, and earlier users of its
slot are done on all of them.
"""

from __future__ import annotations

import math
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.arguments import KernelWorkspace
from tilescale.backends.tilelang.lowering.completion import published
from tilescale.backends.tilelang.lowering.devices import DeviceStage
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.backends.tilelang.lowering.statements import flat
from tilescale.program import ops
from tilescale.program.effects import names_of
from tilescale.program.footprint import held
from tilescale.program.model import GridPhase
from tilescale.program.waiting import waits_across

PATIENCE = 3
"""Limit of a program's wait for its slot, in multiples of a wait's: a barrier of the previous user must fail first."""


def window(phase: Phase) -> int | None:
    """Number of slots that programs of a phase share; None if each has its own."""
    if not ir.contains(phase.stmt, lambda n: ir.op_name(n) in (ops.BARRIER.name, *ops.COLLECTIVES)):
        return None
    launch, machine = phase.launch, phase.target.machine
    room = max(held(GridPhase(phase.stmt), launch, names_of(phase.program), machine), 1)
    grid = ir.constants(map(phase.sized, launch.grid))
    is_small = grid is not None and math.prod(grid) <= room
    return None if is_small or launch.cluster_size > 1 or not _starts_in_order(phase) else room


def _starts_in_order(phase: Phase) -> bool:
    """Whether the lowest unfinished number makes progress when some before it have not started."""
    if ir.contains(phase.stmt, lambda n: isinstance(n, ir.AttrStmt) and str(n.attr_key) == tir.BLOCK_ORDER):
        return False
    sizes = dict(phase.target.sizes)
    grid = GridPhase(phase.stmt)
    return waits_across(grid, phase.launch, phase.program, phase.target.machine, sizes) is None


def in_slots(stage: DeviceStage, body: ir.Stmt) -> ir.Stmt:
    """A lowered body whose programs use their slots one after another, if they share any."""
    own = {
        buffer.data
        for (_, buffer), argument in zip(stage.parameters, stage.arguments, strict=True)
        if buffer is not None and isinstance(argument, KernelWorkspace) and stage.is_own(argument.name)
    }

    def uses_place(node: ir.Node) -> bool:
        return isinstance(node, ir.BufferLoad | ir.BufferStore) and node.buffer.data in own

    def surrounded(body: ir.Stmt) -> ir.Stmt:
        stmts = flat(body)
        using = [number for number, stmt in enumerate(stmts) if ir.contains(stmt, uses_place)]
        first, last = using[0], using[-1] + 1
        only = stmts[first]
        if last == first + 1 and isinstance(only, ir.AttrStmt):  # an annotation around all statements after it
            inside = ir.AttrStmt(only.node, only.attr_key, only.value, surrounded(only.body))
            return tir.sequence([*stmts[:first], inside, *stmts[last:]])
        return tir.sequence([*stmts[:first], _take(stage), *stmts[first:last], _pass(stage), *stmts[last:]])

    return surrounded(body) if stage.is_shared and ir.contains(body, uses_place) else body


def _tickets(stage: DeviceStage) -> tuple[Any, Any, Any]:
    """Tickets of this device's slots as arguments of device functions: the first one, the program's, their number."""
    tickets = stage.workspace("tickets", (stage.window,), "int32", symmetric=False)
    return tir.address_of(tickets), ir.Cast("int64", stage.place()), ir.IntImm("int64", stage.window)


def _take(stage: DeviceStage) -> ir.Stmt:
    """Wait until this program may use its slot."""
    site = stage.site("its slot in the workspace of collectives, after a program of a lower number")
    ticket = ir.Cast("int64", stage.program_number() // stage.window)
    wait = tir.extern(
        "tilescale::wait<tilescale::EQ, int>", *_tickets(stage), ticket, stage.limit() * PATIENCE, stage.record(), site
    )
    return stage.after_wait(stage.one_thread(tir.evaluate(wait)))


def _pass(stage: DeviceStage) -> ir.Stmt:
    """Pass the slot on to the next program; the last one resets it for the next call."""
    number, following = stage.program_number(), ir.IntImm("int32", stage.window)
    is_last = number + following >= math.prod(stage.grid())
    ticket = ir.Cast("int64", ir.Select(is_last, ir.IntImm("int32", 0), number // stage.window + 1))
    site = stage.site("passing on its slot in the workspace of collectives")
    passed = tir.extern("tilescale::signal<1, int>", *_tickets(stage), ticket, stage.record(), site)
    return published(stage, tir.evaluate(passed))
