# SPDX-License-Identifier: MIT
"""Recursive halving and doubling: partners at distances 1, 2, 4, ..., so log2(n) steps.

Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005; the all-reduce by
halving and doubling is Rabenseifner's. The barrier in log2(n) steps is the dissemination barrier (Hensgen, Finkel and
Manber, 1988).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tilescale.collectives.record import FORMS, TENSORS, TILES, Algorithm
from tilescale.collectives.round_schedule import BARRIER, Round, RoundSchedule


def halving(units: int) -> Iterator[Round]:
    """A reduce-scatter: each step exchanges half of the remaining pieces with a partner at half the distance."""
    me, distance = np.arange(units), units // 2
    while distance:
        partner = me ^ distance
        yield Round.of(me, partner, partner // distance * distance, distance, combine=True)
        distance //= 2


def doubling(units: int) -> Iterator[Round]:
    """An all-gather: each step exchanges all that is known with a partner twice as far away."""
    me, distance = np.arange(units), 1
    while distance < units:
        yield Round.of(me, me ^ distance, me // distance * distance, distance)
        distance *= 2


def reduce_scatter(shape: tuple[int, ...]) -> RoundSchedule:
    """Recursive halving."""
    units = int(np.prod(shape))
    return RoundSchedule("reduce_scatter", units, units, tuple(halving(units)), np.arange(units))


def all_gather(shape: tuple[int, ...]) -> RoundSchedule:
    """Recursive doubling."""
    units = int(np.prod(shape))
    return RoundSchedule("all_gather", units, units, tuple(doubling(units)), np.arange(units))


def allreduce(shape: tuple[int, ...]) -> RoundSchedule:
    """Rabenseifner's: halving, then doubling. Best for large tensors where latency counts too."""

    def rounds(core: int) -> Iterator[Round]:
        yield from halving(core)
        yield from doubling(core)

    return _folded(shape, rounds, pieces_per_core=1)


def exchange(shape: tuple[int, ...]) -> RoundSchedule:
    """An all-reduce by recursive doubling of whole tensors: fewest steps, most bytes."""

    def rounds(core: int) -> Iterator[Round]:
        me, distance = np.arange(core), 1
        while distance < core:
            yield Round.of(me, me ^ distance, combine=True)
            distance *= 2

    return _folded(shape, rounds, pieces_per_core=0)


def dissemination(shape: tuple[int, ...]) -> RoundSchedule:
    """A barrier: in step k each unit notifies the one 2^k further on."""
    units, distance, rounds = int(np.prod(shape)), 1, []
    me = np.arange(units)
    while distance < units:
        rounds.append(Round.of(me, (me + distance) % units, count=BARRIER))
        distance *= 2
    return RoundSchedule("barrier", units, 1, tuple(rounds))


def _folded(shape: tuple[int, ...], rounds: Callable[[int], Iterator[Round]], pieces_per_core: int) -> RoundSchedule:
    """An all-reduce among 2^k units; the others give their tensors away before and get the result after."""
    units = int(np.prod(shape))
    core = 1 << (units.bit_length() - 1)
    pieces = max(1, core * pieces_per_core)
    extra = np.arange(core, units)
    before = [Round.of(extra, extra - core, 0, pieces, combine=True)] if len(extra) else []
    after = [Round.of(extra - core, extra, 0, pieces)] if len(extra) else []
    return RoundSchedule("allreduce", units, pieces, (*before, *rounds(core), *after))


ALGORITHMS = (
    Algorithm(
        name="halving_doubling",
        title="Recursive halving, then doubling; units beyond a power of two give their tensors away first.",
        schedules={"allreduce": allreduce},
        forms=(TENSORS, TILES),
    ),
    Algorithm(
        name="recursive_doubling",
        title="Partners at distances 1, 2, 4, ... exchange whole tensors: fewest steps, most bytes.",
        schedules={"allreduce": exchange},
        forms=(TENSORS, TILES),
    ),
    Algorithm(
        name="halving",
        title="Each step exchanges half of what is left with a partner half as far away.",
        schedules={"reduce_scatter": reduce_scatter},
        forms=(TENSORS, TILES),
        power_of_two=True,
    ),
    Algorithm(
        name="doubling",
        title="Each step exchanges all that is known with a partner twice as far away.",
        schedules={"all_gather": all_gather},
        forms=(TENSORS, TILES),
        power_of_two=True,
    ),
    Algorithm(
        name="dissemination",
        title="Dissemination: in step k each unit signals the one at distance 2^k.",
        schedules={"barrier": dissemination},
        forms=FORMS,
    ),
)
