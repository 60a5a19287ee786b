# SPDX-License-Identifier: MIT
"""Trees: few latencies.

A binomial tree for broadcasts (Thakur, Rabenseifner and Gropp, 2005). For all-reduces two binary trees at once, each
carrying half of the tensor in segments: an inner unit of one tree is a leaf of the other, so that no unit sends more
than twice the tensor (Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
2009).
"""

from __future__ import annotations

import numpy as np

from tilescale.collectives.record import TENSORS, TILES, Algorithm
from tilescale.collectives.round_schedule import Numbers, Round, RoundSchedule


def broadcast(shape: tuple[int, ...]) -> RoundSchedule:
    """A binomial tree: in each step a unit that has the tensor sends it to one more unit."""
    units, have, rounds = int(np.prod(shape)), 1, []
    while have < units:
        targets = np.arange(have, min(2 * have, units))
        rounds.append(Round.of(targets - have, targets))
        have *= 2
    return RoundSchedule("broadcast", units, 1, tuple(rounds))


def allreduce(shape: tuple[int, ...], segments: int) -> RoundSchedule:
    """Up and down both trees at once, `segments` of each half one after the other."""
    units = int(np.prod(shape))
    trees = [_Tree(units, shift, shift * segments) for shift in range(2)]
    deepest = trees[0].deepest
    rounds = (
        Round.joined([part for tree in trees for part in (tree.up(step, segments), tree.down(step, segments))])
        for step in range(2 * deepest + segments - 1)
        if units > 1
    )
    return RoundSchedule("allreduce", units, 2 * segments, tuple(rounds))


class _Tree:
    """A binary tree over units in order: even ones are inner nodes, odd ones are leaves; `shift` renames unit i to
    i+1."""

    def __init__(self, units: int, shift: int, first: int):
        place = np.arange(1, units)
        lowest = place & -place
        above = (place ^ lowest) | (lowest << 1)
        parent = np.where(above < units, above, place ^ lowest)
        self.depth = _depths(parent)
        self.deepest = int(self.depth.max(initial=0))
        self.child, self.parent, self.first = (place + shift) % units, (parent + shift) % units, first

    def up(self, step: int, segments: int) -> Round:
        """Messages to the parents: the deepest units begin."""
        segment = step - (self.deepest - self.depth)
        return self._round(self.child, self.parent, segment, segments, combine=True)

    def down(self, step: int, segments: int) -> Round:
        """Messages from the root: a segment leaves the root in the step after it arrived there."""
        segment = step - (self.deepest + self.depth - 1)
        return self._round(self.parent, self.child, segment, segments, combine=False)

    def _round(self, source: Numbers, target: Numbers, segment: Numbers, segments: int, combine: bool) -> Round:
        active = (segment >= 0) & (segment < segments)
        return Round.of(source[active], target[active], self.first + segment[active], combine=combine)


def _depths(parent: Numbers) -> Numbers:
    """Distance to the root, unit 0, of units 1, 2, ..."""
    depth, above = np.ones_like(parent), parent
    while above.any():
        depth, above = depth + (above > 0), np.where(above > 0, parent[above - 1], 0)
    return depth


ALGORITHMS = (
    Algorithm(
        name="tree",
        title="A broadcast down a binomial tree; an all-reduce up and down two binary trees at once, in segments.",
        schedules={"allreduce": allreduce, "broadcast": broadcast},
        segmented=frozenset({"allreduce"}),
        forms=(TENSORS, TILES),
    ),
)
