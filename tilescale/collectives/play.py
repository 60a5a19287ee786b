# SPDX-License-Identifier: MIT
"""Reference semantics of the rounds of a collective: values pass between units exactly as its messages say.

A round's messages are read before any arrives. The values that arrive for one piece are combined with the local one at
once, in the order of ranks, so that units that combine the same values get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilescale.collectives.round_schedule import Round, RoundSchedule

Combine = Callable[[Sequence[Any]], Any]
"""Values of a piece in the order of ranks -> their combination."""


def play(plan: RoundSchedule, held: Sequence[dict[int, Any]], combine: Combine) -> None:
    """Run all rounds. `held`: for each unit, piece -> its value, updated in place."""
    for r in plan.rounds:
        _play(r, held, combine)


def arrivals(r: Round) -> dict[tuple[int, int], tuple[list[int], bool]]:
    """Messages that arrive in a round: (target, piece) -> the senders, and whether they are combined with the target's
    value."""
    arrived: dict[tuple[int, int], tuple[list[int], bool]] = {}
    fields = (r.source, r.target, r.first, r.count, r.combine)
    for source, target, first, count, adds in zip(*(array.tolist() for array in fields), strict=True):
        for piece in range(first, first + r.stride * count, r.stride):
            senders, combined = arrived.get((target, piece), ([], False))
            arrived[target, piece] = [*senders, source], combined or adds
    return arrived


def _play(r: Round, held: Sequence[dict[int, Any]], combine: Combine) -> None:
    known: dict[tuple[int, ...], Any] = {}
    results = []
    for (target, piece), (senders, combined) in arrivals(r).items():
        if not combined:
            results.append((target, piece, held[senders[-1]][piece]))
            continue
        values = [held[unit][piece] for unit in sorted([*senders, target])]
        # Units that combine the same values share one computation.
        key = tuple(map(id, values))
        if key not in known:
            known[key] = combine(values)
        results.append((target, piece, known[key]))
    for target, piece, value in results:
        held[target][piece] = value
