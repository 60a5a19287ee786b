# SPDX-License-Identifier: MIT
"""Schedules, executed on numbers, compute their collective, with the message counts of the literature."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tilescale.collectives import RoundSchedule, names, schedule
from tilescale.errors import UnsupportedError, UsageError

SHAPES = [(1,), (2,), (3,), (5,), (8,), (13,), (2, 2), (2, 3), (4, 8), (3, 1), (2, 3, 4)]
OPERATIONS = ("allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


def begin(plan: RoundSchedule) -> np.ndarray:
    """[unit, piece] -> initial value: random whole numbers for the unit's pieces, zero elsewhere."""
    rng = np.random.default_rng(plan.units)
    if plan.operation == "all_to_all":
        held = np.zeros((plan.units, plan.units * plan.pieces))
        for unit in range(plan.units):
            held[unit, unit * plan.pieces : (unit + 1) * plan.pieces] = rng.integers(1, 1000, plan.pieces)
        return held
    held = rng.integers(1, 1000, (plan.units, plan.pieces)).astype(float)
    if plan.operation == "all_gather":
        held *= np.arange(plan.units)[:, None] == plan.home
    if plan.operation == "broadcast":
        held[1:] = 0
    return held


def play(plan: RoundSchedule, held: np.ndarray) -> np.ndarray:
    """Data of every unit after the rounds; messages of a round are read before any arrives."""
    held = held.copy()
    for r in plan.rounds:
        messages = []
        for s, t, first, count, combine in zip(r.source, r.target, r.first, r.count, r.combine, strict=True):
            assert s != t
            pieces = first + r.stride * np.arange(count)
            messages.append((t, pieces, combine, held[s, pieces].copy()))
        for t, pieces, combine, values in messages:
            held[t, pieces] = values + held[t, pieces] * combine
    return held


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_algorithm_computes_its_collective(operation: str, shape: tuple[int, ...]):
    for name in names(operation):
        try:
            plan = schedule(operation, name, shape, segments=3)
        except UnsupportedError:
            assert math.prod(shape) & (math.prod(shape) - 1)
            continue
        before = begin(plan)
        after = play(plan, before)
        total, n = before.sum(0), plan.units
        assert n == math.prod(shape)
        if operation in ("allreduce", "all_gather", "broadcast"):
            assert (after == total).all(), name
        elif operation == "reduce_scatter":
            assert sorted(np.bincount(plan.home, minlength=n)) == [plan.pieces // n] * n
            assert (after[plan.home, np.arange(plan.pieces)] == total).all(), name
        else:
            pieces = np.arange(n * n)
            assert (after[pieces % n, pieces] == total).all(), name


@pytest.mark.parametrize(
    ("operation", "algorithm", "rounds", "share"),
    [
        ("allreduce", "ring", 14, 14 / 8),
        ("allreduce", "halving_doubling", 6, 14 / 8),
        ("allreduce", "recursive_doubling", 3, 3),
        ("allreduce", "one_shot", 2, 7),
        ("allreduce", "two_shot", 4, 14 / 8),
        ("allreduce", "hierarchical", 2 * (3 + 1), 14 / 8),
        ("allreduce", "hierarchical_doubling", 2 * (2 + 1), 14 / 8),
        ("reduce_scatter", "halving", 3, 7 / 8),
        ("all_gather", "doubling", 3, 7 / 8),
        ("all_to_all", "pairwise", 7, 7 / 8),
        ("all_to_all", "hierarchical", 4, 1 / 2 + 3 / 4),
        ("broadcast", "tree", 3, 3),
        ("barrier", "dissemination", 3, 0),
    ],
)
def test_rounds_and_bytes_are_those_of_the_literature(operation: str, algorithm: str, rounds: int, share: float):
    plan = schedule(operation, algorithm, (4, 2))
    sent = sum(np.bincount(r.source, r.count, minlength=8) for r in plan.rounds) / plan.pieces
    assert len(plan.rounds) == rounds
    assert sent.max() == pytest.approx(share)


@pytest.mark.parametrize("units", [2, 7, 16, 100])
def test_nobody_sends_more_than_twice_the_tensor_in_two_trees(units: int):
    plan = schedule("allreduce", "tree", units, segments=5)
    sent = sum(np.bincount(r.source, r.count, minlength=units) for r in plan.rounds) / plan.pieces
    # With an odd number one unit is inside both trees.
    assert sent.max() <= (2 if units % 2 == 0 else 2.5)
    assert len(plan.rounds) <= 2 * math.ceil(math.log2(units)) + 5 - 1


def test_rings_enter_every_node_at_another_device():
    plan = schedule("allreduce", "rings", (3, 4))
    first = plan.rounds[0]
    across = first.source // 4 != first.target // 4
    assert sorted(first.source[across]) == list(range(12))
    one = schedule("allreduce", "ring", (3, 4)).rounds[0]
    assert (one.source // 4 != one.target // 4).sum() == 3


def test_what_there_is_not_is_said():
    with pytest.raises(UsageError, match="no algorithm 'star' for allreduce"):
        schedule("allreduce", "star", 4)
    with pytest.raises(UsageError, match="none: no such operation"):
        schedule("reduce", "ring", 4)
    with pytest.raises(UnsupportedError, match="all_gather by doubling: it needs a power of two of units, here are 6"):
        schedule("all_gather", "doubling", (2, 3))
