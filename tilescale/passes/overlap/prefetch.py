# SPDX-License-Identifier: MIT
"""all_gather at the begin of a layer of a loop -> gathered one layer ahead, into the other one of two buffers.

Why: in program order, a loop that gathers the weights of each layer and then computes with them leaves its links idle
while it computes. Before: a loop of known trip count whose iterations begin with an all-gather into a workspace that
their grids read. After: two buffers. The first layer's gather is started in front of the loop; each iteration starts
the one of the next layer on the copy queue, and waits for its own. A barrier at the position of the gather keeps its
order, and guarantees that all units have read the buffer of the next layer. Declines results that are read elsewhere or
are arguments, and sources that are written in the loop or after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilelang_core import ir, tiles, tl
from tilelang_core import rewrite as tir
from tilelang_core.trace import call
from tilescale.passes.declined import Declined
from tilescale.passes.overlap.access_maps import AccessMaps, TensorUse
from tilescale.passes.overlap.arrival_reduce import copy
from tilescale.passes.overlap.chunks import flag, put, signal
from tilescale.passes.overlap.estimate import RowTransport, in_order
from tilescale.passes.overlap.gather import rows_of
from tilescale.passes.overlap.legality import CollectiveSite
from tilescale.passes.overlap.loop_context import LoopContext, grids_of
from tilescale.passes.overlap.partition import Partition
from tilescale.passes.overlap.rewriter import LaunchRewriter, bound, located, rank_of
from tilescale.passes.overlap.schedule import Move
from tilescale.passes.overlap.tile_cost import TileWork
from tilescale.program.dependence import Dependence, ProgramStep
from tilescale.program.model import Control, DevicePhase, GridPhase, Part, Sequence, location
from tilescale.program.ops import BARRIER, WAIT

PLACES = 2
"""Buffers: one that is computed with, one that the next layer arrives in."""


@dataclass(frozen=True)
class _PrefetchedGather:
    """A gather in a loop.

    Attributes:
        context: its loop context.
        rows: how the rows of its result are counted.
    """

    site: CollectiveSite
    uses: AccessMaps
    context: LoopContext
    rows: Partition

    @property
    def layer(self) -> ir.Var:
        return self.context.variables[0]

    @property
    def count(self) -> int:
        return self.context.extents[0]


def overlap_prefetch(
    site: CollectiveSite, mine: ProgramStep, graph: Dependence, uses: AccessMaps, move: Move
) -> ir.PrimFunc:
    """The program in which a gather of a loop runs one iteration ahead; `move` records the choice. Raises Declined: it
    stays unchanged."""
    found = _found(site, mine, uses)
    _check_source(found, mine, graph)
    _check_result(found, mine, graph)
    if not uses.symbolic:
        _estimate(found, move)
    move.ordered, move.why = False, "gathered one iteration of its loop ahead, into the other one of two buffers"
    return _rewritten(found)


def _found(site: CollectiveSite, mine: ProgramStep, uses: AccessMaps) -> _PrefetchedGather:
    """The gather and its loop. Raises Declined where it has another form."""
    where = location(site.stmt)
    if not mine.on_device:
        raise Declined("no engine executes copies concurrently with the programs", where)
    if site.made.impl is not None:
        raise Declined(f"impl={site.made.impl!r} was requested", where)
    context = LoopContext.of(site.phase, site.launch, where)
    if len(context.loops) != 1 or context.conditions or not context.is_first:
        raise Declined("it does not begin the iterations of one loop", where)
    if context.extents[0] < PLACES:
        raise Declined("its loop has one iteration only", where)
    if not any(grids_of(part) for part in context.behind):
        raise Declined("no grid follows it in its loop", where)
    return _PrefetchedGather(site, uses, context, rows_of(site, uses))


# -- legality ----------------------------------------------------------------------------------------------------------


def _check_source(found: _PrefetchedGather, mine: ProgramStep, graph: Dependence) -> None:
    """Raise Declined if the source may be written once the loop has begun."""
    source = graph.names.root(ir.region_parts(found.site.made.source)[0].data)
    loop = found.context.loops[0].stmt
    for step in graph.steps:
        inside = any(around.same_as(loop) for around in step.loops)
        if step.effects.opaque and inside:
            raise Declined("an external function may access its tensors", location(step.stmt))
        if (inside or step.number > mine.number) and any(a.root.same_as(source) for a in step.effects.writes):
            raise Declined("what it sends is written while it may be in flight", location(step.stmt))


def _check_result(found: _PrefetchedGather, mine: ProgramStep, graph: Dependence) -> None:
    """Raise Declined unless the result is a workspace that only grids of the same iteration read."""
    whole = found.rows.buffer
    root, loop = graph.names.root(whole.data), found.context.loops[0].stmt
    if any(p.buffer is not None and p.buffer.data.same_as(root) for p in found.uses.program.parameters):
        raise Declined(f"its result {whole.name!r} is an argument: gather into T.alloc(..., level=) of device memory")
    for step in graph.steps:
        touching = [a for a in step.effects.accesses if a.root.same_as(root)]
        if step is mine or not touching:
            continue
        inside = any(around.same_as(loop) for around in step.loops)
        if not inside or step.number < mine.number or not isinstance(step.phase, GridPhase):
            raise Declined("its result is used outside of the grids behind it", location(step.stmt))
        if any(a.writes or a.at is not None or a.begins is None for a in touching):
            raise Declined("its result is written, viewed or reached by others", location(step.stmt))


# -- the choice --------------------------------------------------------------------------------------------------------


def _estimate(found: _PrefetchedGather, move: Move) -> None:
    """Record the estimate in the move. Raises Declined if nothing moves data while programs run."""
    site, uses, rows = found.site, found.uses, found.rows
    travel = RowTransport.of(site, uses, rows.parts, rows.height)
    arriving = travel.queue.startup + (rows.parts - 1) * travel.sending(rows.height) + travel.keeping(rows.height)
    nothing = ir.IntImm("int32", 0)
    grids = [grid for part in (*found.context.before, *found.context.behind) for grid in _grids(part)]
    whole = [TensorUse(grid, site.launch, rows, (grid.stmt,), nothing, nothing, ()) for grid in grids]
    work = sum(TileWork.of(use, uses, site.made.level).seconds for use in whole)
    barrier = travel.network.latency + uses.machine.tensor_level.launch
    move.in_order_s = found.count * in_order(site, uses, work)
    move.overlapped_s = travel.beginning + arriving + found.count * (max(work, arriving) + barrier)


def _grids(part: Part) -> list[GridPhase]:
    """The grids among some parts, at any depth."""
    if isinstance(part, GridPhase):
        return [part]
    return [grid for inner in part.parts for grid in _grids(inner)] if isinstance(part, Sequence | Control) else []


# -- the program -------------------------------------------------------------------------------------------------------


def _rewritten(found: _PrefetchedGather) -> ir.PrimFunc:
    site, context, rows = found.site, found.context, found.rows
    rewriter = LaunchRewriter(found.uses.program, site.launch, found.uses.machine)
    buffers = rewriter.alloc(f"{rows.buffer.name}_ahead", (PLACES, *rows.buffer.shape), str(rows.buffer.dtype))
    here = rewriter.alloc_flags(f"{rows.buffer.name}_here", (found.count, rows.parts))
    started = context.elsewhere(tir.sequence(located(_started(found, buffers, here), site.stmt)))
    first, following = ir.IntImm("int32", 0), ir.simplify(found.layer + 1, {})
    again = tir.renamed(ir.substitute(started, {found.layer: following}))
    awaited = tir.region(here, [found.layer, 0], [1, rows.parts], "rw")
    ordered = [
        tir.evaluate(call(BARRIER, level=site.made.level)),
        ir.IfThenElse(following < found.count, again, None),
        tir.evaluate(call(WAIT, awaited, ir.IntImm("int32", 1), compare=">=")),
    ]
    rewriter.statements.append((site.stmt, tir.sequence(located(ordered, site.stmt))))
    mine = DevicePhase(rewriter.statement(site.phase.stmt))
    behind = [_reading(part, rows.buffer, buffers, found.layer % PLACES) for part in context.behind]
    loop = Control(context.loops[0].stmt, (Sequence((*context.before, mine, *behind)),))
    begun = DevicePhase(_simplified(tir.renamed(ir.substitute(started, {found.layer: first}))))
    rewriter.phases.append((context.loops[0], (begun, loop)))
    return rewriter.apply()


def _simplified(stmt: ir.Stmt) -> ir.Stmt:
    """A statement whose indices are as short as they can be."""

    def leave(node: ir.Node) -> Any:
        if isinstance(node, ir.BufferLoad):
            return ir.BufferLoad(node.buffer, [ir.simplify(index, {}) for index in node.indices])
        return None

    return tir.rewrite(stmt, leave=leave)


def _started(found: _PrefetchedGather, buffers: ir.Buffer, here: ir.Buffer) -> list[ir.Stmt]:
    """A gather that is only started: the part of this unit goes to the others, the next one first, and into its own
    buffer."""
    made, rows, layer = found.site.made, found.rows, found.layer
    place = layer % PLACES
    rank, rank_is = rank_of(made.level)
    step = ir.Var("step", "int32")
    peer, peer_is = bound("peer", (rank + 1 + step) % rows.parts)
    mine = rows.region(rank, 0, rows.height, "w")
    sent = put(made.level, made.source, _placed(mine, buffers, place), peer, flag(here, layer, rank))
    to_others = ir.For(step, 0, rows.parts - 1, ir.ForKind.SERIAL, tir.sequence([peer_is, sent]))
    return [rank_is, to_others, copy(made.source, _placed(mine, buffers, place)), signal(here, layer, rank)]


def _placed(region: ir.Call, buffers: ir.Buffer, place: Any) -> ir.Call:
    _, begins, extents = ir.region_parts(region)
    return tir.region(buffers, [place, *begins], [1, *extents], tiles.access_of(region))


def _reading(part: Part, whole: ir.Buffer, buffers: ir.Buffer, place: ir.PrimExpr) -> Part:
    """A part of the program that reads a buffer in the place of the result."""
    if isinstance(part, Sequence):
        return Sequence(tuple(_reading(inner, whole, buffers, place) for inner in part.parts))
    if isinstance(part, Control):
        return Control(part.stmt, tuple(_reading(inner, whole, buffers, place) for inner in part.parts))

    def leave(node: ir.Node) -> Any:
        if isinstance(node, ir.BufferLoad) and node.buffer.data.same_as(whole.data):
            return ir.BufferLoad(buffers, [place, *node.indices])
        load = ir.loaded_element(node) if ir.op_name(node) == tl.REGION else None
        if load is not None and load.buffer.data.same_as(buffers.data):
            access, extents = ir.region_in(node, load)
            return tir.recall(node, [load, access, *([1] if len(extents) < len(load.indices) else []), *extents])
        return None

    assert isinstance(part, DevicePhase | GridPhase)
    stmt = tir.rewrite(part.stmt, leave=leave)
    return DevicePhase(stmt) if isinstance(part, DevicePhase) else GridPhase(stmt)
