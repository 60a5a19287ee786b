# SPDX-License-Identifier: MIT
"""The stage of roles: whether stock TileLang gives the loop of a phase a producer though its statements have an order.

`assignment.py` proposes which waits and loads are the producer's. In a persistent loop `persistent.py` says so.
Elsewhere TileLang is to find them, and whether it moves exactly these is known once the phase is lowered, so that is
asked here: where it does not, the phase keeps one role. Phases whose threads or programs take branches of their own
always do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.backends.cuda.lowering import persistent
from tilescale.backends.cuda.lowering.assignment import assign
from tilescale.backends.cuda.lowering.copies.peer_memory import ahead
from tilescale.backends.cuda.lowering.kernel import LoweredKernel
from tilescale.backends.cuda.lowering.kernel import lower as kernel
from tilescale.backends.cuda.lowering.phase import Phase
from tilescale.backends.cuda.lowering.reach import BULK
from tilescale.backends.cuda.lowering.roles import Roles, declined, fits
from tilescale.backends.cuda.lowering.statements import in_order, is_pipelined, must_keep_order, orders
from tilescale.backends.cuda.target import target_for


def lower(phase: Phase, rest: Callable[[Phase], Phase]) -> LoweredKernel:
    """A phase in roles, as a kernel; `rest` are the stages between."""
    for beside in (True, False):
        proposal = proposed(phase, beside)
        lowered = rest(proposal)
        made = kernel(lowered)
        if not proposal.roles.specialised:
            return made
        if not lowered.ordered and (agreed := _agreed(lowered, made)):
            return agreed
        if not proposal.roles.beside:
            break
    if not ir.contains(phase.stmt, orders):
        return kernel(rest(_with(phase, Roles(phase.stmt))))
    reason = "stock TileLang would not move all its loads and waits there"
    return kernel(rest(_with(phase, declined(phase.stmt, reason))))


def _agreed(phase: Phase, made: LoweredKernel) -> LoweredKernel | None:
    """A kernel whose roles are those that were proposed for it; None if TileLang would give it others."""
    machine = phase.target.machine
    func = persistent.scheduled(made.func, phase.launch.thread_count, machine)
    if func is not None:
        note = "the loop around T.Pipelined: warps keep their roles in all turns, a warpgroup only loads"
        return replace(made, func=func, notes=(*made.notes, note))
    is_ours = phase.roles.beside or phase.roles.early
    return made if not is_ours and fits(phase.roles, made.func, target_for(machine)) else None


def proposed(phase: Phase, beside: bool = True) -> Phase:
    """A phase with the roles that it has if TileLang agrees; `beside`: whether turns may end beside the next ones."""
    if phase.ordered or phase.launch.cluster_size > 1:
        return _with(phase, Roles(phase.stmt))
    is_bulk = lambda call: phase.choice(call).name == BULK  # noqa: E731
    where = phase.stmt, phase.program, phase.launch, phase.target.machine
    return _with(phase, assign(*where, is_bulk, lambda call: ahead(phase, call), beside))


def _with(phase: Phase, roles: Roles) -> Phase:
    """A phase in roles; without a producer, loops that must keep their order do."""
    own = (*roles.tiles, *(kept.variable for kept in roles.kept))
    stmt = roles.stmt if roles.specialised else _in_one_role(roles.stmt)
    notes = (*phase.notes, *roles.notes)
    return replace(phase, stmt=stmt, tiles=(*phase.tiles, *own), notes=notes, roles=roles)


def _in_one_role(phase: ir.Stmt) -> ir.Stmt:
    def enter(node: Any) -> ir.Stmt | None:
        if not is_pipelined(node) or not must_keep_order(node, phase):
            return None
        return in_order(node, tir.rewrite(node.body, enter=enter))

    return tir.rewrite(phase, enter=enter)
