# SPDX-License-Identifier: MIT
"""Dependences of tasks on those of earlier phases.

A task depends on those of earlier phases that write what it touches, or touch what it writes. A dependence that follows
from another one needs no wait of its own: signals and waits are transitive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tilelang_core import ir
from tilescale.passes.persistent.counters import Counter, counters_of
from tilescale.program.effects import ProgramNames
from tilescale.program.tile_boxes import Boxes, TileAccesses


@dataclass(frozen=True)
class Need:
    """Tasks of a phase need those of an earlier one, for what both touch.

    Attributes:
        counter: of the earlier phase.
        boxes: what the later tasks touch of it.
        roots: the tensors; a task waits before its first access to one.
    """

    earlier: int
    later: int
    counter: Counter
    boxes: Boxes
    roots: tuple[ir.Var, ...]


def needs_of(accesses: Sequence[TileAccesses], names: ProgramNames, blocks: int) -> list[Need]:
    """The dependences between tasks of phases on some blocks, by their accesses; those on the latest phases first."""
    search = _Search(accesses, names, blocks)
    return [need for later in range(len(accesses)) for need in search.needs(later)]


@dataclass
class _Search:
    """Dependences found until now.

    Attributes:
        counters: those of each phase.
        ordered: for two phases, which tasks of the first end after which of the second.
    """

    accesses: Sequence[TileAccesses]
    names: ProgramNames
    blocks: int
    counters: dict[tuple[int, str], list[Counter]] = field(default_factory=dict)
    ordered: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def needs(self, later: int) -> list[Need]:
        """Dependences of a phase. One that follows from another moves that one's wait before its own tensors."""
        found: list[Need] = []
        orders: list[dict[int, np.ndarray]] = []
        for earlier in reversed(range(later)):
            for need in self._between(earlier, later):
                required = need.counter.boxes.intersect(need.boxes).T
                known = [i for i, order in enumerate(orders) if _covers(order.get(earlier), required)]
                if known:
                    other = found[known[0]]
                    found[known[0]] = replace(other, roots=(*other.roots, *need.roots))
                else:
                    found.append(need)
                    orders.append(self._order(need))
        for order in orders:
            for before, matrix in order.items():
                both = self.ordered.get((later, before))
                self.ordered[later, before] = matrix if both is None else both | matrix
        return found

    def _order(self, need: Need) -> dict[int, np.ndarray]:
        """For each earlier phase, after which of its tasks a wait ends."""
        mine = need.counter.order(need.boxes)
        before = [phase for phase in range(need.earlier) if (need.earlier, phase) in self.ordered]
        through = {phase: _through(mine, self.ordered[need.earlier, phase]) for phase in before}
        return {need.earlier: mine, **through}

    def _between(self, earlier: int, later: int) -> list[Need]:
        """The dependences of the tasks of a phase on those of an earlier one."""
        before, after = self.accesses[earlier], self.accesses[later]
        roots = [r for r in after.of if r in before.of and (before.writes(r) or after.writes(r))]
        needs = [need for root in roots if (need := self._by_tiles(earlier, later, root)) is not None]
        if len(needs) == len(roots):
            return needs
        tasks = Boxes.everything(before.grid.count)
        blocks = self.blocks if self.blocks < before.grid.count else None
        counter = self._counter(earlier, Counter("done", tasks, (1,), blocks))
        return [Need(earlier, later, counter, Boxes.everything(after.grid.count), tuple(roots))]

    def _by_tiles(self, earlier: int, later: int, root: ir.Var) -> Need | None:
        """The dependence for one tensor; None if tasks are not distinguished."""
        before, after = self.accesses[earlier], self.accesses[later]
        if before.form(root) is None or before.form(root) != after.form(root):
            return None
        mine = before.boxes(root, writes=not after.writes(root))
        theirs = after.boxes(root, writes=not before.writes(root))
        counter = counters_of(self.names.homes[root].name, mine, theirs, self.blocks)
        if not counter.is_simple:
            return None
        return Need(earlier, later, self._counter(earlier, counter), theirs, (root,))

    def _counter(self, phase: int, counter: Counter) -> Counter:
        """The counter under a name in the launch; the same one where another dependence has it."""
        known = self.counters.setdefault((phase, counter.name), [])
        same = [c for c in known if c.chunk == counter.chunk and c.boxes.is_like(counter.boxes)]
        if not same:
            number = f"_{len(known)}" if known else ""
            same = [replace(counter, name=f"phase{phase}{number}_{counter.name}")]
            known += same
        return same[0]


def _covers(order: np.ndarray | None, required: np.ndarray) -> bool:
    return order is not None and not (required & ~order).any()


def _through(later: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    """Order of tasks through those between them."""
    if earlier.all():
        return np.broadcast_to(later.any(axis=1, keepdims=True), (len(later), earlier.shape[1]))
    return (later.astype(np.float32) @ earlier.astype(np.float32)) > 0
