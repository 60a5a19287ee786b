# SPDX-License-Identifier: MIT
"""Sequences and branches: threads that diverge under a mask, or as coroutines of their own where they may wait.

Warps run independently on hardware, so threads that took one side of a branch may wait for those that took the other,
or for those that skip it and take the next one. Where a branch contains an operation that threads execute together, its
sides therefore run concurrently. So do consecutive branches, up to one that shares memory with an earlier one: TileLang
inserts a barrier of all threads there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.barriers import Participants
from tilescale.backends.emulator.execute.frame import CONTINUE, Frame, is_vector, spread, without
from tilescale.backends.emulator.execute.scheduler import TaskGroup
from tilescale.backends.emulator.execute.tasks import Task, Wait
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.registry import statement
from tilescale.errors import Location
from tilescale.program.model import location


@statement(ir.SeqStmt)
def _sequence(compiler: Compiler, stmt: ir.SeqStmt) -> Closure:
    return _in_order([_concurrent(compiler, run) for run in _runs(compiler, stmt.seq)])


def _in_order(parts: Sequence[Closure]) -> Closure:
    """Execute parts in order, without the threads that leave the loop around them in between."""
    if len(parts) == 1:
        return parts[0]

    def run(frame: Frame) -> Any:
        for part in parts:
            left = part(frame)
            if left is not None:
                return left
            if frame.dead is not None:
                frame.mask = without(frame.mask, frame.dead)
                if not frame.mask.any():
                    return CONTINUE
        return None

    return run


@dataclass(frozen=True)
class _Branch:
    """A compiled branch: `then` runs where `condition` holds, `otherwise` elsewhere."""

    condition: Closure
    then: Closure
    otherwise: Closure | None
    together: bool
    where: Location | None

    def run(self, frame: Frame) -> Any:
        taken = self.condition(frame)
        if not is_vector(taken):
            side = self.then if taken else self.otherwise
            return side(frame) if side is not None else None
        yes = _active(frame, taken)
        no = _active(frame, ~taken)
        if self.together and self.otherwise is not None and yes.any() and no.any():
            return _Divergence(frame, [_Side(yes, self.then), _Side(no, self.otherwise)], self.where).run()
        for mask, side in ((yes, self.then), (no, self.otherwise)):
            if side is not None and mask.any():
                _masked(frame, side, mask)
        return None


@statement(ir.IfThenElse)
def _if(compiler: Compiler, stmt: ir.IfThenElse) -> Closure:
    return _branch(compiler, stmt).run


def _branch(compiler: Compiler, stmt: ir.IfThenElse) -> _Branch:
    with compiler.under(stmt.condition):
        then = compiler.stmt(stmt.then_case)
        otherwise = compiler.stmt(stmt.else_case) if stmt.else_case is not None else None
    together = compiler.is_collective(stmt) and not compiler.axes
    return _Branch(compiler.expr(stmt.condition), then, otherwise, together, location(stmt))


def _active(frame: Frame, taken: np.ndarray) -> np.ndarray:
    taken = spread(taken, frame)
    return taken if frame.mask is None else taken & frame.mask


def _masked(frame: Frame, branch: Closure, mask: np.ndarray) -> None:
    saved = frame.mask
    frame.mask = mask
    left = branch(frame)
    frame.mask = saved
    frame.leave(left, mask)


@dataclass(frozen=True)
class _Side:
    """The statements of some threads; `barrier`: a barrier of all threads before them, if there is one."""

    mask: np.ndarray
    run: Closure
    barrier: Wait | None = None


class _Divergence:
    """Diverging threads: each side becomes a coroutine of its own; they reconverge after the branch.

    Consecutive branches begin `ordered`: one that ends without waiting has ended before the next begins, as TileLang
    synchronizes threads between them. One that waits may wait for the next, and orders nothing before it, not even if
    the wait is satisfied already. Before a side with a barrier all earlier ones have ended.
    """

    def __init__(self, frame: Frame, sides: list[_Side], where: Location | None, ordered: bool = False):
        self._frame, self._sides, self._ordered = frame, sides, ordered
        self._run, self._scheduler = frame.run, frame.run.scheduler
        self._group = TaskGroup(self._scheduler, "its threads", where)
        self._members: list[Task] = []
        self._begun: set[Task] = set()
        self._barriers = [number for number, side in enumerate(sides) if side.barrier is not None]

    def run(self) -> None:
        """Start all sides, and wait for their ends."""
        unit = self._scheduler.current.name
        for number, side in enumerate(self._sides):
            own = self._frame.fork(self._frame.unit, side.mask)
            own.participants = Participants(int(side.mask.sum()))
            member = self._group.spawn(f"{unit}, {_threads(side.mask)}", partial(self._play, number, own))
            self._members.append(member)
        self._group.join()

    def _play(self, number: int, own: Frame) -> None:
        side = self._sides[number]
        if self._ordered:
            self._pass_barrier(number)
            self._await_earlier(number)
        own.leave(side.run(own), side.mask)
        self._frame.join(own)
        if self._ordered and not self._scheduler.current.waited:
            self._run.publishes(self._group)
        for later in (b for b in self._barriers if b > number):
            self._run.publishes((self._group, later))

    def _pass_barrier(self, number: int) -> None:
        """Wait until all sides before the last barrier in front of this one have ended."""
        last = max((b for b in self._barriers if b <= number), default=0)
        barrier = self._sides[last].barrier
        if not last or barrier is None:
            return
        is_ready = lambda: all(m.ended for m in self._members[:last])  # noqa: E731
        self._scheduler.block(replace(barrier, ready=is_ready))
        self._scheduler.current.waited = False  # by the program itself
        self._run.acquires((self._group, last))

    def _await_earlier(self, number: int) -> None:
        """Wait until each side before this one has ended, or waits itself."""
        before, begun = self._members[:number], self._begun
        is_ready = lambda: all(m.ended or m.paused or (m in begun and m.wait) for m in before)  # noqa: E731
        self._scheduler.block(Wait(is_ready, "earlier branches", quiet=True))
        begun.add(self._members[number])
        self._run.acquires(self._group)


def _threads(mask: np.ndarray) -> str:
    first, count = int(np.argmax(mask)), int(mask.sum())
    return f"threads {first}..{first + count - 1}"


# -- consecutive branches ----------------------------------------------------------------------------------------------


def _runs(compiler: Compiler, statements: Sequence[ir.Stmt]) -> Iterator[list[ir.Stmt]]:
    """The statements, with neighbours that could be roles of different threads in one list."""
    run: list[ir.Stmt] = []
    for stmt in statements:
        if run and (compiler.axes or not (_is_role(stmt) and _is_role(run[-1]))):
            yield run
            run = []
        run.append(stmt)
    yield run


def _is_role(stmt: ir.Stmt) -> bool:
    """Whether a statement is a one-sided branch under a condition that nothing in between can change."""
    if not isinstance(stmt, ir.IfThenElse) or stmt.else_case is not None:
        return False
    return not ir.reads_memory(stmt.condition)


def _concurrent(compiler: Compiler, statements: list[ir.Stmt]) -> Closure:
    """Consecutive branches, each with its own threads: threads that take different ones do not wait for each other."""
    if len(statements) == 1:
        return compiler.stmt(statements[0])
    branches = [_branch(compiler, s) for s in statements]
    one_by_one = _in_order([b.run for b in branches])
    if not any(b.together for b in branches):
        return one_by_one
    barriers = _barriers(compiler, statements)

    def taken_of(group: list[int], masks: list[np.ndarray], frame: Frame) -> list[_Side]:
        """The branches of a group that at least one thread takes."""
        left = {n: masks[n] if frame.dead is None else without(masks[n], frame.dead) for n in group}
        taken = [n for n, mask in left.items() if mask.any()]
        before = {n: [barriers[m, n] for m in taken if (m, n) in barriers] for n in taken}
        return [_Side(left[n], branches[n].then, *before[n][:1]) for n in taken]

    def run(frame: Frame) -> Any:
        conditions = [b.condition(frame) for b in branches]
        if not all(is_vector(c) for c in conditions):
            return one_by_one(frame)
        masks = [_active(frame, c) for c in conditions]
        for group in _groups(masks):
            sides = taken_of(group, masks, frame)
            if len(sides) > 1:
                _Divergence(frame, sides, branches[0].where, ordered=True).run()
            elif sides:
                _masked(frame, sides[0].run, sides[0].mask)
        return None

    return run


def _barriers(compiler: Compiler, statements: list[ir.Stmt]) -> dict[tuple[int, int], Wait]:
    """For an earlier and a later branch that share memory, one of them writing it, the barrier before the later one."""
    tiles = {compiler.slot(b.data): b.name for b in compiler.launch.buffers if b.scope() in ir.SHARED}
    roots = lambda found: {compiler.root(compiler.slot(data)) for data in found} & tiles.keys()  # noqa: E731
    effects = [compiler.surroundings.all_effects(s) for s in statements]
    written = [roots(access.root for access in e.writes) for e in effects]
    used = [roots(access.root for access in e.accesses) for e in effects]
    found = {}
    for later, earlier in itertools.combinations(range(len(statements) - 1, -1, -1), 2):
        both = written[earlier] & used[later] | used[earlier] & written[later]
        if both:
            found[earlier, later] = _barrier(tiles[min(both)], statements[earlier], statements[later])
    return found


def _barrier(tile: str, earlier: ir.Stmt, later: ir.Stmt) -> Wait:
    line = location(earlier)
    which = f"the branch at line {line.line}" if line else "the branch before it"
    return Wait(
        lambda: True,
        f"the barrier of all threads that TileLang puts before this branch, which shares {tile!r} with {which}",
        missing=lambda: 'sides of one if/else, and roles of T.Scale("warpgroup"), run concurrently: use one of these',
        where=location(later),
    )


def _groups(masks: list[np.ndarray]) -> Iterator[list[int]]:
    """Groups of consecutive branches that have no thread in common, by their numbers.

    Between groups all threads synchronize: where a later branch reads what an earlier one wrote, TileLang synchronizes
    them.
    """
    group: list[int] = []
    for number, mask in enumerate(masks):
        if any((masks[other] & mask).any() for other in group):
            yield group
            group = []
        group.append(number)
    yield group
