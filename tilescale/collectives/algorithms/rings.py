# SPDX-License-Identifier: MIT
"""Rings: every unit speaks to its next neighbour only, which uses the whole bandwidth of both.

Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009. Several rings at once
that enter each group of units at another member carry a part each, so that all ports of a group work (as NCCL's
channels do).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from tilescale.collectives.record import TENSORS, TILES, Algorithm
from tilescale.collectives.round_schedule import Numbers, Round, RoundSchedule, lift


def _neighbours(units: int) -> tuple[Numbers, Numbers]:
    me = np.arange(units)
    return me, (me + 1) % units


def reduce_scatter(units: int) -> Iterator[Round]:
    """In n-1 steps a partial sum passes every unit and ends at its owner."""
    me, after = _neighbours(units)
    for step in range(units - 1):
        yield Round.of(me, after, (me - step - 1) % units, combine=True)


def all_gather(units: int) -> Iterator[Round]:
    """In n-1 steps every unit forwards the piece that it received last."""
    me, after = _neighbours(units)
    for step in range(units - 1):
        yield Round.of(me, after, (me - step) % units)


def allreduce(units: int) -> Iterator[Round]:
    """A reduce-scatter, then an all-gather."""
    yield from reduce_scatter(units)
    yield from all_gather(units)


ROUNDS = {"allreduce": allreduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}


def one(operation: str, shape: tuple[int, ...]) -> RoundSchedule:
    """One ring through all units in order."""
    units = int(np.prod(shape))
    return RoundSchedule(operation, units, units, tuple(ROUNDS[operation](units)), np.arange(units))


def several(operation: str, shape: tuple[int, ...]) -> RoundSchedule:
    """As many rings as the innermost groups have members, each carrying its part of the tensor."""
    units, inner = int(np.prod(shape)), shape[-1]
    member, ring = np.arange(units) % inner, np.arange(inner)[:, None]
    # Ring c visits the members of every group in the order c, c+1, ..., so it enters and leaves each group elsewhere.
    orders = (np.arange(units) - member) + (member + ring) % inner
    rounds = lift(ROUNDS[operation](units), orders, np.arange(inner) * units)
    home = np.zeros(0, np.int64) if operation == "allreduce" else orders.ravel()
    return RoundSchedule(operation, units, inner * units, tuple(rounds), home)


def pipeline(shape: tuple[int, ...], segments: int) -> RoundSchedule:
    """A broadcast along the chain 0, 1, 2, ...: unit i passes on segment s while unit i-1 sends it segment s+1."""
    units = int(np.prod(shape))
    me = np.arange(units - 1)
    rounds = tuple(_step(me, step, segments) for step in range(units - 2 + segments) if units > 1)
    return RoundSchedule("broadcast", units, segments, rounds)


def _step(me: Numbers, step: int, segments: int) -> Round:
    active = me[(step - me >= 0) & (step - me < segments)]
    return Round.of(active, active + 1, step - active)


def pairwise(shape: tuple[int, ...]) -> RoundSchedule:
    """An all-to-all in n-1 steps: in step k unit i sends to unit i+k (Thakur et al., 2005)."""
    units = int(np.prod(shape))
    me = np.arange(units)
    targets = ((me + k) % units for k in range(1, units))
    rounds = tuple(Round.of(me, target, me * units + target) for target in targets)
    return RoundSchedule("all_to_all", units, units, rounds)


def pairwise_v(shape: tuple[int, ...]) -> RoundSchedule:
    """A pairwise exchange of parts of any sizes."""
    return replace(pairwise(shape), operation="all_to_all_v")


ALGORITHMS = (
    Algorithm(
        name="ring",
        title="Every unit sends to its next neighbour only; a broadcast is a pipeline along the ring.",
        schedules={**{operation: partial(one, operation) for operation in ROUNDS}, "broadcast": pipeline},
        segmented=frozenset({"broadcast"}),
        forms=(TENSORS, TILES),
    ),
    Algorithm(
        name="rings",
        title="As many rings as the innermost groups have members, each entering the groups at another one.",
        schedules={operation: partial(several, operation) for operation in ROUNDS},
        forms=(TENSORS, TILES),
    ),
    Algorithm(
        name="pairwise",
        title="In step k each unit sends to the one at distance k.",
        schedules={"all_to_all": pairwise},
        forms=(TENSORS, TILES),
    ),
)
