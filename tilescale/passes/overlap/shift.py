# SPDX-License-Identifier: MIT
"""Shifts, copies of whole tensors to a peer, overlapped with grids: programs that go round a ring.

Why: in each step of such a loop a unit works on the part that it has, and sends it on; in program order, computation
and network alternate. Before: grids, then copies that a barrier ends; or, in a loop, first the copies. After: the
copies are started on the copy queue before the grids, each with a flag, and awaited at their old position. A loop that
begins with the copies is rotated: it issues those of its first iteration before the loop, and in each iteration those
of the next one. The barrier stays: after it each buffer may be written again. Declines grids that touch the target or
write the source, in any iteration of the loops around; peers of which one receives no part, or several; and other
statements that order units.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.cost.calibrated import in_force
from tilescale.cost.operations import network_of, region_bytes
from tilescale.errors import one
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.chunks import flag, put, wait
from tilescale.passes.overlap.legality import ShiftSite, synchronizes_programs
from tilescale.passes.overlap.loop_context import LoopContext
from tilescale.passes.overlap.partition import Partition
from tilescale.passes.overlap.rewriter import LaunchRewriter
from tilescale.passes.overlap.schedule import Move
from tilescale.passes.overlap.tile_cost import TileWork
from tilescale.program.dependence import Dependence, ProgramStep
from tilescale.program.grids import UnknownValue, grid_of
from tilescale.program.model import DevicePhase, location
from tilescale.program.operations import Barrier, operation
from tilescale.program.regions import BoundVariables, conflict


@dataclass(frozen=True)
class _SplitShift:
    """A shift that is taken out of its place.

    Attributes:
        context: its loop context, and the grids before it.
        before: barriers in front of the copies.
    """

    site: ShiftSite
    context: LoopContext
    before: tuple[ir.Stmt, ...]


def overlap_shift(
    site: ShiftSite, mine: ProgramStep, graph: Dependence, uses: AccessMaps, move: Move, own: set[ir.Var]
) -> ir.PrimFunc:
    """The program with a shift overlapped with the grids before it; `move` records the choice. Raises Declined: it
    stays unchanged. `own`: flags that overlapped collectives before it brought in."""
    if not mine.on_device:
        raise Declined(f"{one(graph.machine.tensor_level.name)} has no copy queue", location(site.stmt))
    shift = _found(site)
    _check_peers(shift, uses)
    _check_apart(shift, graph, own)
    if not uses.symbolic:
        _estimate(shift, uses, move)
    move.ordered, move.why = False, "the grid accesses no arriving rows, and writes none that are sent"
    return _started(shift, uses)


def _found(site: ShiftSite) -> _SplitShift:
    """The shift among its surrounding statements. Raises Declined if it has another form."""
    where = location(site.stmt)
    context = LoopContext.of(site.phase, site.launch, where)
    if not context.grids:
        raise Declined("no grid precedes it", where)
    if any(made.impl is not None for made in site.made):
        raise Declined("impl= was requested", where)
    before = tuple(itertools.takewhile(_is_barrier, context.stmts))
    count = len(before) + len(site.stmts)
    if not all(a.same_as(b) for a, b in zip(context.stmts[len(before) : count], site.stmts, strict=False)):
        raise Declined("other statements precede it in its phase", where)
    if len(context.stmts) == count or not _is_barrier(context.stmts[count]):
        raise Declined("no barrier follows it, so no unit knows when it has arrived", where)
    return _SplitShift(site, context, before)


def _is_barrier(stmt: ir.Stmt) -> bool:
    return isinstance(stmt, ir.Evaluate) and isinstance(operation(stmt.value), Barrier)


# -- legality ----------------------------------------------------------------------------------------------------------


def _check_peers(shift: _SplitShift, uses: AccessMaps) -> None:
    """Raise Declined unless in each iteration every unit receives one part, or no unit does."""
    where, level = location(shift.site.stmt), shift.site.made[0].level
    units = range(uses.sizes[level])
    phase, launch = DevicePhase(tir.sequence(shift.context.binds)), shift.site.launch
    grids = [grid_of(phase, launch, uses.machine, uses.sizes, uses.ranks(level, rank)) for rank in units]
    try:
        for at in shift.context.values():
            conditions = [[bool(g.value(c, at)) for c in shift.context.conditions] for g in grids if g is not None]
            if any(other != conditions[0] for other in conditions[1:]):
                raise Declined("only some units send", where)
            for made in shift.site.made:
                peers = sorted(int(np.asarray(g.value(made.peer, at))) for g in grids if g is not None)
                if all(conditions[0]) and peers != list(units):
                    raise Declined("some units are sent nothing, or several parts", where)
    except UnknownValue:
        raise Declined("the peers are known at launch only", where) from None


def _check_apart(shift: _SplitShift, graph: Dependence, own: set[ir.Var]) -> None:
    """Raise Declined unless the grids neither touch the target nor change the source, in any iteration."""
    names, launch = graph.names, shift.site.launch
    for phase in shift.context.grids:
        for stmt in ir.statements(phase.stmt):
            effects = names.effects(stmt)
            if effects.opaque:
                raise Declined("an external function may access its tensors", location(stmt))
            if synchronizes_programs(effects, graph.machine) or any(flag not in own for flag in effects.flags):
                raise Declined("programs of the grid order units", location(stmt))
    for at in shift.context.values():
        known = shift.context.known(at)
        copies = ir.substitute(tir.sequence(list(shift.site.stmts)), known)
        moved = names.all_effects(copies).accesses
        for phase in shift.context.grids:
            grid = ir.substitute(phase.stmt, known)
            inside = BoundVariables.of(grid, launch)
            for stmt in ir.statements(grid):
                if conflict(names.effects(stmt).accesses, inside, moved, BoundVariables.of(copies)):
                    iteration = "".join(f", where {var.name} is {value}" for var, value in at.items())
                    raise Declined(f"the grid accesses its tensors{iteration}", location(stmt))


# -- the choice --------------------------------------------------------------------------------------------------------


def _estimate(shift: _SplitShift, uses: AccessMaps, move: Move) -> None:
    """Record the estimate in the move. Raises Declined if nothing moves data while programs run."""
    in_order = overlapped = fork_and_join = 0.0
    for made in shift.site.made:
        network = network_of(made.call, in_force(uses.machine), uses.sizes)
        able = [m for m in network.mechanisms if m.put and not m.on_request] if network is not None else []
        queues = [m for m in able if m.started_by == "host"]
        if network is None or not queues:
            raise Declined(f"no mechanism of {uses.machine.name} moves data while programs run")
        nbytes = region_bytes(made.source) or 0
        in_order += network.latency + min(m.seconds(nbytes) for m in able)
        overlapped += network.latency + queues[0].seconds(nbytes)
        fork_and_join = queues[0].fork_and_join
    level, nothing = shift.site.made[0].level, ir.IntImm("int32", 0)
    launch, rows = shift.site.launch, Partition(ir.region_parts(shift.site.made[0].target)[0], 1, slots=False)
    whole = [TensorUse(phase, launch, rows, (phase.stmt,), nothing, nothing, ()) for phase in shift.context.grids]
    work = sum(TileWork.of(use, uses, level).seconds for use in whole)
    count = len(list(shift.context.values()))
    move.in_order_s = count * (work + in_order)
    move.overlapped_s = fork_and_join + count * max(work, overlapped)


# -- the program -------------------------------------------------------------------------------------------------------


def _started(shift: _SplitShift, uses: AccessMaps) -> ir.PrimFunc:
    """Started before the grids, awaited in its place."""
    context, launch = shift.context, shift.site.launch
    rewriter = LaunchRewriter(uses.program, launch, uses.machine)
    target = ir.region_parts(shift.site.made[0].target)[0].name.removesuffix("_view")
    here = rewriter.alloc_flags(f"{target}_here", (len(shift.site.stmts), *context.extents))
    puts, waits = [], []
    for number, (made, copied) in enumerate(zip(shift.site.made, shift.site.stmts, strict=True)):
        index = [number, *context.variables]
        puts.append(tir.at(put(made.level, made.source, made.target, made.peer, flag(here, *index)), copied))
        waits.append((copied, tir.at(wait(here, *index), copied)))
    started = DevicePhase(context.elsewhere(tir.sequence([*shift.before, *puts])))
    rewriter.statements += [*waits, *((barrier, tir.sequence([])) for barrier in shift.before)]
    rewriter.phases.append((context.before[0], (started, context.before[0])))
    return rewriter.apply()
