# SPDX-License-Identifier: MIT
"""Barriers that keep a unit's accesses to device and shared memory in statement order.

Why: a tile operation is one statement of its unit, so it sees the stores of the statement before, by any threads. Stock
TileLang synchronizes threads for shared memory alone, between loads and stores there but not between two stores nor
everywhere across the ends of branches and units, and waits for a bulk store until its source may be reused. Before: a
phase in which threads synchronize for tiles, signals and waits. After: the same with a barrier of the unit where a
statement accesses memory that other threads have accessed since the last barrier, and one of the two writes it. Before
the barrier bulk stores are completed, and after it bulk copies are ordered, where the two include such. A pipelined
loop that loads its own stores runs in order. Declines nothing: a thread-dependent branch counts as one statement, so
the program orders the accesses inside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tilelang_core import ir, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.arguments import Argument, CallerArgument, KernelWorkspace, PeerInstances
from tilescale.backends.tilelang.lowering.clusters.dsmem import BARRIER
from tilescale.backends.tilelang.lowering.groups.threads import ThreadNames
from tilescale.backends.tilelang.lowering.markers import SYNC, ExecutingThreads, is_loading, one_thread, sync
from tilescale.backends.tilelang.lowering.order_state import (
    AccessState,
    RequiredOrder,
    apart,
    completed,
    covers,
    fenced,
    merged,
    synced,
)
from tilescale.backends.tilelang.lowering.phase import Phase
from tilescale.backends.tilelang.lowering.statements import in_order, is_pipelined
from tilescale.backends.tilelang.lowering.thread_maps import PhaseBuffers, ThreadMap, of_condition
from tilescale.backends.tilelang.lowering.touches import EVERY, AccessCollector, AccessKey, MemoryAccess
from tilescale.passes.structure import location

_COMPLETES = ("tilescale::complete_stores", "tilescale::barrier", "tilescale::leave")
_ORDERS_ALL = ("tilescale::put", "tilescale::get", "tilescale::start_put")
"""Prefixes of names of device functions that complete bulk stores, and for which all threads synchronize."""


@dataclass(eq=False)
class _BarrierBefore(Exception):
    """A statement needs a barrier before it, or before the enclosing statement at a depth."""

    need: RequiredOrder
    depth: int


@dataclass(eq=False)
class _DependentIterations(Exception):
    """Iterations of a pipelined loop depend on one another, by an access at a depth."""

    depth: int


@dataclass(frozen=True)
class _StatementContext:
    """Context of a statement.

    Attributes:
        by: the threads that execute it.
        depth: number of enclosing loops, branches and units that can only be ordered from outside.
        unit: the depth at which the statements of those threads begin.
        apart: the depth from which on only some threads take part; None if all do.
        once: the map of accesses by a single thread, in a branch that selects it.
        before_if: in an `else`, the accesses before its `if`.
        pipelined: the depth of the outermost enclosing pipelined loop; None without one.
    """

    by: ExecutingThreads
    depth: int = 0
    unit: int = 0
    apart: int | None = None
    once: ThreadMap | None = None
    before_if: frozenset[AccessKey] = frozenset()
    pipelined: int | None = None

    @property
    def thread(self) -> Any:
        """The thread of an access whose index is the same in all threads; None if it may be any."""
        return EVERY if self.apart is None else self.once

    def place(self, earlier: MemoryAccess) -> int:
        """The depth at which a barrier can be inserted between an earlier access and this statement."""
        return max(earlier.depth, self.unit) if covers(self.by, earlier.by) else earlier.depth

    def is_behind(self, earlier: MemoryAccess) -> bool:
        """Whether a branch, with a barrier or in whose `else` this is, separates an earlier access from this."""
        return earlier.passed or earlier.key in self.before_if

    def inside(self, **changes: Any) -> _StatementContext:
        return replace(self, depth=self.depth + 1, **changes)


def lower(phase: Phase) -> Phase:
    """A phase in which each unit's accesses to memory are in order."""
    return _Hazards(phase).lowered()


@dataclass
class _Hazards:
    """The walk over the statements of a phase.

    Attributes:
        notes: the inserted barriers, by their first statement.
        loaded: tensors that are loaded at all.
        stored: tensors that are stored to before the current statement.
        running: program indices and loop variables so far, with their ranges.
        before: the statement before the current one in its block.
        ordered: whether a bulk load reads earlier stores: the producer warp may not issue it ahead.
    """

    phase: Phase
    notes: dict[ir.Stmt, str] = field(default_factory=dict)
    loaded: set[ir.Var] = field(default_factory=set)
    stored: set[ir.Var] = field(default_factory=set)
    running: dict[ir.Var, tuple[Any, Any]] = field(default_factory=dict)
    before: ir.Stmt | None = None
    ordered: bool = False

    def __post_init__(self) -> None:
        launch, signature = self.phase.launch, self.phase.signature
        assert signature is not None, "the stage of devices has found out what the kernel takes"
        pairs = zip(signature.parameters, signature.arguments, strict=True)
        tensors = {b.data: b for (_, b), argument in pairs if b is not None and not _is_ours(argument)}
        threads = {var: launch.threads[axis] for var, axis in launch.thread_vars if launch.threads[axis] > 1}
        zero = ir.IntImm("int32", 0)
        self.running = {var: (zero, count) for var, count in zip(launch.programs, launch.grid, strict=True)}
        self.names = ThreadNames(launch)
        everyone = ExecutingThreads(0, launch.thread_count)
        known = PhaseBuffers.of(self.phase.stmt, threads, everyone)
        self.touches = AccessCollector(known, self.phase.target.machine.has("tma"), tensors)
        whole = self.touches.of(self.phase.stmt, everyone, 0, None)
        self.loaded = {touch.access.root for touch in whole if touch.access.reads}

    def lowered(self) -> Phase:
        whole = _StatementContext(ExecutingThreads(0, self.phase.launch.thread_count))
        body, _ = self.block(self.phase.stmt, {}, whole)
        found = list(dict.fromkeys(self.notes[s] for s in ir.statements(body) if s in self.notes))
        notes = (*self.phase.notes, *found)
        return replace(self.phase, stmt=body, notes=notes, ordered=self.phase.ordered or self.ordered)

    # -- statements --------------------------------------------------------------------------------------------------

    def block(self, stmt: ir.Stmt, state: AccessState, at: _StatementContext) -> tuple[ir.Stmt, AccessState]:
        """Statements in order, with the inserted barriers."""
        made: list[ir.Stmt] = []
        stmts = list(stmt.seq) if isinstance(stmt, ir.SeqStmt) else [stmt]
        for before, inner in zip((None, *stmts), stmts, strict=False):
            self.before = before
            while True:
                try:
                    new, after = self._statement(inner, state, at)
                    break
                except _BarrierBefore as found:
                    if found.depth < at.depth:
                        raise
                    made.append(self._between(found.need, inner))
                    before, state = state, found.need.applied(state, at.by)
                    assert state != before, "a barrier here orders what needs it"
            made.append(new)
            state = after
        is_same = len(made) == len(stmts) and all(a is b for a, b in zip(made, stmts, strict=True))
        return (stmt if is_same else tir.sequence(made)), state

    def _statement(self, stmt: ir.Stmt, state: AccessState, at: _StatementContext) -> tuple[ir.Stmt, AccessState]:
        if isinstance(stmt, ir.SeqStmt):
            return self.block(stmt, state, at)
        if isinstance(stmt, ir.IfThenElse):
            return self._branch(stmt, state, at)
        if isinstance(stmt, ir.While) or isinstance(stmt, ir.For) and stmt.kind != ir.ForKind.PARALLEL:
            return self._loop(stmt, state, at)
        if isinstance(stmt, ir.AttrStmt):
            return self._marked(stmt, state, at)
        if isinstance(stmt, ir.Bind):
            self.names.note(stmt)
        if at.apart is None and at.by.threads > 1 and self.touches.updates(stmt):
            alone = one_thread(self.phase.launch, stmt, at.by.begin)
            self.notes[stmt] = f"{self._line('the update', stmt)} of an element of {stmt.buffer.name}: by one thread"
            return self._branch(tir.at(alone, stmt), state, at)
        return stmt, self._leaf(stmt, state, at)

    def _marked(self, stmt: ir.AttrStmt, state: AccessState, at: _StatementContext) -> tuple[ir.Stmt, AccessState]:
        """Order the accesses of an annotated region: one unit's, the producer's, or a region of all threads."""
        if is_loading(stmt):
            return stmt, state  # their loads are ordered where the producer is made
        unit, before = ExecutingThreads.of(stmt), state
        if unit is None:
            body, state = self.block(stmt.body, state, at)
        else:
            inner = at.inside(by=unit, apart=None, once=None)
            body, state = self.block(stmt.body, state, replace(inner, unit=inner.depth))
            state = _left(_outside(state, at), before)
        return (stmt if body is stmt.body else _with_body(stmt, body)), state

    def _branch(self, stmt: ir.IfThenElse, state: AccessState, at: _StatementContext) -> tuple[ir.Stmt, AccessState]:
        inner = at
        if self._is_divergent(stmt.condition):
            once = of_condition(stmt.condition, self.touches.known) or at.once
            inner = at.inside(apart=at.apart or at.depth + 1, once=once)
        state = self._touched(self.touches.read([stmt.condition], stmt, at.by, inner.depth, at.thread), state, at)
        then_case, first = self.block(stmt.then_case, state, inner)
        else_case, second = stmt.else_case, state
        if else_case is not None:
            inner = replace(inner, once=at.once, before_if=at.before_if | state.keys())
            else_case, second = self.block(else_case, state, inner)
        ended = _left(_outside(merged(first, second), at), state)
        if any(_synchronizes(case) for case in (then_case, else_case) if case is not None):
            ended = {k: replace(t, passed=t.passed or k in state) for k, t in ended.items()}
        state = ended
        if then_case is stmt.then_case and else_case is stmt.else_case:
            return stmt, state
        return tir.at(ir.IfThenElse(stmt.condition, then_case, else_case), stmt), state

    def _is_divergent(self, condition: ir.PrimExpr) -> bool:
        def differs(node: ir.Node) -> bool:
            is_held = isinstance(node, ir.BufferLoad) and ir.scope_kind(node.buffer) == "fragment"
            return is_held and node.buffer.scope() != ir.VARIABLE or ir.op_name(node) == tl.ELECT

        return self.names.is_divergent(condition) or ir.contains(condition, differs)

    def _loop(self, stmt: ir.Stmt, state: AccessState, at: _StatementContext) -> tuple[ir.Stmt, AccessState]:
        """A loop, not pipelined if its loads may not be issued ahead."""
        if not is_pipelined(stmt):
            return self._turns(stmt, state, at)
        depth = at.depth + 1
        try:
            return self._turns(stmt, state, replace(at, pipelined=at.pipelined or depth))
        except _DependentIterations as found:
            if found.depth < depth:
                raise
            return self._turns(tir.at(in_order(stmt, stmt.body), stmt), state, at)

    def _turns(self, stmt: ir.Stmt, state: AccessState, at: _StatementContext) -> tuple[ir.Stmt, AccessState]:
        """Order a loop: its body follows the statements before the loop, and its own previous iteration."""
        head = [stmt.condition] if isinstance(stmt, ir.While) else [stmt.min, stmt.extent]
        read = self.touches.read(head, stmt, at.by, at.depth + 1, at.thread)
        before = self._touched(read, state, at)
        apart = at.apart
        if any(map(self._is_divergent, head)):
            apart = apart or at.depth + 1
        inner = at.inside(apart=apart)
        binds = [s for s in ir.statements(stmt.body) if isinstance(s, ir.Bind)]
        if isinstance(stmt, ir.For):
            self.running[stmt.loop_var] = stmt.min, stmt.extent
        bound = {s.var: s.value if ir.is_pure(s.value) else None for s in binds}
        body, after = self.block(stmt.body, before, inner)
        seen = (t.in_later_iteration(stmt, bound) if t.depth > at.depth else t for t in after.values())
        turned = {t.key: t for t in seen}
        if isinstance(stmt, ir.While):
            body, turned = self._checked_again(stmt, body, turned, inner)
        body, after = self.block(body, turned, inner)
        whole = {k: t.after(stmt, bound) if t.depth > at.depth else t for k, t in after.items()}
        earlier = {t.key: t for k, t in whole.items() if k[-1] is stmt}  # any iteration but the last
        ended = merged({k: t for k, t in whole.items() if k[-1] is not stmt}, earlier)
        if not (isinstance(stmt, ir.For) and ir.proves(ir.GE(stmt.extent, 1), {})):
            ended = merged(ended, before)
        return (stmt if body is stmt.body else _with_body(stmt, body)), _outside(ended, at)

    def _checked_again(
        self, stmt: ir.While, body: ir.Stmt, state: AccessState, at: _StatementContext
    ) -> tuple[ir.Stmt, AccessState]:
        """The body of a `while`, followed by its condition."""
        read = self.touches.read([stmt.condition], stmt, at.by, at.depth, at.thread)
        try:
            return body, self._touched(read, state, at)
        except _BarrierBefore as found:
            if found.depth < at.depth:
                raise
            ordered = tir.sequence([body, self._between(found.need, stmt)])
            return ordered, self._touched(read, found.need.applied(state, at.by), at)

    # -- single statements -------------------------------------------------------------------------------------------

    def _leaf(self, stmt: ir.Stmt, state: AccessState, at: _StatementContext) -> AccessState:
        """The state after a statement without inner statements, or whose inner ones are elements of it."""
        if isinstance(stmt, ir.Evaluate):
            name, function = ir.op_name(stmt.value), tir.extern_name(stmt.value) or ""
            if function.startswith(_ORDERS_ALL):
                return {}
            if name == SYNC.name:
                by = _executing(stmt.value) or at.by
                return synced(self._published(state, by, at), by)
            if function == BARRIER and at.apart is None:
                return synced(self._published(state, None, at), at.by)
            if name == tl.STORAGE_SYNC and ir.is_for_all(stmt.value):
                return synced(state, at.by) if at.apart is None else state
            if function.startswith(_COMPLETES) and not (function.endswith(">") and not function.endswith("<0>")):
                return completed(state)
            if function == "tilescale::acquired":
                return fenced(state)
        touches = self.touches.of(stmt, at.by, at.depth, at.thread)
        return self._touched(touches, self._loaded(stmt, touches, state, at), at)

    def _loaded(
        self, stmt: ir.Stmt, touches: list[MemoryAccess], state: AccessState, at: _StatementContext
    ) -> AccessState:
        """A state without stores to the tiles that a statement loads: stock TileLang orders them with the load or
        before the next store, by any threads. It may miss some of them, but for those of roles, which hand them over.
        """
        whole = self.touches.loads_whole(stmt)
        if not whole:
            return state
        few = {touch.access.root for touch in touches if touch.is_by_few}

        def is_ordered(touch: MemoryAccess) -> bool:
            root = touch.access.root
            is_few = touch.key[0] is self.before and touch.is_by_few and root in few
            is_missed = is_few or at.is_behind(touch)
            is_handed_over = self.phase.graph.has_epilogue
            return touch.is_shared and touch.access.writes and root in whole and (is_handed_over or not is_missed)

        return {k: t for k, t in state.items() if not is_ordered(t)}

    def _published(self, state: AccessState, by: ExecutingThreads | None, at: _StatementContext) -> AccessState:
        """A state before units synchronize: some threads, or blocks.

        Raises `_BarrierBefore` where bulk stores that others may load then are not known to be complete.
        """
        for touch in state.values():
            is_open = touch.bulk and touch.access.writes and not touch.complete and touch.depth >= at.unit
            if is_open and touch.by != by and touch.access.root in self.loaded:
                raise _BarrierBefore(RequiredOrder(complete=True, pairs=((touch, touch),)), at.depth)
        return state

    def _touched(self, touches: list[MemoryAccess], state: AccessState, at: _StatementContext) -> AccessState:
        """A state with further accesses. Raises `_BarrierBefore` if they need a barrier before them."""
        need: RequiredOrder | None = None
        for later in touches:
            is_load = later.bulk and later.access.reads
            self.ordered |= is_load and later.access.root in self.stored and not self.phase.graph.is_stock
            for earlier in state.values():
                if at.apart is not None and earlier.depth >= at.apart or apart(earlier.by, later.by):
                    continue
                if later.is_shared and not self._is_ours_to_order(earlier, later, at):
                    continue
                is_ahead = at.pipelined is not None and earlier.depth >= at.pipelined
                if is_ahead and later.is_shared:
                    continue  # each iteration in flight has its own tile
                more = RequiredOrder.of(earlier, later)
                if not (is_ahead or more) or not earlier.conflicts(later, self.running):
                    continue
                if is_ahead:
                    raise _DependentIterations(earlier.depth)
                if more is not None:
                    self.ordered |= is_load
                    need = more if need is None else need.with_(more)
        if need is not None:
            raise _BarrierBefore(need, min(at.place(earlier) for earlier, _ in need.pairs))
        self.stored |= {t.access.root for t in touches if t.access.writes}
        return {**state, **{t.key: t for t in touches}}

    def _is_ours_to_order(self, earlier: MemoryAccess, later: MemoryAccess, at: _StatementContext) -> bool:
        """Whether stock TileLang may not order two accesses of shared memory: two stores, or a store and a load one of
        which is in a branch or a unit without the other. An `else`, and what follows a branch, count as ordered there
        if the branch has a barrier. Two statements in succession by few threads become one branch, with the barrier
        inside. Roles order their channels, and slots their reuse."""
        if earlier.access.writes and later.access.writes:
            return True
        tiles = self.phase.roles.tiles
        ordered = at.pipelined is not None or self.phase.graph.has_epilogue
        if ordered or any(tile.data.same_as(later.access.root) for tile in tiles):
            return False
        is_few = earlier.key[0] is self.before and earlier.is_by_few and later.is_by_few
        return is_few or at.is_behind(earlier) or earlier.left or earlier.depth < max(at.unit, at.apart or 0)

    def _between(self, need: RequiredOrder, stmt: ir.Stmt) -> ir.Stmt:
        """The barrier and completion needed before a statement, with a note."""
        steps = [tir.evaluate(tir.extern("tilescale::complete_stores"))] if need.complete else []
        steps += [sync()] if need.sync else []
        steps += [tir.evaluate(tir.extern("tilescale::acquired"))] if need.fence else []
        steps = [tir.at(step, stmt) for step in steps]
        self.notes[steps[0]] = self._words(need)
        return tir.sequence(steps)

    def _words(self, need: RequiredOrder) -> str:
        done = [
            *(["bulk stores are completed"] if need.complete else []),
            *(["threads synchronize"] if need.sync else []),
            *(["bulk copies are ordered"] if need.fence else []),
        ]
        earlier, later = need.pairs[0]
        if not need.sync and need.complete:
            return f"before units synchronize: {done[0]} ({self._line('stored', earlier.key[0])})"
        what = "store to" if later.access.writes else "load of"
        verb = "stored" if earlier.access.writes else "read"
        before = self._line(f"before the {what} {later.access.buffer.name}", later.key[0])
        return f"{before}: {', '.join(done)} ({self._line(verb, earlier.key[0])})"

    def _line(self, what: str, stmt: ir.Stmt) -> str:
        where = next((found for inner in ir.statements(stmt) if (found := location(inner)) is not None), None)
        return what if where is None else f"{what} in line {where.line}"


def _is_ours(argument: Argument) -> bool:
    """Whether a tensor is a record, or a workspace of a collective, which orders its own accesses."""
    return not isinstance(argument, CallerArgument | PeerInstances) and not (
        isinstance(argument, KernelWorkspace) and argument.is_of_program
    )


def _executing(call: ir.Call) -> ExecutingThreads | None:
    if not call.args:
        return None
    begin, threads = map(ir.integer, call.args)
    return ExecutingThreads(begin, threads)


def _outside(state: AccessState, at: _StatementContext) -> AccessState:
    return {k: replace(t, depth=min(t.depth, at.depth)) for k, t in state.items()}


def _left(state: AccessState, before: AccessState) -> AccessState:
    """A state in which accesses since `before` are in a branch or a unit that has ended."""
    return {k: t if k in before else replace(t, left=True) for k, t in state.items()}


def _synchronizes(stmt: ir.Stmt) -> bool:
    return ir.contains(stmt, lambda node: ir.op_name(node) in (SYNC.name, tl.STORAGE_SYNC))


def _with_body(stmt: ir.Stmt, body: ir.Stmt) -> ir.Stmt:
    if isinstance(stmt, ir.For):
        return tir.relooped(stmt, body=body)
    if isinstance(stmt, ir.While):
        made = ir.While(stmt.condition, body)
    else:
        made = ir.AttrStmt(stmt.node, stmt.attr_key, stmt.value, body)
    return tir.at(made, stmt)
