# SPDX-License-Identifier: MIT
"""Assign the statements of a grid phase to the producer, which loads, and to the threads that compute.

Why: stock TileLang gives a pipelined loop a producer of its own, which is what makes it fast, but knows nothing of
waits: it would load ahead of them, so by default a phase with waits has no producer. Before: waits before and inside
a pipelined loop, copies from peers in it, signals and copies to peers after it. After: the same statements, waits that
gate the loop's loads as its first statements (`if k == 0: wait`, by the warp that issues the loads), which TileLang
moves into the producer together with the loads; everything after the loop belongs to the other threads. Copies from
peers among the loads are bulk copies, even where loads by threads would take less for one alone: several are under way.
Declines what it cannot prove right, with the reason as a note: the phase then keeps one role, and the loop loads in the
order of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tilelang_core import ir, specialise, tl
from tilelang_core import rewrite as tir
from tilelang_core.tiles import data_of
from tilescale.backends.tilelang.lowering.deferred_stores import DeferredStores, flush
from tilescale.backends.tilelang.lowering.markers import BY_PRODUCER, by_producer
from tilescale.backends.tilelang.lowering.phase import Phase, RolePhase
from tilescale.backends.tilelang.lowering.reach import BULK
from tilescale.backends.tilelang.lowering.role_graph.epilogue import LoopEpilogue, ending, narrowed
from tilescale.backends.tilelang.lowering.role_graph.gates import in_first_iteration, is_lasting, waits_in
from tilescale.backends.tilelang.lowering.role_graph.graph import COMMUNICATE, COMPUTE, LOAD, Channel, Role, RoleGraph
from tilescale.backends.tilelang.lowering.role_graph.loads import ProducerLoad
from tilescale.backends.tilelang.lowering.send_pipeline import SendPipelines
from tilescale.backends.tilelang.lowering.statements import (
    acquires,
    flat,
    in_device_memory,
    is_fill,
    is_movable,
    is_pipelined,
    is_region,
    is_scalar,
    is_setting,
    is_wait,
    loads_registers,
    orders,
    reads_memory,
    tiles_named,
)
from tilescale.backends.tilelang.ptx import WARP
from tilescale.passes.declined import Declined
from tilescale.passes.structure import location
from tilescale.program import ops
from tilescale.program.dependence import Dependence
from tilescale.program.footprint import stages_of
from tilescale.program.model import Launch


def assign(phase: Phase, has_epilogue_role: bool = True) -> RolePhase:
    """The roles of a phase's statements. `has_epilogue_role`: whether a dedicated role may execute the epilogue while
    the consumers compute the next iteration."""
    elects = _RolePhase(phase).elects
    machine = phase.target.machine
    is_bulk = lambda call: phase.choice(call).name == BULK  # noqa: E731
    senders = SendPipelines(is_bulk, machine.capacity(machine.layer_for("shared").name) if elects else 0)
    roles = _RolePhase(replace(phase, stmt=senders.phase(phase.stmt)), has_epilogue_role).roles()
    graph = replace(roles.graph, channels=(*roles.graph.channels, *senders.channels))
    rings = [tile for channel in senders.channels for tile in channel.tiles]
    return replace(roles, elects=elects, tiles=(*roles.tiles, *rings), graph=graph)


def without_single_trips(stmt: ir.Stmt, launch: Launch) -> ir.Stmt:
    """A phase without the loops around pipelined ones, or copies to peers, that every program executes once."""
    ranges = {var: (0, n) for var, n in zip(launch.programs, launch.grid, strict=True) if ir.constant(n) is not None}

    def leave(node: ir.Node) -> Any:
        is_outer = isinstance(node, ir.For) and node.kind == ir.ForKind.SERIAL and not is_pipelined(node)
        if not is_outer or not ir.contains(node.body, lambda n: is_pipelined(n) or ir.op_name(n) == ops.COPY.name):
            return None
        if not ir.proves(ir.EQ(node.extent, 1), ranges):
            return None
        return ir.substitute(node.body, {node.loop_var: node.min})

    return tir.rewrite(stmt, leave=leave)


@dataclass(frozen=True)
class _RolePhase:
    phase: Phase
    has_epilogue_role: bool = True

    def roles(self) -> RolePhase:
        """The roles of its loop, or of a loop around it, if it has an asynchronous order."""
        loops = ir.nodes(self.phase.stmt, is_pipelined)
        has_order = ir.contains(self.phase.stmt, orders)
        if not loops or not self.is_uniform or not (has_order or self._repeats(loops[0])):
            return RolePhase(self.phase.stmt)
        try:
            return self._specialised(loops)
        except Declined as reason:
            return RolePhase.declined(self.phase.stmt, str(reason)) if has_order else RolePhase(self.phase.stmt)

    def _repeats(self, loop: ir.For) -> bool:
        def is_around(node: ir.Node) -> bool:
            is_serial = isinstance(node, ir.For) and node.kind == ir.ForKind.SERIAL
            return is_serial and not node.same_as(loop) and ir.contains(node.body, lambda n: n.same_as(loop))

        return ir.contains(self.phase.stmt, is_around)

    def _specialised(self, loops: Sequence[ir.For]) -> RolePhase:
        if not self.phase.target.machine.has("warp-specialization"):
            raise Declined(f"{self.phase.target.machine.name} has no warp specialisation")
        if len(loops) > 1:
            raise Declined(f"the phase has {len(loops)} such loops")
        return _LoopPath(self, loops[0]).roles()

    @property
    def elects(self) -> bool:
        """Whether one thread, the same each time, issues all bulk stores."""
        return self.phase.target.machine.has("tma") and self.is_uniform and self.phase.launch.thread_count % WARP == 0

    @cached_property
    def blocks(self) -> int:
        """Number of programs of an SM, as the user says: stock TileLang's register counts are for one."""
        notes = [note for note in ir.instances(self.phase.stmt, ir.AttrStmt) if str(note.attr_key) == tl.MIN_BLOCKS]
        return ir.integer(notes[-1].value) if notes else 1

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all threads of a program execute all of its statements together."""
        if self.phase.launch.cluster_size > 1 or self.phase.launch.threads[1:] != (1, 1):
            return False
        threads = {var for var, _ in self.phase.launch.thread_vars}
        return not ir.contains(self.phase.stmt, lambda n: self._is_finer(n) or isinstance(n, ir.Var) and n in threads)

    def _is_finer(self, node: object) -> bool:
        """Whether a node is a region of units inside the program."""
        if not isinstance(node, ir.AttrStmt) or str(node.attr_key) != ops.SCALE:
            return False
        return self.phase.target.machine.level(str(node.value.value)).kind == "thread_group"

    @cached_property
    def order(self) -> Dependence:
        return Dependence(self.phase.program, self.phase.target.machine)

    def canonical(self, data: set[ir.Var]) -> set[ir.Var]:
        return {self.phase.parameters_of_views.get(var, var) for var in data}


class _LoopPath:
    """The path from a phase down to its pipelined loop, and the statements next to it.

    Attributes:
        gates: the waits in the loop.
        around: the outermost loop around it.
        taken: the condition under which a program reaches it, if it is in one of two arms.
        left: the deferred operations at the end of its body.
        end: its epilogue, where a collective may overlap the next iteration.
        early: tensors that an iteration of the enclosing loop loads into registers at its begin.
    """

    def __init__(self, whole: _RolePhase, loop: ir.For):
        self.whole, self.phase, self.loop = whole, whole.phase, loop
        self.gates: list[ir.Stmt] = []
        self.around: ir.For | None = None
        self.taken: ir.PrimExpr | None = None
        self.left = DeferredStores(signals=True)
        self.end = LoopEpilogue([])
        self.early: set[ir.Var] = set()
        self._ends_alone = True

    def roles(self) -> RolePhase:
        """The roles, or the reason why there are none."""
        loads = self._check_body()
        own, pulled = (
            self.whole.canonical({data_of(load.source) for load in loads if load.is_far == is_far})
            for is_far in (False, True)
        )
        stmt = self._statement(self.phase.stmt)
        if self.around is not None:
            self._check_ahead(own | pulled | self.early)
        gates = sum(len(waits_in(gate)) for gate in self.gates)
        tiles = [load.tile for load in loads]
        near, far, depth = frozenset(own), frozenset(pulled), stages_of(self.loop)
        graph = self._graph(Channel("tiles", tiles, depth, gates=gates, near=near, far=far))
        if self.around is None and (gates or self.whole.blocks > 1):
            graph = graph.with_registers(self.phase.target.machine, self.whole.blocks)
            compute, load = graph.roles
            stmt = tir.sequence([specialise.registers(load.registers, compute.registers), stmt])
        end, kept = self.end, tuple(self.left.kept)
        notes = (end.note,) if end.note else ()
        return RolePhase(stmt, graph, kept=kept, tiles=end.tiles, early=bool(self.early), notes=notes)

    def _graph(self, channel: Channel) -> RoleGraph:
        loading = specialise.PRODUCER_THREADS - self.end.threads % specialise.PRODUCER_THREADS
        roles = (Role(COMPUTE, self.phase.launch.thread_count), Role(LOAD, loading))
        if self.end.results is None:
            late = (self.left.channel(),) if self.left.is_open else ()
            return RoleGraph(roles, (channel, *late), is_stock=True)
        epilogue = Role(self.end.results.consumer, self.end.threads)
        return RoleGraph((*roles, epilogue), (channel, self.end.results), is_stock=True)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _check_body(self) -> list[ProducerLoad]:
        """The loads of the loop; leading waits become gates, and copies from peers bulk copies where they can."""
        self.body = flat(self.loop.body)
        while self.body and is_wait(self.body[0]):
            if not is_movable(self.body[0]):
                raise Declined("a wait in it depends on a variable that changes")
            self.gates.append(by_producer(self.body.pop(0)))
        made = [(ProducerLoad.of(s, self.phase), s) for s in self.body]
        self.body = [s if load is None or not load.is_far else tir.at(ir.Evaluate(load.call), s) for load, s in made]
        loads = [load for load, _ in made if load is not None]
        rest = [s for load, s in made if load is None]
        if any(ir.contains(s, orders) for s in rest):
            raise Declined("it waits, signals or copies to peers after its first load")
        if not loads:
            raise Declined("it loads nothing into shared memory")
        if any(in_device_memory(s) for s in rest):
            raise Declined("threads that compute read or write device memory in it")
        if {load.tile for load in loads} & tiles_named(self.phase.stmt, besides=self.loop):
            raise Declined("a tile that it loads is used outside it too")
        return loads

    def _gated(self) -> ir.Stmt:
        loop, body = self.loop, tir.sequence([*self.gates, *self.body])
        trips = loop.extent if self.around is not None else self._trip_count(loop.extent)
        return tir.relooped(loop, extent=trips, body=body)

    # -- around it ---------------------------------------------------------------------------------------------------

    def _statement(self, stmt: ir.Stmt) -> ir.Stmt:
        if isinstance(stmt, ir.IfThenElse):
            return self._branch(stmt)
        if isinstance(stmt, ir.For) and (stmt.same_as(self.loop) or stmt.kind == ir.ForKind.SERIAL):
            return self._list([stmt]) if stmt.same_as(self.loop) else self._repeated(stmt)
        if isinstance(stmt, ir.SeqStmt) or is_region(stmt):
            return self._list(flat(stmt))
        if isinstance(stmt, ir.AttrStmt):
            return ir.AttrStmt(stmt.node, stmt.attr_key, stmt.value, self._statement(stmt.body))
        raise Declined("it stands in a loop that is not serial")

    def _branch(self, stmt: ir.IfThenElse) -> ir.Stmt:
        """A branch with the loop in one arm.

        TileLang gives statements of the other arm to all threads, the producer's too. So the branches come after the
        loop (or the enclosing one), whose trip count is 0 for programs of the other arm.
        """
        if stmt.else_case is None:
            return tir.at(ir.IfThenElse(stmt.condition, self._statement(stmt.then_case), None), stmt)
        if self.taken is not None or self.around is not None or not is_movable(ir.Evaluate(stmt.condition)):
            raise Declined("it stands in one arm of a branch inside another one, a loop, or on what changes")
        is_then = self._has(stmt.then_case)
        self.taken = stmt.condition if is_then else ir.Not(stmt.condition)
        before, inner, after = self._parts(flat(stmt.then_case if is_then else stmt.else_case))
        if any(not is_scalar(s) and not is_fill(s) for s in before) or not isinstance(flat(inner)[0], ir.For):
            raise Declined("the arm of a branch that has it begins with something else")
        arms = [(self.taken, tir.sequence(after)), (ir.Not(self.taken), stmt.else_case if is_then else stmt.then_case)]
        # One after the other, not two arms of one branch: their tiles can then lie in the same place.
        rest = [tir.at(ir.IfThenElse(taken, arm, None), stmt) for taken, arm in arms if not tir.is_nothing(arm)]
        return tir.sequence([*before, inner, *rest])

    def _trip_count(self, extent: ir.PrimExpr) -> ir.PrimExpr:
        """Trip count of the outermost loop: 0 in blocks that take the other branch."""
        if self.taken is None:
            return extent
        return ir.Select(self.taken, extent, ir.IntImm(str(extent.dtype), 0))

    def _repeated(self, stmt: ir.For) -> ir.Stmt:
        """A loop around it: after its last iteration, deferred operations are completed."""
        is_outermost = self.around is None
        self.around = self.around or stmt
        body = self._statement(stmt.body)
        trips = self._trip_count(stmt.extent) if is_outermost else stmt.extent
        made = tir.relooped(stmt, extent=trips, body=body, annotations={})
        self.around = made
        return tir.sequence([made, flush()]) if is_outermost and self.left.is_open else made

    def _has(self, stmt: ir.Stmt) -> bool:
        return ir.contains(stmt, lambda n: isinstance(n, ir.For) and n.same_as(self.loop))

    def _list(self, stmts: list[ir.Stmt]) -> ir.Stmt:
        before, inner, after = self._parts(stmts)
        return tir.sequence([*before, inner, *after])

    def _parts(self, stmts: list[ir.Stmt]) -> tuple[list[ir.Stmt], ir.Stmt, list[ir.Stmt]]:
        """The statements before the loop in a list, the one that is or contains it, and those after."""
        at = next(i for i, s in enumerate(stmts) if self._has(s))
        before, after = stmts[:at], stmts[at + 1 :]
        is_loop = stmts[at].same_as(self.loop)
        for stmt in before:
            # TileLang would set again in each iteration what a branch sets before an enclosing loop.
            is_of_iteration = is_loop and (is_fill(stmt) or self.around is not None and self._is_early(stmt))
            if not (is_wait(stmt) or is_scalar(stmt) or is_setting(stmt) or is_of_iteration):
                where = location(stmt)
                place = f" (line {where.line})" if where is not None else ""
                raise Declined(f"more than waits, scalars and fills stands before it{place}")
        if is_loop and ir.proves(ir.GE(self.loop.extent, 1), {}):
            before = self._sink(before)
        if self.around is not None:
            self._ends_alone = self._ends_alone and (is_loop or not after)
            self.left.signals = self.left.signals and not self.gates and not any(is_wait(s) for s in before)
        if is_loop and self.around is not None and self._ends_alone and self.whole.elects:
            after = self._ended(self.around, after)
        return before, self._gated() if is_loop else self._statement(stmts[at]), after

    def _is_early(self, stmt: ir.Stmt) -> bool:
        """Whether a statement loads registers for the epilogue, before the iteration's loop."""
        if loads_registers(stmt):
            reads = self.whole.order.names.all_effects(stmt).reads
            self.early |= {a.root for a in reads}
        return loads_registers(stmt)

    def _ended(self, around: ir.For, last: list[ir.Stmt]) -> list[ir.Stmt]:
        """The epilogue: concurrent with the next iteration, or deferred to it."""
        own = self.phase.launch.thread_count + specialise.PRODUCER_THREADS
        self.end = ending(self.phase.stmt, around, last, self.whole.order, own, self.whole.has_epilogue_role)
        if self.end.results is None:
            return self.left.end(last)
        if self.end.results.consumer == COMMUNICATE:
            self.body = list(map(narrowed, self.body))
        return self.end.stmts

    def _sink(self, before: list[ir.Stmt]) -> list[ir.Stmt]:
        """The statements that stay before the loop when waits without later readers have moved into it.

        Statements after a wait are after the first iteration of a loop with the wait: the consumers begin it when the
        producer, which waited, has loaded it.
        """
        stay: list[ir.Stmt] = []
        for position, stmt in reversed(list(enumerate(before))):
            if is_wait(stmt) and is_movable(stmt):
                self.gates.insert(0, by_producer(in_first_iteration(self.loop, stmt)))
            elif is_wait(stmt) or reads_memory(stmt) or loads_registers(stmt):
                return [*before[: position + 1], *reversed(stay)]
            else:
                stay.append(stmt)
        return list(reversed(stay))

    def _check_ahead(self, loaded: set[ir.Var]) -> None:
        """Check that the producer may begin the next iteration of an enclosing loop while the consumers finish this
        one."""
        order = self.whole.order
        effects = order.names.all_effects(self.around)
        tensors = {order.names.root(data) for data in loaded}
        if effects.opaque or tensors & {access.root for access in effects.writes}:
            raise Declined("the enclosing loop writes the source of its loads")
        waits = ir.nodes(self.around, lambda node: acquires(node) and not ir.attribute(node, BY_PRODUCER))
        if any(order.gates(wait, tensor) for wait in waits for tensor in tensors):
            raise Declined("the enclosing loop has a wait that may order its loads")
        whole = order.names.all_effects(self.phase.stmt)
        if not all(is_lasting(order, wait, whole) for gate in self.gates for wait in waits_in(gate)):
            raise Declined("the program changes a flag for which it waits, and the wait would come too early")
