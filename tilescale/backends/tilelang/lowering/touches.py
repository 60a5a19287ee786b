# SPDX-License-Identifier: MIT
"""Memory accesses of a statement of a lowered phase: elements, threads, and proxy.

Stock TileLang decides which thread executes which element of a tile operation, and whether a copy is a bulk copy. These
decisions are unknown here except for loops that it distributes uniformly, so most accesses are by any thread. In shared
memory, stock TileLang orders loads with the stores in the same sequence of statements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from tilelang_core import accesses, ir, tl
from tilelang_core import rewrite as tir
from tilescale.backends.tilelang.lowering.markers import ExecutingThreads
from tilescale.backends.tilelang.lowering.places import collide
from tilescale.backends.tilelang.lowering.thread_maps import PhaseBuffers, ThreadMap, of_copy, of_index, of_loops
from tilescale.program.effects import Access
from tilescale.program.regions import BoundVariables, may_overlap

AccessKey: TypeAlias = tuple[Any, ...]

EVERY = "every thread"
"""`MemoryAccess.thread` if all threads access the same element."""

_DEEPEST = 3
"""Maximum depth to which names in an index are expanded: expressions grow with each."""

_COPIES = (tl.COPY, tl.TMA_COPY, tl.ASYNC_COPY)
"""Operations that write only what they declare to write."""

_OURS = "tilescale::"
"""Prefix of TileScale's device functions, whose pointers are flags and records of waits."""


@dataclass(frozen=True)
class MemoryAccess:
    """Some elements that a statement accesses.

    Attributes:
        key: the statement, the number of the access in it, and the loops in whose earlier iterations it is.
        inside: the variables that vary in the statement, or in loops that have ended.
        by: the threads that execute the statement.
        thread: the thread that accesses an element: a `ThreadMap`, `EVERY`, or None where it may be any.
        generic, bulk: whether threads access it by loads and stores, and whether a bulk copy may.
        depth: depth of the loop, branch or unit around it.
        synced: the threads that have synchronized since.
        complete: whether a bulk store is known to be complete.
        fenced: whether later bulk copies are ordered after it.
        left: whether it is in a branch or a unit that has ended.
        passed: whether a branch with a barrier has ended since: stock TileLang counts the barrier as executed.
    """

    key: AccessKey
    access: Access
    inside: BoundVariables
    by: ExecutingThreads
    thread: Any
    generic: bool
    bulk: bool
    depth: int = 0
    synced: ExecutingThreads | None = None
    complete: bool = False
    fenced: bool = False
    left: bool = False
    passed: bool = False

    @property
    def is_shared(self) -> bool:
        return ir.scope_kind(self.access.buffer) == "shared"

    @property
    def is_by_few(self) -> bool:
        """Whether it is known to have fewer elements than its unit has threads."""
        if self.access.begins is None or self.access.extents is None:
            return False
        used = {var for begin in self.access.begins for var in ir.variables(begin)}
        sizes = [*self.access.extents, *(size for var, (_, size) in self.inside.ranges.items() if var in used)]
        counts = ir.constants(sizes)
        return counts is not None and math.prod(counts) < self.by.threads

    def conflicts(self, later: MemoryAccess, running: Mapping[ir.Var, tuple[Any, Any]]) -> bool:
        """Whether a later access, in loops over `running`, must stay after this one if other threads make it."""
        one, other = self.access, later.access
        if not (one.writes or other.writes) or one.atomic and other.atomic:
            return False
        if not may_overlap(one, self.inside, other, later.inside):
            return False
        return one.reads or other.reads or collide(one, self.inside, other, later.inside, running)

    def is_by_thread_of(self, later: MemoryAccess) -> bool:
        """Whether a later access of the same element is made by the same thread, in program order."""
        if self.bulk or later.bulk or (self.by.begin, self.by.threads) != (later.by.begin, later.by.threads):
            return False
        if self.by.threads == 1:
            return True
        if self.thread == EVERY:  # every thread has stored the same value
            return self.access.writes and not self.access.reads and not later.access.writes
        both = isinstance(self.thread, ThreadMap) and isinstance(later.thread, ThreadMap)
        return both and self.thread.agrees(later.thread)

    def in_later_iteration(self, loop: ir.Stmt, bound: Mapping[ir.Var, Any]) -> MemoryAccess:
        """An access in an earlier iteration of a loop, as seen by a later one; `bound` are the names that the loop
        binds."""
        seen = replace(self._without(bound), key=(*self.key, loop))
        if not isinstance(loop, ir.For):
            return seen
        ago = ir.Var("ago", str(loop.loop_var.dtype))
        one = ir.IntImm(str(loop.loop_var.dtype), 1)
        return seen._with(loop.loop_var, loop.loop_var - ago, ago, (one, loop.loop_var - loop.min))

    def after(self, loop: ir.Stmt, bound: Mapping[ir.Var, Any]) -> MemoryAccess:
        """An access in any iteration of a loop that has ended."""
        key = self.key[:-1] if self.key[-1] is loop else self.key
        seen = replace(self._without(bound), key=key)
        if not isinstance(loop, ir.For):
            return seen
        iteration = ir.Var(loop.loop_var.name, str(loop.loop_var.dtype))
        return seen._with(loop.loop_var, iteration, iteration, (loop.min, loop.extent))

    def _with(self, var: ir.Var, value: Any, runs: ir.Var, over: tuple[Any, Any]) -> MemoryAccess:
        """The access with a variable replaced by an expression of another one, which varies."""
        new = {var: value}
        old = self.inside
        ranges = {v: (ir.substitute(a, new), ir.substitute(n, new)) for v, (a, n) in old.ranges.items()}
        inside = BoundVariables({**ranges, runs: over}, old.values, old.names, old.steady)
        begins, extents = self.access.begins, self.access.extents
        if begins is not None and extents is not None:
            begins, extents = (tuple(ir.substitute(n, new) for n in part) for part in (begins, extents))
        thread = self.thread.substituted(new) if isinstance(self.thread, ThreadMap) else self.thread
        access = replace(self.access, begins=begins, extents=extents)
        return replace(self, access=access, inside=inside, thread=thread)

    def _without(self, bound: Mapping[ir.Var, Any]) -> MemoryAccess:
        """The access where names no longer have their values: anywhere along dimensions that depend on memory."""
        begins, extents = self.access.begins, self.access.extents
        if begins is None or extents is None or not any(ir.variables(n) & bound.keys() for n in (*begins, *extents)):
            return self
        spelled = [tuple(_spelled(n, bound) for n in pair) for pair in zip(begins, extents, strict=True)]
        whole = [(ir.IntImm("int32", 0), extent) for extent in self.access.buffer.shape]
        known = [all_ if any(n is None for n in pair) else pair for pair, all_ in zip(spelled, whole, strict=True)]
        access = replace(self.access, begins=tuple(b for b, _ in known), extents=tuple(n for _, n in known))
        return replace(self, access=access, thread=None)


def _spelled(expr: ir.PrimExpr, bound: Mapping[ir.Var, Any]) -> Any:
    """An expression with bound names expanded; None if a name is read from memory, or the result is too long."""
    for _ in range(_DEEPEST):
        values = {var: bound[var] for var in ir.variables(expr) & bound.keys()}
        if any(value is None for value in values.values()):
            return None
        if not values:
            return expr
        expr = ir.substitute(expr, values)
    return None


@dataclass
class AccessCollector:
    """Collects the accesses of statements.

    Attributes:
        known: properties of the phase's threads and buffers.
        has_bulk: whether the machine has bulk copies.
        buffers: data variable of each tensor of the program -> the tensor.
    """

    known: PhaseBuffers
    has_bulk: bool
    buffers: dict[ir.Var, ir.Buffer]
    _whole: dict[ir.Stmt, set[ir.Var]] = field(default_factory=dict)

    def of(self, stmt: ir.Stmt, by: ExecutingThreads, depth: int, thread: Any) -> list[MemoryAccess]:
        """The accesses of a statement and its inner statements. `thread`: the thread of an access whose index is the
        same in all threads: `EVERY`, the map of the single one that executes the statement, or None if it may be any.
        """
        inside = BoundVariables.of(stmt)
        thread_of = self._thread(stmt, by, thread)
        made: list[MemoryAccess] = []
        for found, is_bulk in self._accesses(stmt):
            access = _access(found)
            bulk = is_bulk and self.has_bulk and ir.scope_kind(access.buffer) == "global"
            generic = not (bulk and _is_bulk_only(stmt))
            who = thread_of(access) if not bulk else None
            key = (stmt, len(made))
            made.append(MemoryAccess(key, *self._by_any_thread(access, inside), by, who, generic, bulk, depth))
        return made

    def _by_any_thread(self, access: Access, inside: BoundVariables) -> tuple[Access, BoundVariables]:
        """An access with fresh thread indices: other threads make it at the same time with other values."""
        parts = access.begins or (), access.extents or ()
        used = {v for part in parts for n in part for v in ir.variables(n)}
        own = {v: ir.Var(v.name, str(v.dtype)) for v in used & self.known.threads.keys()}
        if not own:
            return access, inside
        begins, extents = (tuple(ir.substitute(n, own) for n in part) for part in parts)
        zero = ir.IntImm("int32", 0)
        ranges = {new: (zero, ir.IntImm("int32", self.known.threads[v])) for v, new in own.items()}
        running = replace(inside, ranges={**inside.ranges, **ranges}, names={*inside.names, *own.values()})
        return replace(access, begins=begins, extents=extents), running

    def read(
        self, exprs: Iterable[Any], like: ir.Stmt, by: ExecutingThreads, depth: int, thread: Any
    ) -> list[MemoryAccess]:
        """The accesses of expressions that a statement evaluates before its inner statements."""
        made: list[MemoryAccess] = []
        for expr in exprs:
            stmt = tir.at(ir.Evaluate(expr), like)
            made += [replace(t, key=(like, "head", *t.key[1:])) for t in self.of(stmt, by, depth, thread)]
        return made

    def updates(self, stmt: ir.Stmt) -> bool:
        """Whether all threads may read an element, on chip or not, that they all store to: only one of them may."""
        if not isinstance(stmt, ir.BufferStore) or stmt.buffer.scope().startswith("local"):
            return False
        (store, *others), none = map(_access, self._found(stmt)), BoundVariables()
        loads = [other for other in others if other.root.same_as(store.root)]
        return self._of_index(store, EVERY) == EVERY and any(may_overlap(store, none, load, none) for load in loads)

    def loads_whole(self, stmt: ir.Stmt) -> set[ir.Var]:
        """Tiles in shared memory of which a statement loads every element, also after simplification of its values."""
        if stmt not in self._whole:
            self._whole[stmt] = self._loaded_whole(stmt)
        return self._whole[stmt]

    def _loaded_whole(self, stmt: ir.Stmt) -> set[ir.Var]:
        inside = BoundVariables.of(stmt)
        if any(isinstance(inner, ir.IfThenElse) for inner in ir.statements(stmt)):
            return set()
        loads = (a for inner in ir.statements(stmt) for a in self._found(_simplified(inner)) if a.reads)
        return {a.buffer.data for a in loads if ir.scope_kind(a.buffer) == "shared" and _is_whole(_access(a), inside)}

    # -- what a statement touches ------------------------------------------------------------------------------------

    def _accesses(self, stmt: ir.Stmt) -> Iterator[tuple[accesses.BufferAccess, bool]]:
        """Accesses of device and shared memory, and whether a bulk copy may make them."""
        for inner in ir.statements(stmt):
            for access in self._found(inner):
                if _is_shared_tile(access.buffer):
                    if access.writes and not _is_bulk_only(inner):
                        yield replace(access, reads=False), False
                    if access.reads:
                        yield replace(access, writes=False), False
                elif access.buffer.data in self.buffers:
                    is_copy = isinstance(inner, ir.Evaluate) and ir.op_name(inner.value) in _COPIES
                    only = replace(access, reads=False) if is_copy and access.writes else access
                    yield only, _may_be_bulk(inner, access)

    def _found(self, node: ir.Node) -> Iterator[accesses.BufferAccess]:
        found = accesses.accesses_of(node, lambda name: name == tl.CALL_EXTERN)
        yield from found.accesses
        for data in found.handed:
            if data in self.buffers:
                yield accesses.BufferAccess(self.buffers[data], None, None, reads=True, writes=True)
        for call in found.calls:
            name, passed = ir.extern_arguments(call)
            is_ours = name.startswith(_OURS)
            for argument in passed:
                if not (is_ours and ir.op_name(argument) in (tl.ADDRESS_OF, tl.ACCESS_PTR)):
                    yield from self._found(argument)

    # -- which thread ------------------------------------------------------------------------------------------------

    def _thread(self, stmt: ir.Stmt, by: ExecutingThreads, thread: Any) -> Callable[[Any], Any]:
        if isinstance(thread, ThreadMap):
            return lambda access: thread
        if isinstance(stmt, ir.For):
            found = [access for inner in ir.statements(stmt) for access in self._found(inner)]
            return of_loops(stmt, found, self.known, by.threads)
        if isinstance(stmt, ir.Evaluate) and ir.op_name(stmt.value) == tl.COPY:
            copied = of_copy(self._found(stmt), self.known)
            return lambda access: copied
        if isinstance(stmt, ir.BufferStore | ir.Bind) or isinstance(stmt, ir.Evaluate) and not _is_tile_operation(stmt):
            return lambda access: self._of_index(access, thread)
        return lambda access: None

    def _of_index(self, access: Access | accesses.BufferAccess, thread: Any) -> Any:
        """The thread of an access: from its index, if it differs between threads; else `thread`."""
        if access.begins is None:
            return None
        is_one = not any(ir.variables(index) & self.known.threads.keys() for index in access.begins)
        return thread if is_one else of_index(access, self.known)


def _access(found: accesses.BufferAccess) -> Access:
    flags = found.reads, found.writes, found.atomic
    return Access(found.buffer.data, found.buffer, found.begins, found.extents, *flags)


def _is_shared_tile(buffer: ir.Buffer) -> bool:
    return ir.scope_kind(buffer) == "shared" and "barrier" not in buffer.scope()


def _simplified(stmt: ir.Stmt) -> ir.Stmt:
    if not isinstance(stmt, ir.BufferStore):
        return stmt
    return ir.BufferStore(stmt.buffer, ir.simplify(stmt.value, {}), stmt.indices, stmt.predicate)


def _is_whole(access: Access, inside: BoundVariables) -> bool:
    """Whether an access covers every element: each index runs over its dimension by a loop of its own."""
    if access.begins is None or access.extents is None:
        return False
    loops: list[ir.Var] = []
    for begin, extent, size in zip(access.begins, access.extents, access.buffer.shape, strict=True):
        if ir.proves(ir.EQ(extent, size), {}):
            continue
        index = begin.a if isinstance(begin, ir.FloorMod) and ir.proves(ir.EQ(begin.b, size), {}) else begin
        running = [var for var in ir.variables(index) if var in inside.ranges]
        if len(running) != 1 or not ir.proves(ir.EQ(inside.ranges[running[0]][1], size), {}):
            return False
        if not any(running[0] not in ir.variables(ir.simplify(index - sign * running[0], {})) for sign in (1, -1)):
            return False
        loops += running
    return len(loops) == len(set(loops))


def _is_tile_operation(stmt: ir.Evaluate) -> bool:
    return str(ir.op_name(stmt.value)).startswith(tl.TILE_OPERATIONS)


def _is_bulk_only(stmt: ir.Stmt) -> bool:
    return isinstance(stmt, ir.Evaluate) and ir.op_name(stmt.value) == tl.TMA_COPY


def _may_be_bulk(stmt: ir.Stmt, access: accesses.BufferAccess) -> bool:
    """Whether stock TileLang may make a bulk copy of a statement: one between device and shared memory."""
    if not isinstance(stmt, ir.Evaluate) or not _is_tile_operation(stmt) or ir.attribute(stmt.value, "disable_tma"):
        return False
    others = accesses.accesses_of(stmt, lambda name: False).accesses
    kinds = {ir.scope_kind(a.buffer) for a in others if a.reads != access.reads or a.writes != access.writes}
    return "shared" in kinds
