# SPDX-License-Identifier: MIT
"""The stage of roles: whether stock TileLang gives the loop of a phase a producer though its statements have an order.

`role_assignment.py` proposes which waits and loads are the producer's. In a persistent loop `persistent_ws.py` says so.
Elsewhere TileLang is to find them, and whether it moves exactly these is known once the phase is lowered, so that is
asked here: where it does not, the phase keeps one role. Phases whose threads or programs take branches of their own
always do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilelang_core import ir, specialise
from tilelang_core import rewrite as tir
from tilescale.backends.base import generator
from tilescale.backends.tilelang.lowering.kernel import LoweredKernel
from tilescale.backends.tilelang.lowering.kernel import lower as kernel
from tilescale.backends.tilelang.lowering.markers import is_gate
from tilescale.backends.tilelang.lowering.phase import Phase, RolePhase
from tilescale.backends.tilelang.lowering.role_graph import persistent_ws
from tilescale.backends.tilelang.lowering.role_graph.graph import RoleGraph
from tilescale.backends.tilelang.lowering.role_graph.role_assignment import assign
from tilescale.backends.tilelang.lowering.statements import in_order, is_pipelined, must_keep_order, orders


def lower(phase: Phase, rest: Callable[[Phase], Phase]) -> LoweredKernel:
    """A phase in roles, as a kernel; `rest` are the stages between."""
    for has_epilogue_role in (True, False):
        proposal = proposed(phase, has_epilogue_role)
        lowered = rest(proposal)
        made = kernel(lowered)
        if not proposal.graph.is_stock:
            return made
        if not lowered.ordered and (agreed := _agreed(lowered, made)):
            return agreed
        if not proposal.graph.has_epilogue:
            break
    if not ir.contains(phase.stmt, orders):
        return kernel(rest(_with(phase, RolePhase(phase.stmt))))
    reason = "stock TileLang would not move all its loads and waits there"
    return kernel(rest(_with(phase, RolePhase.declined(phase.stmt, reason))))


def _agreed(phase: Phase, made: LoweredKernel) -> LoweredKernel | None:
    """A kernel whose roles are those that were proposed for it; None if TileLang would give it others."""
    machine = phase.target.machine
    graph = replace(phase.graph.with_registers(machine), is_persistent=True)
    func = persistent_ws.scheduled(made.func, graph, machine)
    if func is not None:
        return replace(made, func=func, notes=(*phase.notes, *graph.lines()))
    is_ours = phase.graph.has_epilogue or phase.roles.early
    return made if not is_ours and _fits(phase.graph, made.func, generator(machine).target(machine)) else None


def _fits(graph: RoleGraph, func: ir.PrimFunc, target: dict[str, str]) -> bool:
    """Whether stock TileLang puts all loads and gates of a lowered loop into its producer, and only those."""
    found: list[int] = []
    for branch in specialise.branches(func, target) or ():
        nodes = ir.nodes(branch)
        found += [sum(map(specialise.is_load, nodes)), sum(map(is_gate, nodes))]
    return found == [len(graph.channels[0].tiles), graph.channels[0].gates, 0, 0]


def proposed(phase: Phase, has_epilogue_role: bool = True) -> Phase:
    """A phase with the roles that it has if TileLang agrees. `has_epilogue_role`: whether the epilogue may overlap the
    next iteration."""
    if phase.ordered or phase.launch.cluster_size > 1:
        return _with(phase, RolePhase(phase.stmt))
    return _with(phase, assign(phase, has_epilogue_role))


def _with(phase: Phase, roles: RolePhase) -> Phase:
    """A phase in roles; without a producer, loops that must keep their order do."""
    own = (*roles.tiles, *(kept.variable for kept in roles.kept))
    stmt = roles.stmt if roles.graph.is_stock else _in_one_role(roles.stmt)
    notes = (*phase.notes, *roles.notes)
    graph = roles.graph if roles.graph.channels else phase.graph
    return replace(phase, stmt=stmt, tiles=(*phase.tiles, *own), notes=notes, graph=graph, roles=roles)


def _in_one_role(phase: ir.Stmt) -> ir.Stmt:
    def enter(node: ir.Node) -> ir.Stmt | None:
        if not is_pipelined(node) or not must_keep_order(node, phase):
            return None
        return in_order(node, tir.rewrite(node.body, enter=enter))

    return tir.rewrite(phase, enter=enter)
