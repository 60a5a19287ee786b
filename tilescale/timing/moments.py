# SPDX-License-Identifier: MIT
"""The timeline of a launch on a GPU, from the moments at which its blocks began and ended waits and signals.

The time of a GPU advances in steps, its SMs' clocks in cycles. All SMs have one rate: that of their clocks over the
launch. The time of a block is that of its clock, moved so that no recorded time is later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilescale.errors import Location
from tilescale.timing.timeline import Span, Timeline

WAITS, WAITED, SIGNALS, SIGNALLED = range(4)
"""Kinds of moments, as headers/sync.cuh numbers them."""

_SITE, _CLOCK = 2, 16
"""Bits below the site, and below the clock, in a word."""


@dataclass(frozen=True)
class Moment:
    """When a block began or ended something, in nanoseconds and in cycles of its SM."""

    time: int
    clock: int
    site: int
    kind: int


def moments_of(words: Sequence[int], count: int) -> list[list[Moment]]:
    """The moments of each block, of which `count` are kept: two words each, zero where there was none."""
    blocks = []
    for first in range(0, len(words), 2 * count):
        pairs = zip(words[first : first + 2 * count : 2], words[first + 1 : first + 2 * count : 2], strict=True)
        found = [Moment(t, w >> _CLOCK, (w & (1 << _CLOCK) - 1) >> _SITE, w & (1 << _SITE) - 1) for t, w in pairs if t]
        blocks.append(found)
    return blocks


def timeline_of(
    blocks: Sequence[Sequence[Moment]], sites: Sequence[tuple[str, Location | None]], title: str
) -> Timeline:
    """Waits, signals, and what blocks did in between: it has the name of the wait or signal at its end. `sites`: the
    name and the line of each wait and signal."""
    rate = _nanoseconds(blocks)
    spans = sorted((s for n, block in enumerate(blocks) for s in _spans(n, block, rate, sites)), key=lambda s: s.end_s)
    begin = min((span.begin_s for span in spans), default=0.0)
    moved = [span._replace(begin_s=span.begin_s - begin, end_s=span.end_s - begin) for span in spans]
    return Timeline("device", moved, (), max((span.end_s for span in moved), default=0.0), title)


def _nanoseconds(blocks: Sequence[Sequence[Moment]]) -> float:
    ends = [(block[0], block[-1]) for block in blocks if block]
    cycles = sum(last.clock - first.clock for first, last in ends)
    return sum(last.time - first.time for first, last in ends) / cycles if cycles else 1.0


def _spans(
    number: int, block: Sequence[Moment], rate: float, sites: Sequence[tuple[str, Location | None]]
) -> Iterator[Span]:
    at = max((m.time - m.clock * rate for m in block), default=0.0)
    for before, after in zip(block, block[1:], strict=False):
        name, where = sites[after.site]
        is_inside = before.site == after.site and (before.kind, after.kind) in ((WAITS, WAITED), (SIGNALS, SIGNALLED))
        kind = "compute" if not is_inside else "wait" if after.kind == WAITED else "sync"
        begin, end = ((at + m.clock * rate) * 1e-9 for m in (before, after))
        unit, what = f"block {number}", name if is_inside else f"until {name}"
        yield Span(0, unit, unit, what, kind, begin, end, where=where)
