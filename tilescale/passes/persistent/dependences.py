# SPDX-License-Identifier: MIT
"""Dependences of tasks on those of earlier phases.

A task depends on those of earlier phases that write what it touches, or touch what it writes. A dependence that follows
from another one needs no wait of its own: signals and waits are transitive.

A loop of phases has two instances of each phase here: one for the first iteration and one for a later one, both with
the elements that a task touches in any iteration. Conflicts between more distant iterations are in order through those
between them, because a block executes the same tasks in each.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tilelang_core import ir
from tilescale.passes.persistent.counters import Counter, counters_of
from tilescale.passes.persistent.phases import Loop
from tilescale.program.effects import ProgramNames
from tilescale.program.tile_boxes import Boxes, TileAccesses

WIDER, CHUNKS = 2, 2
"""Factor of the number of tasks, and chunks, that a later task may wait for instead of another counter of a phase."""


@dataclass(frozen=True)
class Need:
    """Tasks of a phase need those of an earlier one, for what both touch.

    Attributes:
        counter: of the earlier phase.
        boxes: what the later tasks touch of it.
        roots: the tensors; a task waits before its first access to one.
        previous: whether the earlier tasks are those of the previous iteration of the loop around both.
    """

    earlier: int
    later: int
    counter: Counter
    boxes: Boxes
    roots: tuple[ir.Var, ...]
    previous: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for the dependences of two iterations that are the same."""
        return self.earlier, self.later, self.previous, id(self.counter), self.roots[0]


@dataclass(frozen=True)
class _Instance:
    """A phase in an iteration of the loop around it: the first one, or a later one."""

    phase: int
    loop: Loop | None
    again: bool = False


def needs_of(
    accesses: Sequence[TileAccesses], loops: Sequence[Loop | None], names: ProgramNames, blocks: int
) -> list[Need]:
    """The dependences between tasks of phases on some blocks, by their accesses; those on the latest phases first."""
    instances: list[_Instance] = []
    for loop, phases in itertools.groupby(range(len(loops)), loops.__getitem__):
        once = [_Instance(phase, loop) for phase in phases]
        instances += once if loop is None else [*once, *(replace(instance, again=True) for instance in once)]
    search = _Search(accesses, instances, names, blocks)
    found: dict[tuple[Any, ...], Need] = {}
    for later in range(len(instances)):
        for need in search.needs(later):
            one, other = instances[need.earlier], instances[later]
            previous = one.loop is not None and one.loop is other.loop and one.again != other.again
            of_phases = replace(need, earlier=one.phase, later=other.phase, previous=previous)
            known = found.get(of_phases.key, of_phases)
            found[of_phases.key] = replace(known, roots=tuple(dict.fromkeys((*known.roots, *need.roots))))
    return list(found.values())


@dataclass
class _Search:
    """Dependences found until now.

    Attributes:
        instances: of phases; `Need`s are between them.
        counters: those of each phase.
        ordered: for two instances, which tasks of the first end after which of the second.
    """

    accesses: Sequence[TileAccesses]
    instances: Sequence[_Instance]
    names: ProgramNames
    blocks: int
    counters: dict[tuple[int, str], list[Counter]] = field(default_factory=dict)
    ordered: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def needs(self, later: int) -> list[Need]:
        """Dependences of an instance. One that follows from another moves that one's wait before its own tensors."""
        found: list[Need] = []
        orders: list[dict[int, np.ndarray]] = []
        own = self._own(later)
        for earlier in reversed([instance for instance in range(later) if not self._is_repeated(instance, later)]):
            for need in self._between(earlier, later):
                required = need.counter.boxes.intersect(need.boxes).T
                if _covers(own.get(earlier), required):
                    continue
                known = [i for i, order in enumerate(orders) if _covers(order.get(earlier), required)]
                if known:
                    other = found[known[0]]
                    found[known[0]] = replace(other, roots=(*other.roots, *need.roots))
                else:
                    found.append(need)
                    orders.append(self._order(need))
        for order in (own, *orders):
            for before, matrix in order.items():
                both = self.ordered.get((later, before))
                self.ordered[later, before] = matrix if both is None else both | matrix
        return found

    def _is_repeated(self, earlier: int, later: int) -> bool:
        """Whether an instance in a loop is followed by another one before a later phase outside of it."""
        instance = self.instances[earlier]
        return instance.loop is not None and instance.loop is not self.instances[later].loop and not instance.again

    def _own(self, later: int) -> dict[int, np.ndarray]:
        """The order that follows from program order: a block has executed its tasks in the previous iteration too."""
        instance = self.instances[later]
        if not instance.again:
            return {}
        same = np.eye(self._of(later).grid.count, dtype=bool)
        return self._after(self.instances.index(replace(instance, again=False)), same)

    def _order(self, need: Need) -> dict[int, np.ndarray]:
        """For each earlier instance, after which of its tasks a wait ends."""
        return self._after(need.earlier, need.counter.order(need.boxes))

    def _after(self, earlier: int, mine: np.ndarray) -> dict[int, np.ndarray]:
        """The order of tasks that begin after some of an earlier instance, through these."""
        before = [instance for instance in range(earlier) if (earlier, instance) in self.ordered]
        return {earlier: mine, **{instance: _through(mine, self.ordered[earlier, instance]) for instance in before}}

    def _between(self, earlier: int, later: int) -> list[Need]:
        """The dependences of the tasks of an instance on those of an earlier one."""
        before, after = self._of(earlier), self._of(later)
        shared = [r for r in after.of if r in before.of and (before.writes(r) or after.writes(r))]
        roots = [root for root in shared if not self._is_of_iteration(earlier, later, root)]
        needs = [need for root in roots if (need := self._by_tiles(earlier, later, root)) is not None]
        if len(needs) == len(roots):
            return needs
        tasks = Boxes.everything(before.grid.count)
        blocks = self.blocks if self.blocks < before.grid.count else None
        theirs = Boxes.everything(after.grid.count)
        counter = self._counter(earlier, Counter("done", tasks, (1,), blocks), theirs)
        return [Need(earlier, later, counter, theirs, tuple(roots))]

    def _is_of_iteration(self, earlier: int, later: int, root: ir.Var) -> bool:
        """Whether two instances in different iterations touch other elements of a tensor: those of their iteration."""
        one, other = self.instances[earlier], self.instances[later]
        if one.loop is None or one.loop is not other.loop or one.again == other.again:
            return False
        before, after, var = self._of(earlier), self._of(later), one.loop.var
        is_alike = before.form(root) is not None and before.form(root) == after.form(root)
        return is_alike and bool(before.dimensions_at(root, var) & after.dimensions_at(root, var))

    def _by_tiles(self, earlier: int, later: int, root: ir.Var) -> Need | None:
        """The dependence for one tensor; None if tasks are not distinguished."""
        before, after = self._of(earlier), self._of(later)
        if before.form(root) is None or before.form(root) != after.form(root):
            return None
        mine = before.boxes(root, writes=not after.writes(root))
        theirs = after.boxes(root, writes=not before.writes(root))
        counter = counters_of(self.names.homes[root].name, mine, theirs, self.blocks)
        if not counter.is_simple:
            return None
        return Need(earlier, later, self._counter(earlier, counter, theirs), theirs, (root,))

    def _of(self, instance: int) -> TileAccesses:
        return self.accesses[self.instances[instance].phase]

    def _counter(self, instance: int, counter: Counter, later: Boxes) -> Counter:
        """The counter under a name in the launch; that of another dependence if it serves, as a signal takes longer
        than the wait for a few more tasks.
        """
        phase = self.instances[instance].phase
        known = self.counters.setdefault((phase, counter.name), [])
        most = WIDER * counter.order(later).mean()

        def serves(other: Counter) -> bool:
            return other.order(later).mean() <= most and other.touched(later).sum(axis=1).max() <= CHUNKS

        alike = [c for c in known if c.boxes.is_like(counter.boxes)]
        same = [c for c in alike if c.chunk == counter.chunk] or list(filter(serves, alike))
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
