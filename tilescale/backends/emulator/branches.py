# SPDX-License-Identifier: MIT
"""Sequences and branches: threads that part ways under a mask, or as coroutines of their own where they may wait.

Warps run independently on hardware, so threads that took one side of a branch may wait for those that took the other,
or for those that skip it and take the next one. Where something below a branch is executed by threads together, its
sides therefore run side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.barriers import Crew
from tilescale.backends.emulator.compiler import Compiler
from tilescale.backends.emulator.expr import Closure
from tilescale.backends.emulator.frame import CONTINUE, Frame, is_vector, spread, without
from tilescale.backends.emulator.registry import statement
from tilescale.backends.emulator.scheduler import Family, Wait
from tilescale.passes.structure import location


@statement(ir.SeqStmt)
def _sequence(compiler: Compiler, stmt: ir.SeqStmt) -> Closure:
    return _in_order([_side_by_side(compiler, run) for run in _runs(compiler, stmt.seq)])


def _in_order(parts: Sequence[Closure]) -> Closure:
    """Parts one after another, without the threads that leave the loop around them on the way."""
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
    where: Any

    def run(self, frame: Frame) -> Any:
        taken = self.condition(frame)
        if not is_vector(taken):
            side = self.then if taken else self.otherwise
            return side(frame) if side is not None else None
        yes = _active(frame, taken)
        no = _active(frame, ~taken)
        if self.together and self.otherwise is not None and yes.any() and no.any():
            return _roles(frame, [(yes, self.then), (no, self.otherwise)], self.where)
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


def _roles(frame: Frame, sides: list[tuple[np.ndarray, Closure]], where: Any, in_turn: bool = False) -> None:
    """Threads part ways: each side becomes a coroutine of its own; they meet again after the branch.

    Branches that follow one another begin `in_turn`: one that ends without waiting has ended before the next begins, as
    TileLang synchronises threads between them; one that waits may wait for the next, and orders nothing before it, not
    even if what it waits for is there already.
    """
    run, task, members, begun = frame.run, frame.run.scheduler.current, [], set()
    family = Family(run.scheduler, "its threads", where)

    def turn() -> None:
        me = run.scheduler.current
        before = members[: members.index(me)]
        come = lambda: all(m.ended or m.paused or (m in begun and m.wait) for m in before)  # noqa: E731
        run.scheduler.block(Wait(come, "its turn", quiet=True))
        begun.add(me)
        run.acquires(family)

    def play(branch: Closure, side: Frame, mask: np.ndarray) -> None:
        if in_turn:
            turn()
        side.leave(branch(side), mask)
        frame.join(side)
        if in_turn and not run.scheduler.current.waited:
            run.publishes(family)

    for mask, branch in sides:
        first, count = int(np.argmax(mask)), int(mask.sum())
        side = frame.fork(frame.unit, mask)
        side.crew = Crew(count)
        name = f"{task.name}, threads {first}..{first + count - 1}"
        members.append(family.spawn(name, lambda b=branch, s=side, m=mask: play(b, s, m)))
    family.join()


# -- branches that follow one another ----------------------------------------------------------------------------------


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
    """Whether a statement is a branch of one side under a condition that nothing in between can change."""
    if not isinstance(stmt, ir.IfThenElse) or stmt.else_case is not None:
        return False
    return not ir.contains(stmt.condition, lambda n: isinstance(n, ir.BufferLoad))


def _side_by_side(compiler: Compiler, statements: list[ir.Stmt]) -> Closure:
    """Branches one after another, each thread its own: threads that take different ones do not wait for each other."""
    if len(statements) == 1:
        return compiler.stmt(statements[0])
    branches = [_branch(compiler, s) for s in statements]
    one_by_one = _in_order([b.run for b in branches])
    if not any(b.together for b in branches):
        return one_by_one

    def run(frame: Frame) -> Any:
        taken = [b.condition(frame) for b in branches]
        if not all(is_vector(t) for t in taken):
            return one_by_one(frame)
        for sides in _groups([_active(frame, t) for t in taken], branches):
            if frame.dead is not None:
                sides = [(without(mask, frame.dead), side) for mask, side in sides]
            sides = [(mask, side) for mask, side in sides if mask.any()]
            if len(sides) > 1:
                _roles(frame, sides, branches[0].where, in_turn=True)
            elif sides:
                _masked(frame, sides[0][1], sides[0][0])
        return None

    return run


def _groups(masks: list[np.ndarray], branches: list[_Branch]) -> Iterator[list[tuple[np.ndarray, Closure]]]:
    """Neighbouring branches that have no thread in common, group by group.

    Between groups all threads meet: where a later branch reads what an earlier one wrote, TileLang synchronises them.
    """
    group: list[tuple[np.ndarray, Closure]] = []
    for mask, branch in zip(masks, branches, strict=True):
        if any((other & mask).any() for other, _ in group):
            yield group
            group = []
        group.append((mask, branch.then))
    yield group
