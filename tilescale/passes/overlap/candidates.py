# SPDX-License-Identifier: MIT
"""Schedules of one program to measure: each transfer in order, and overlapped with the fastest estimated chunks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from tilescale.passes.overlap.estimate import by_estimate
from tilescale.passes.overlap.schedule import GRID, QUEUE, Move, Schedule

CHUNKS = 3
"""Numbers of rows that are tried with each carrier."""


def candidates(schedule: Schedule, most: int) -> list[tuple[Schedule, float]]:
    """Schedules of the same program, each with the seconds that it is estimated to take, the least first.

    Args:
        schedule: the compiler's decision, with its estimates.
        most: how many at most; the one that leaves all in order is among them.
    """
    every = [
        (Schedule([move for move, _ in chosen]), sum(seconds for _, seconds in chosen))
        for chosen in itertools.product(*(list(_options(move)) for move in schedule.moves))
    ]
    in_order = [each for each in every if not any(move.overlapped for move in each[0].moves)]
    others = [each for each in every if each not in in_order]
    best = sorted(others, key=lambda each: each[1])[: most - 1]
    return sorted([*best, *in_order], key=lambda each: each[1])


def _options(move: Move) -> Iterator[tuple[Move, float]]:
    """Options for a collective, and the estimated seconds of each with its grids."""
    yield replace(move, overlapped=False, carrier=None, adds=None, chunk=None), move.in_order_s or 0.0
    for carrier in dict.fromkeys(carrier for carrier, _ in move.estimates):
        times = {chunk: seconds for (by, chunk), seconds in move.estimates.items() if by == carrier}
        chunks = by_estimate(times)[:CHUNKS]
        best = replace(move, overlapped=True, carrier=carrier, chunk=chunks[0], adds=None, ordered=True)
        others = [replace(best, chunk=chunk) for chunk in chunks[1:]]
        if carrier == QUEUE:
            others.append(replace(best, adds=GRID))
        for each in (best, *others, replace(best, ordered=False)):
            yield each, times[each.chunk or 0]
