# SPDX-License-Identifier: MIT
"""Exchanges by copies that the host starts, every unit to every unit: no program moves data.

These are the schedules of `direct.py` without reductions, which a copy engine cannot compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilescale.collectives.algorithms import direct
from tilescale.collectives.record import TENSORS, Algorithm
from tilescale.collectives.round_schedule import Round, RoundSchedule


def copied(make: Callable[[tuple[int, ...]], RoundSchedule]) -> Callable[[tuple[int, ...]], RoundSchedule]:
    """A schedule whose messages the host starts, except those that are combined or announce a unit."""

    def started(r: Round) -> Round:
        return replace(r, by_host=bool(r.count.any()) and not r.combine.any())

    def schedule(shape: tuple[int, ...]) -> RoundSchedule:
        plan = make(shape)
        return replace(plan, rounds=tuple(started(r) for r in plan.rounds))

    return schedule


ALGORITHMS = (
    Algorithm(
        name="copy_engine",
        title="Parts go directly to their destinations, by copies that the host starts.",
        schedules={
            "all_gather": copied(direct.all_gather),
            "all_to_all": copied(direct.all_to_all),
            "broadcast": copied(direct.broadcast),
        },
        forms=(TENSORS,),
        by_host=True,
        most=direct.MOST,
        takes_functions=False,
    ),
)
