# SPDX-License-Identifier: MIT
"""Collectives on tiles by the rounds of an algorithm: tiles are split into pieces, sent piece by piece, and joined.

A value is a tuple of arrays with one first axis, along which pieces are cut: one flat array, or the tiles that a user's
function combines together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tilescale.collectives.play import play
from tilescale.collectives.round_schedule import RoundSchedule

Value = tuple[np.ndarray, ...]
Combine = Callable[[Sequence[Value]], Value]
Held = list[dict[int, Value]]


def allreduce(plan: RoundSchedule, values: Sequence[Value], combine: Combine) -> list[Value]:
    """All-reduce: the combination of all values, for each unit."""
    held: Held = [dict(enumerate(_cut(value, plan.pieces))) for value in values]
    play(plan, held, combine)
    return _joined([[mine[piece] for piece in range(plan.pieces)] for mine in held])


def broadcast(plan: RoundSchedule, values: Sequence[np.ndarray], root: int) -> list[np.ndarray]:
    """Broadcast: the root's tile, for each unit. Unit 0 of the rounds is the root."""
    units = len(values)
    held: Held = [{} for _ in values]
    held[0] = dict(enumerate(_cut((values[root].reshape(-1),), plan.pieces)))
    play(plan, held, _nothing_to_combine)
    flat = _joined([[mine[piece] for piece in range(plan.pieces)] for mine in held])
    return [flat[(unit - root) % units][0].reshape(values[root].shape) for unit in range(units)]


def reduce_scatter(plan: RoundSchedule, values: Sequence[np.ndarray], axis: int, combine: Combine) -> list[np.ndarray]:
    """Reduce-scatter: each unit's part, along an axis, of the combination of all values."""
    parts = [np.split(value, plan.units, axis) for value in values]
    held: Held = [_by_home(plan, mine) for mine in parts]
    play(plan, held, combine)
    flat = _joined([[mine[piece] for piece in _at(plan, unit)] for unit, mine in enumerate(held)])
    return [flat[unit][0].reshape(parts[unit][unit].shape) for unit in range(plan.units)]


def all_gather(plan: RoundSchedule, values: Sequence[np.ndarray], axis: int) -> list[np.ndarray]:
    """All-gather: all values joined along an axis, for each unit."""
    cut = _by_home(plan, values)
    held: Held = [{piece: cut[piece] for piece in _at(plan, unit)} for unit in range(plan.units)]
    play(plan, held, _nothing_to_combine)
    known: dict[tuple[int, ...], np.ndarray] = {}
    results = []
    for mine in held:
        key = tuple(id(mine[piece]) for piece in range(plan.pieces))
        if key not in known:
            parts = _joined([[mine[piece] for piece in _at(plan, unit)] for unit in range(plan.units)])
            shaped = [part.reshape(value.shape) for (part,), value in zip(parts, values, strict=True)]
            known[key] = np.concatenate(shaped, axis)
        results.append(known[key])
    return results


def all_to_all(plan: RoundSchedule, values: Sequence[np.ndarray], axis: int) -> list[np.ndarray]:
    """All-to-all: the parts addressed to each unit, joined along an axis in the order of ranks."""
    return exchanged(plan, [np.split(value, plan.units, axis) for value in values], axis)


def exchanged(plan: RoundSchedule, parts: Sequence[Sequence[np.ndarray]], axis: int) -> list[np.ndarray]:
    """All-to-all of parts by source and target, which may be of any lengths along the axis."""
    units = plan.units
    held: Held = [
        {source * units + target: (part,) for target, part in enumerate(mine)} for source, mine in enumerate(parts)
    ]
    play(plan, held, _nothing_to_combine)
    return [
        np.concatenate([mine[source * units + unit][0] for source in range(units)], axis)
        for unit, mine in enumerate(held)
    ]


def _cut(value: Value, pieces: int) -> list[Value]:
    """A value in `pieces` pieces of nearly equal length."""
    rows = len(value[0])
    bounds = [rows * i // pieces for i in range(pieces + 1)]
    return [tuple(array[begin:end] for array in value) for begin, end in zip(bounds, bounds[1:], strict=False)]


def _at(plan: RoundSchedule, unit: int) -> list[int]:
    """Numbers of the pieces whose home is a unit, ascending."""
    return np.flatnonzero(plan.home == unit).tolist()


def _by_home(plan: RoundSchedule, parts: Sequence[np.ndarray]) -> dict[int, Value]:
    """Piece -> its value, of the part of each home unit."""
    found: dict[int, Value] = {}
    for unit, part in enumerate(parts):
        pieces = _at(plan, unit)
        found.update(zip(pieces, _cut((part.reshape(-1),), len(pieces)), strict=True))
    return found


def _joined(pieces: Sequence[list[Value]]) -> list[Value]:
    """The value of each list of pieces; equal lists are joined once."""
    known: dict[tuple[int, ...], Value] = {}
    results = []
    for mine in pieces:
        key = tuple(id(piece) for piece in mine)
        if key not in known:
            known[key] = mine[0] if len(mine) == 1 else tuple(map(np.concatenate, zip(*mine, strict=True)))
        results.append(known[key])
    return results


def _nothing_to_combine(values: Sequence[Value]) -> Value:
    raise AssertionError("the rounds of a collective without combination combine")
