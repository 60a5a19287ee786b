# SPDX-License-Identifier: MIT
"""Exchanges of every unit with every unit at once: the lowest latency where units reach each other directly.

Each begins with a barrier, after which every unit's memory may be written. Chan, Heimlich, Purkayastha and van de
Geijn, "Collective communication: theory, practice, and experience", 2007, have these as the building blocks of
short-vector and long-vector algorithms.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilescale.collectives.record import FORMS, PROGRAMS, TENSORS, TILES, Algorithm
from tilescale.collectives.round_schedule import BARRIER, Round, RoundSchedule, everyone


def barrier_round(units: int) -> Round:
    """Every unit notifies every other unit."""
    return Round.of(*everyone(units), count=BARRIER)


def barrier(shape: tuple[int, ...]) -> RoundSchedule:
    """A barrier in one round, in which all units notify all."""
    units = int(np.prod(shape))
    return RoundSchedule("barrier", units, 1, (barrier_round(units),))


def scatter(units: int) -> Round:
    """A reduce-scatter: part r of every unit goes to unit r, which adds the parts."""
    source, target = everyone(units)
    return Round.of(source, target, target, combine=True)


def gather(units: int) -> Round:
    """An all-gather: unit r's part goes to all."""
    source, target = everyone(units)
    return Round.of(source, target, source)


def one_shot(shape: tuple[int, ...]) -> RoundSchedule:
    """An all-reduce in which every unit receives the whole tensor of every other unit."""
    units = int(np.prod(shape))
    return RoundSchedule("allreduce", units, 1, (barrier_round(units), Round.of(*everyone(units), combine=True)))


def two_shot(shape: tuple[int, ...]) -> RoundSchedule:
    """An all-reduce as a reduce-scatter and an all-gather."""
    units = int(np.prod(shape))
    return RoundSchedule(
        "allreduce", units, units, (barrier_round(units), scatter(units), barrier_round(units), gather(units))
    )


def reduce_scatter(shape: tuple[int, ...]) -> RoundSchedule:
    """Parts go straight to their owners."""
    units = int(np.prod(shape))
    return RoundSchedule("reduce_scatter", units, units, (barrier_round(units), scatter(units)), np.arange(units))


def all_gather(shape: tuple[int, ...]) -> RoundSchedule:
    """Parts go straight to all."""
    units = int(np.prod(shape))
    return RoundSchedule("all_gather", units, units, (barrier_round(units), gather(units)), np.arange(units))


def all_to_all(shape: tuple[int, ...]) -> RoundSchedule:
    """All parts at once."""
    units = int(np.prod(shape))
    source, target = everyone(units)
    rounds = (barrier_round(units), Round.of(source, target, source * units + target))
    return RoundSchedule("all_to_all", units, units, rounds)


def all_to_all_v(shape: tuple[int, ...]) -> RoundSchedule:
    """An all-to-all of parts of any sizes: a unit that announces itself also sends the sizes of its parts."""
    return replace(all_to_all(shape), operation="all_to_all_v")


def broadcast(shape: tuple[int, ...]) -> RoundSchedule:
    """The root sends to all."""
    units = int(np.prod(shape))
    targets = np.arange(1, units)
    return RoundSchedule("broadcast", units, 1, (barrier_round(units), Round.of(np.zeros_like(targets), targets)))


MOST = 256
"""Largest number of units for direct exchange; every unit needs a buffer for each other one."""

ALGORITHMS = (
    Algorithm(
        name="one_shot",
        title="Every unit sends its whole tensor to every other one; each combines all of them in rank order.",
        schedules={"allreduce": one_shot},
        forms=FORMS,
        most=MOST,
    ),
    Algorithm(
        name="two_shot",
        title="A reduce-scatter, then an all-gather, both directly.",
        schedules={"allreduce": two_shot},
        forms=(TENSORS, TILES, PROGRAMS),
        most=MOST,
    ),
    Algorithm(
        name="direct",
        title="Parts go directly to their destinations; for a barrier, a signal to every unit.",
        schedules={
            "reduce_scatter": reduce_scatter,
            "all_gather": all_gather,
            "all_to_all": all_to_all,
            "all_to_all_v": all_to_all_v,
            "broadcast": broadcast,
            "barrier": barrier,
        },
        forms=FORMS,
        only={"all_to_all_v": (TENSORS,)},
        most=MOST,
    ),
)
