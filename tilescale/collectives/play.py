# SPDX-License-Identifier: MIT
"""What the rounds of a collective compute: values pass between units exactly as its messages say.

A round's messages are read before any arrives. What a unit gets for one piece is combined with its own at once, in the
order of ranks, so that who combines the same values gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilescale.collectives.schedule import Round, Schedule

Combine = Callable[[Sequence[Any]], Any]
"""Values of a piece in the order of ranks -> their combination."""


def play(plan: Schedule, held: Sequence[dict[int, Any]], combine: Combine) -> None:
    """Run all rounds.

    Args:
        held: for each unit, piece -> the value that it begins with; afterwards what it has.
    """
    for r in plan.rounds:
        _play(r, held, combine)


def _play(r: Round, held: Sequence[dict[int, Any]], combine: Combine) -> None:
    arrived: dict[tuple[int, int], list[tuple[int, Any]]] = {}
    combined: set[tuple[int, int]] = set()
    fields = (r.source, r.target, r.first, r.count, r.combine)
    for source, target, first, count, adds in zip(*(array.tolist() for array in fields), strict=True):
        for piece in range(first, first + r.stride * count, r.stride):
            arrived.setdefault((target, piece), []).append((source, held[source][piece]))
            if adds:
                combined.add((target, piece))
    known: dict[tuple[int, ...], Any] = {}
    results = []
    for (target, piece), values in arrived.items():
        if (target, piece) not in combined:
            results.append((target, piece, values[-1][1]))
            continue
        ranked = sorted([*values, (target, held[target][piece])], key=lambda pair: pair[0])
        # Everybody who combines the same values does it once for all.
        key = tuple(id(value) for _, value in ranked)
        if key not in known:
            known[key] = combine([value for _, value in ranked])
        results.append((target, piece, known[key]))
    for target, piece, value in results:
        held[target][piece] = value
