# SPDX-License-Identifier: MIT
"""Collectives of groups within groups: inside the innermost ones first, so that little crosses their borders.

For nodes of devices, and for meshes one dimension after the other (the bucket algorithms of Chan et al., 2007). All
groups of a dimension work at the same time, by rings, in fewer steps by recursive halving and doubling, or in one where
every unit sends to every unit; an all-to-all goes along one dimension after the other with the data of all units beyond
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from tilescale.collectives.algorithms import direct, doubling, rings, trees
from tilescale.collectives.record import TENSORS, TILES, Algorithm
from tilescale.collectives.round_schedule import BARRIER, Numbers, Round, RoundSchedule, lift

Steps = Callable[[int], Iterator[Round]]


def reduce_scatter(name: str, shape: tuple[int, ...]) -> RoundSchedule:
    """Along the innermost dimension first: the outer ones see a part of the tensor only."""
    units, steps = int(np.prod(shape)), _STEPS[name][0]
    rounds = tuple(r for axis in reversed(range(len(shape))) for r in _along(shape, axis, steps))
    return RoundSchedule("reduce_scatter", units, units, rounds, _homes(shape))


def all_gather(name: str, shape: tuple[int, ...]) -> RoundSchedule:
    """Along the outermost dimension first, while tensors are small."""
    units, steps = int(np.prod(shape)), _STEPS[name][1]
    rounds = tuple(r for axis in range(len(shape)) for r in _along(shape, axis, steps))
    return RoundSchedule("all_gather", units, units, rounds, _homes(shape))


def allreduce(name: str, shape: tuple[int, ...]) -> RoundSchedule:
    """The reduce-scatter, then the all-gather."""
    units = int(np.prod(shape))
    rounds = (*reduce_scatter(name, shape).rounds, *all_gather(name, shape).rounds)
    return RoundSchedule("allreduce", units, units, rounds)


def _if_power_of_two(steps: Steps, otherwise: Steps) -> Steps:
    return lambda units: otherwise(units) if units & (units - 1) else steps(units)


def _at_once(step: Callable[[int], Round]) -> Steps:
    """All units to all units, after a barrier."""
    return lambda units: iter((direct.barrier_round(units), step(units)) if units > 1 else ())


_STEPS: dict[str, tuple[Steps, Steps]] = {
    "hierarchical": (rings.reduce_scatter, rings.all_gather),
    "hierarchical_doubling": (
        _if_power_of_two(doubling.halving, rings.reduce_scatter),
        _if_power_of_two(doubling.doubling, rings.all_gather),
    ),
    "hierarchical_direct": (_at_once(direct.scatter), _at_once(direct.gather)),
}
"""Name -> the reduce-scatter and the all-gather along one dimension."""


def broadcast(steps: Callable[[tuple[int, ...]], RoundSchedule], shape: tuple[int, ...]) -> RoundSchedule:
    """Along the outermost dimension first."""
    units, rounds = int(np.prod(shape)), list[Round]()
    lines = np.arange(units).reshape(shape)
    for axis, extent in enumerate(shape):
        # In later dimensions only the first members have the tensor.
        front = lines.reshape(-1, extent, int(np.prod(shape[axis + 1 :])))[:, :, 0]
        rounds += lift(steps((extent,)).rounds, front)
    return RoundSchedule("broadcast", units, 1, tuple(rounds))


def all_to_all(shape: tuple[int, ...]) -> RoundSchedule:
    """Two steps for (outer, inner): to the member of one's own group with the target's place, then across.

    Each step sends to all at once; more dimensions than two count as outer ones.
    """
    units, inner = int(np.prod(shape)), shape[-1]
    outer = units // inner
    group, place, other = (axis.ravel() for axis in np.meshgrid(*map(np.arange, (outer, inner, inner)), indexing="ij"))
    source = group * inner + place
    inside = Round.of(source, group * inner + other, source * units + other, outer, stride=inner)
    group, place, other = (axis.ravel() for axis in np.meshgrid(*map(np.arange, (outer, inner, outer)), indexing="ij"))
    target = other * inner + place
    across = Round.of(group * inner + place, target, group * inner * units + target, inner, stride=units)
    rounds = tuple(r for step in (inside, across) for r in _after_barrier(step))
    return RoundSchedule("all_to_all", units, units, rounds)


def _after_barrier(r: Round) -> Iterator[Round]:
    """Units that will send to each other synchronize first, as in `direct.py`; no unit sends to itself."""
    away = r.source != r.target
    source, target = r.source[away], r.target[away]
    yield Round.of(target, source, count=BARRIER)
    yield Round.of(source, target, r.first[away], r.count[away], r.combine[away], r.stride)


def _along(shape: tuple[int, ...], axis: int, steps: Steps) -> Iterator[Round]:
    """Steps along one dimension in every line of units, each over the pieces that its units share.

    Pieces are numbered with the innermost dimension slowest, so that those left after the inner steps are contiguous.
    """
    weights = [int(np.prod(shape[:dim])) for dim in range(len(shape))]
    units, place = np.arange(int(np.prod(shape))).reshape(shape), np.indices(shape)
    base = sum((place[dim] * weights[dim] for dim in range(axis + 1, len(shape))), np.zeros(shape, np.int64))
    lines, bases = (np.moveaxis(array, axis, -1).reshape(-1, shape[axis]) for array in (units, base))
    yield from lift(steps(shape[axis]), lines, bases[:, 0], weights[axis])


def _homes(shape: tuple[int, ...]) -> Numbers:
    """Piece -> unit: pieces count the dimensions of units in the opposite order."""
    return np.arange(int(np.prod(shape))).reshape(shape).transpose().ravel()


_ALONG = {"allreduce": allreduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather}

ALGORITHMS = (
    Algorithm(
        name="hierarchical",
        title="Inside the innermost groups first, by rings, then across them; broadcasts by binomial trees.",
        schedules={
            **{operation: partial(make, "hierarchical") for operation, make in _ALONG.items()},
            "all_to_all": all_to_all,
            "broadcast": partial(broadcast, trees.broadcast),
        },
        forms=(TENSORS, TILES),
    ),
    Algorithm(
        name="hierarchical_doubling",
        title="The same by recursive halving and doubling, along dimensions of a power of two of units.",
        schedules={operation: partial(make, "hierarchical_doubling") for operation, make in _ALONG.items()},
        forms=(TENSORS, TILES),
    ),
    Algorithm(
        name="hierarchical_direct",
        title="The same in one step along each dimension, in which every unit sends to every other one.",
        schedules={
            **{operation: partial(make, "hierarchical_direct") for operation, make in _ALONG.items()},
            "all_to_all": all_to_all,
            "broadcast": partial(broadcast, direct.broadcast),
        },
        forms=(TENSORS, TILES),
        most=direct.MOST,
    ),
)
