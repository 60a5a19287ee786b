# SPDX-License-Identifier: MIT
"""Bulk loads that a program issues for a ring of tiles become those of a warp beyond its threads.

Before: a loop that waits for a stage of a ring by its mbarrier, uses the stage, and fills it again by `T.tma_copy`. Its
threads synchronize before the load. After: they arrive at a second mbarrier of the stage and go on. The producer runs
the same loops, waits for these arrivals, and loads. So loads do not wait for other statements of the program, nor do
those wait for loads. Declines loads of what the program has written, and waits for other devices: both order loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilelang_core.scalars import BarrierWait
from tilelang_core.tiles import TileCopy
from tilescale.backends.tilelang.lowering.markers import loading
from tilescale.backends.tilelang.lowering.phase import Phase, Stage
from tilescale.backends.tilelang.lowering.role_graph import mbarriers
from tilescale.backends.tilelang.lowering.role_graph.graph import Channel
from tilescale.backends.tilelang.lowering.role_graph.split import apart, producer_graph
from tilescale.backends.tilelang.ptx import WARP
from tilescale.passes.declined import Declined
from tilescale.passes.mod_analysis import device_flags
from tilescale.program import ops
from tilescale.program.effects import names_of, statements
from tilescale.program.model import Program

_OF_LOADS = (tl.TMA_COPY, tl.ARRIVE_BARRIER, tl.WAIT_BARRIER_PARITY)
"""Operations of statements that only load."""


def lower(phase: Phase) -> Phase:
    """A phase whose loads into rings are the producer's, where it can have one."""
    loads = [stmt for stmt in ir.statements(phase.stmt) if _is_load(stmt)]
    if not loads or phase.ordered or phase.groups is not None or phase.launch.cluster_size > 1:
        return phase
    names = names_of(phase.program)
    read = frozenset(a.root for load in loads for a in names.effects(load).reads if names.shared(a.root))
    late = read - set(dict(phase.launch.notes).get(ops.AHEAD, ()))
    if late & _written(phase.program) or set(names.all_effects(phase.stmt).flags) - device_flags(phase.program):
        return phase
    graph = producer_graph(phase.launch, phase.target.machine, phase.stmt, _has_loads)
    rings = _Rings(phase)
    try:
        body = rings.stmt(phase.stmt)
    except Declined:
        return phase
    if not graph.roles:
        return phase
    tiles = [ir.region_parts(TileCopy.of(load.value).target)[0] for load in loads]
    channels = [
        Channel("tiles", [tile], ir.integer(tile.shape[0]), near=read, is_free=True)
        for tile in {tile.data: tile for tile in tiles}.values()
    ]
    return rings.done(apart(body), graph=replace(graph, channels=tuple(channels)), ordered=True)


def _written(program: Program) -> set[ir.Var]:
    """The tensors that any unit writes, in any phase: a wait or a barrier may order loads of them."""
    names = names_of(program)
    return {access.root for stmt, _, _ in statements(program.body) for access in names.effects(stmt).writes}


class _Rings(Stage):
    """The walk over a phase. `empty`: data variable of the mbarriers of a ring's full stages -> those of its empty
    ones."""

    def __init__(self, phase: Phase):
        super().__init__(phase)
        self.empty: dict[ir.Var, ir.Buffer] = {}
        self._has_waited = False

    def stmt(self, stmt: ir.Stmt) -> ir.Stmt:
        """A statement whose loads are marked. Raises Declined for a load that follows no wait in its loop."""
        if _only_loads(stmt):
            if self._has_waited:
                raise Declined("a load into a stage that its loop does not wait for")
            return _of_a_warp(stmt)
        if isinstance(stmt, ir.SeqStmt):
            return tir.sequence(self._in_order(list(stmt.seq)))
        return tir.rewrite(stmt, enter=lambda node: None if node.same_as(stmt) else self._inside(node))

    def _inside(self, node: ir.Node) -> ir.Stmt | None:
        return self.stmt(node) if isinstance(node, ir.Stmt) and _has_loads(node) else None

    def _in_order(self, stmts: list[ir.Stmt]) -> list[ir.Stmt]:
        """Statements in order: each load is into the stage of the one wait since the loads before, or nothing waits."""
        found: list[ir.Stmt] = []
        waits: list[ir.Evaluate] = []
        while stmts:
            count = _leading_loads(stmts) if waits else 0
            loads, stmts = stmts[:count], stmts[count:]
            if loads:
                if len(waits) > 1 or _barriers(loads) != {_full(waits[0]).buffer.data}:
                    raise Declined("loads into other stages than the one that has been used")
                found += self._refilled(waits.pop(), loads)
                continue
            stmt, *stmts = stmts
            if _is_wait(stmt):
                waits.append(stmt)
                self._has_waited = True
            found.append(self.stmt(stmt) if _has_loads(stmt) else stmt)
        return found

    def _refilled(self, wait: ir.Evaluate, loads: list[ir.Stmt]) -> list[ir.Stmt]:
        """The threads release the stage that they have waited for, and the producer fills it when all have."""
        full, (stage,) = _full(wait).buffer, _full(wait).indices
        empty = self.empty.get(full.data)
        if empty is None:
            arrivals = [self.launch.thread_count] * ir.integer(full.shape[0])
            empty = self.empty[full.data] = self.mbarrier(f"{full.name}_empty", arrivals)
        refill = [mbarriers.wait(empty, stage, BarrierWait.of(wait.value).parity), *loads]
        return [mbarriers.arrive(empty, stage), _of_a_warp(tir.sequence(refill))]


def _leading_loads(stmts: Sequence[ir.Stmt]) -> int:
    """Number of loads at the begin, names between them included."""
    count = next((n for n, s in enumerate(stmts) if not isinstance(s, ir.Bind) and not _only_loads(s)), len(stmts))
    return next((n for n in range(count, 0, -1) if _only_loads(stmts[n - 1])), 0) if _only_loads(stmts[0]) else 0


def _full(wait: ir.Evaluate) -> ir.BufferLoad:
    """The barrier of the stage that a wait is for. Raises Declined where only its address is known."""
    barrier = BarrierWait.of(wait.value).barrier
    if not isinstance(barrier, ir.BufferLoad):
        raise Declined("a barrier by its address")
    return barrier


def _barriers(loads: list[ir.Stmt]) -> set[ir.Var]:
    copies = [stmt for load in loads for stmt in ir.statements(load) if _is_load(stmt)]
    return {copy.value.annotations["barrier"].buffer.data for copy in copies}


def _of_a_warp(stmt: ir.Stmt) -> ir.Stmt:
    """A statement of the producer, whose barriers one of its threads arrives at."""

    def leave(node: ir.Node) -> ir.PrimExpr | None:
        return tir.elected(WARP) if ir.op_name(node) == tl.ELECT else None

    return loading(tir.rewrite(stmt, leave=leave))


def _has_loads(stmt: ir.Stmt) -> bool:
    return ir.contains(stmt, _is_load)


def _is_wait(stmt: ir.Stmt) -> bool:
    return isinstance(stmt, ir.Evaluate) and ir.op_name(stmt.value) == tl.WAIT_BARRIER_PARITY


def _is_load(node: Any) -> bool:
    return isinstance(node, ir.Evaluate) and ir.op_name(node.value) == tl.TMA_COPY


def _only_loads(stmt: ir.Stmt) -> bool:
    """Whether a statement loads, and does nothing else."""
    leaves = [leaf for leaf in ir.statements(stmt) if isinstance(leaf, ir.Evaluate | ir.BufferStore)]
    return any(map(_is_load, leaves)) and all(
        isinstance(leaf, ir.Evaluate) and ir.op_name(leaf.value) in _OF_LOADS for leaf in leaves
    )
