# SPDX-License-Identifier: MIT
"""Check that every fragment of a lowered kernel is used by one range of threads.

Why: stock TileLang places a tile operation on the interval of thread indices that it can prove for its branch. A
fragment that two intervals use loses statements or half of its elements, and a condition of another form counts as
none: both without a word. Before: the body of a kernel. After: the same, or an error that names the tile and both
lines.
"""

from __future__ import annotations

from tilelang_core import ir, tl
from tilescale.backends.tilelang.lowering.groups.distribution import accesses, is_fragment, parallel_loops
from tilescale.backends.tilelang.lowering.groups.threads import ThreadNames
from tilescale.backends.tilelang.lowering.markers import is_loading
from tilescale.backends.tilelang.lowering.phase import ThreadGroups
from tilescale.errors import Location, UnsupportedError
from tilescale.passes.structure import location
from tilescale.program.model import Launch

Interval = tuple[int, int]
"""First thread, and the one after the last."""

_BOUNDS = {
    ir.LT: lambda n: (0, n),
    ir.LE: lambda n: (0, n + 1),
    ir.GT: lambda n: (n + 1, None),
    ir.GE: lambda n: (n, None),
    ir.EQ: lambda n: (n, n + 1),
}
_MIRRORED = {ir.LT: ir.GT, ir.LE: ir.GE, ir.GT: ir.LT, ir.GE: ir.LE, ir.EQ: ir.EQ}
HARDWARE_BARRIERS = 16
"""Named barriers of a thread block (PTX ISA, `barrier`)."""

STOCK_BARRIERS = 3
"""The first ones are taken: 0 by barriers of the block, 1 and 2 by reductions; stock TileLang counts on from 3."""


def check_ranges(launch: Launch, groups: ThreadGroups, barriers: int, body: ir.Stmt, are_loaded: bool) -> None:
    """Raise UnsupportedError for a tile that stock TileLang would not compute as written.

    Args:
        barriers: number of hardware barriers in use, except those of ranges of threads that work on tiles.
        are_loaded: whether a producer loads for them.
    """
    _Ranges(launch, groups, barriers, are_loaded).visit(body, (0, launch.threads[0]))


class _Ranges:
    def __init__(self, launch: Launch, groups: ThreadGroups, barriers: int, are_loaded: bool):
        self.launch, self.groups, self.barriers, self.are_loaded = launch, groups, barriers, are_loaded
        self.names = ThreadNames(launch)
        self.index = next((var for var, axis in launch.thread_vars if axis == 0), None)
        self.used: dict[ir.Var, tuple[Interval | None, Location | None]] = {}
        self.partial: set[Interval] = set()
        self.kinds: set[str] = set()
        self.where: Location | None = None

    def visit(self, stmt: ir.Stmt, threads: Interval | None) -> None:
        """Check a statement that an interval of threads executes; None for some other set."""
        if is_loading(stmt):
            return
        self.where = location(stmt) or self.where
        if isinstance(stmt, ir.Bind):
            self.names.note(stmt)
        if isinstance(stmt, ir.IfThenElse):
            arms = self._split(stmt.condition, threads)
            for arm, part in zip((stmt.then_case, stmt.else_case), arms, strict=True):
                if arm is not None:
                    self.visit(arm, part)
        elif parallel_loops(stmt) or isinstance(stmt, ir.Evaluate | ir.BufferStore | ir.Bind):
            self._leaf(stmt, threads)
        else:
            for inner in ir.children(stmt):
                self.visit(inner, threads)

    # -- conditions --------------------------------------------------------------------------------------------------

    def _split(self, condition: ir.PrimExpr, threads: Interval | None) -> tuple[Interval | None, Interval | None]:
        if not self.names.is_divergent(condition):
            return threads, threads
        if isinstance(condition, ir.And):
            first, _ = self._split(condition.a, threads)
            both, _ = self._split(condition.b, first)
            return both, None
        bounds = self._bounds(condition)
        if bounds is None or threads is None:
            return None, None
        begin = min(max(threads[0], bounds[0]), threads[1])
        end = threads[1] if bounds[1] is None else max(begin, min(threads[1], bounds[1]))
        rest = (end, threads[1]) if begin == threads[0] else (threads[0], begin) if end == threads[1] else None
        return (begin, end), rest

    def _bounds(self, condition: ir.PrimExpr) -> tuple[int, int | None] | None:
        if type(condition) not in _BOUNDS or self.index is None:
            return None
        left, right, kind = condition.a, condition.b, type(condition)
        if isinstance(right, ir.Var):
            left, right, kind = right, left, _MIRRORED[kind]
        number = ir.constant(right)
        if number is None or not isinstance(left, ir.Var) or not left.same_as(self.index):
            return None
        return _BOUNDS[kind](number)

    # -- tiles -------------------------------------------------------------------------------------------------------

    def _leaf(self, stmt: ir.Stmt, threads: Interval | None) -> None:
        where = next((at for inner in ir.statements(stmt) if (at := location(inner))), self.where)
        name = ir.op_name(stmt.value) if isinstance(stmt, ir.Evaluate) else None
        on_tiles = parallel_loops(stmt) or (name or "").startswith(tl.TILE_OPERATIONS)
        named = accesses(stmt)
        if on_tiles and threads is None:
            raise UnsupportedError(
                f"a tile operation on {named[0][0].name!r} under a condition on the thread index that is no interval",
                hint='write T.Scale("warpgroup") or "warp" and tell units apart by their rank',
                where=where,
            )
        if on_tiles and (self.are_loaded or threads != (0, self.launch.threads[0])):
            assert threads is not None
            self.partial.add(threads)
            self.kinds |= {b.scope() for b, _, _ in named if b.scope() in ir.SHARED}
            self._check_barriers(where)
        for buffer, _, _ in named:
            if is_fragment(buffer):
                self._use(buffer, threads, where)

    def _use(self, buffer: ir.Buffer, threads: Interval | None, where: Location | None) -> None:
        how = self.groups.tiles.get(buffer.data)
        if how is not None:
            raise UnsupportedError(
                f"{buffer.name!r} is {how}: this statement of the whole program has no part for each", where=where
            )
        before, there = self.used.setdefault(buffer.data, (threads, where))
        if before != threads:
            raise UnsupportedError(
                f"the fragment {buffer.name!r} is used by {_people(before)} and by {_people(threads)}: it has elements "
                "in the registers of one range of threads only",
                hint="view it at the level of both (T.view), or pass its elements through shared memory",
                where=[at for at in (there, where) if at],
            )

    def _check_barriers(self, where: Location | None) -> None:
        if len(self.kinds) > 1:
            raise UnsupportedError(
                "ranges of threads use shared tiles of static and of dynamic size: stock TileLang gives both kinds the "
                "same barriers",
                hint="allocate all with T.alloc, or with the same scope",
                where=where,
            )
        needed = STOCK_BARRIERS + len(self.partial) + self.barriers
        if needed > HARDWARE_BARRIERS:
            raise UnsupportedError(
                f"{len(self.partial)} ranges of threads work on tiles: with other barriers they need {needed} of the "
                f"{HARDWARE_BARRIERS} that a program has",
                hint="launch fewer threads, or use coarser units",
                where=where,
            )


def _people(threads: Interval | None) -> str:
    return "some threads" if threads is None else f"threads {threads[0]} to {threads[1] - 1}"
