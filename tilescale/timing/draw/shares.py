# SPDX-License-Identifier: MIT
"""Concurrent activity of many engines, as shares of a row's height.

Engines that are alike (all programs of a device, all loads that run ahead of them) are a family. A family that is as
busy as it ever gets fills the row, and where several families are busy they share it. The sides of a program that forks
are parts of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from tilescale.timing.timeline import KINDS, Span


@cache
def family(engine: str) -> str:
    """An engine's name without its numbers: "block 17.0/1 ahead" is of the family "block ahead"."""
    return re.sub(r"[\s/]*\d+(\.\d+)*", "", engine).strip()


@dataclass(frozen=True, eq=False)
class ActivityShares:
    """Shares over time.

    Attributes:
        edges: times at which they change, s.
        heights: [kind, interval between two edges] -> share of the row, all kinds together at most 1.
    """

    edges: np.ndarray
    heights: np.ndarray

    def averaged(self, columns: int) -> ActivityShares:
        """The means over `columns` equal intervals, where there are more of them."""
        if self.heights.shape[1] <= columns:
            return self
        edges = np.linspace(self.edges[0], self.edges[-1], columns + 1)
        sums = np.concatenate(
            [np.zeros((len(self.heights), 1)), np.cumsum(self.heights * np.diff(self.edges), axis=1)], axis=1
        )
        at_edges = np.array([np.interp(edges, self.edges, row) for row in sums])
        return ActivityShares(edges, np.diff(at_edges, axis=1) / np.diff(edges))


def peaks(rows: Iterable[Sequence[Span]]) -> dict[str, int]:
    """Family -> how many spans of it there are at a time at most, over all rows."""
    found: dict[str, int] = {}
    for spans in rows:
        members: dict[str, list[Span]] = {}
        for span in spans:
            members.setdefault(family(span.engine), []).append(span)
        for name, mine in members.items():
            _, counts = _counts(mine, {name: 1})
            found[name] = max(found.get(name, 1), round(float(counts.sum(0).max(initial=0.0))))
    return found


def together(most: dict[str, int]) -> dict[str, int]:
    """Peaks for rows of several families: additional activity of a few among many programs ("block signals") counts as
    few."""
    return {name: max(count, most.get(name.split(" ")[0], 1)) for name, count in most.items()}


def shares(spans: Sequence[Span], most: dict[str, int], end_s: float) -> ActivityShares:
    """The shares of one row from 0 to its end; `most` is from `peaks`."""
    edges, counts = _counts(spans, most)
    edges = np.concatenate([[0.0], edges, [max(end_s, edges[-1] if len(edges) else 0.0)]])
    heights = np.concatenate([np.zeros((len(KINDS), 1)), counts], axis=1)
    return ActivityShares(edges, heights / np.maximum(1.0, heights.sum(0)))


@cache
def _fork(engine: str) -> tuple[str, str] | None:
    """The program and the activity of a side of a program, such as "block 17.0/1 ahead"."""
    found = re.fullmatch(r"(.*?)((?:/\d+)+)(.*)", engine)
    return (found[1], found[3]) if found else None


def _sides(spans: Sequence[Span]) -> dict[tuple[str, str] | None, int]:
    """Number of sides of forked programs: together they count as one program."""
    forked = {(_fork(engine), engine) for engine in {span.engine for span in spans} if _fork(engine)}
    return Counter(fork for fork, _ in forked)


def _counts(spans: Sequence[Span], most: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Times at which something changes, and the number of active spans of each kind from there on."""
    sides = _sides(spans)
    weights = np.array([1.0 / most[family(span.engine)] / sides.get(_fork(span.engine), 1) for span in spans])
    kinds = np.array([KINDS.index(span.kind) for span in spans], np.int64)
    times = np.array([[span.begin_s, span.end_s] for span in spans]).reshape(-1, 2)
    edges, place = np.unique(times, return_inverse=True)
    place = place.reshape(-1, 2)
    change = np.zeros((len(KINDS), len(edges)))
    np.add.at(change, (kinds, place[:, 0]), weights)
    np.add.at(change, (kinds, place[:, 1]), -weights)
    return edges, np.maximum(0.0, np.cumsum(change, axis=1))
