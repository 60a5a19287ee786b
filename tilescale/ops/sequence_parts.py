# SPDX-License-Identifier: MIT
"""Distribution of a sequence's tokens over the ranks, and of their keys and values to all ranks.

Each rank has two parts of the sequence. The copy queue sends them to all ranks, or to the next one on a ring.
"""

from typing import Any

import tilescale.language as T

PARTS = 2
"""Parts of a rank's tokens, each contiguous in the sequence."""

THREADS = 256

LOADING, COMPUTING = 40, 232
"""Registers of a thread that loads, and of one that computes: of three warpgroups, 64512 in all."""


def part_of(rank: Any, half: Any, size: int, zigzag: bool) -> Any:
    """The number in the sequence of one half of a rank's tokens."""
    return rank + half * (PARTS * size - 1 - 2 * rank) if zigzag else PARTS * rank + half


@T.macro
def wait_for(arrived, step, size, batch):
    """Wait for both halves of the keys of the rank `step` before this one."""
    with T.Scale("device") as (rank, _):
        for h in T.serial(PARTS):
            T.wait(arrived[(rank + size - step) % size * PARTS + h], ">=", 2 * batch)


def keys_seen(mine: Any, theirs: Any, last: Any, half: Any, causal: bool) -> Any:
    """Largest number of keys of a part that the queries of another one see, of which `last` is after the last."""
    if not causal:
        return half
    return T.if_then_else(theirs < mine, half, T.if_then_else(theirs == mine, T.min(last, half), 0))


def first_seeing(mine: Any, theirs: Any, first: Any, half: Any, causal: bool) -> Any:
    """The first query of a part that sees keys of another one from `first`; `half` if none does."""
    if not causal:
        return 0
    return T.if_then_else(theirs < mine, 0, T.if_then_else(theirs == mine, T.min(first, half), half))


@T.macro
def send_halves(K, V, GK, GV, arrived, rank, size, batch, ring):
    """Send both halves of K and V by the queue; one flag for each half counts received parts."""
    for step in T.serial(1, size):
        for half, b in T.grid(PARTS, batch):
            send(K, GK, arrived, rank, size, step, half, b, 2 * b + 1, ring)
            send(V, GV, arrived, rank, size, step, half, b, 2 * b + 2, ring)


@T.macro
def send(own, gathered, arrived, rank, size, step, half, b, number, ring):
    """Send one half by the queue: to the rank `step` after this one; or on a ring to the next one, the received
    half."""
    place = (rank + size + 1 - step if ring else rank) % size * PARTS + half
    if ring:
        if step == 1:
            T.copy(own[b, half, :, :, :], gathered[place, b, :, :, :], dst=(rank + 1) % size, signal=arrived[place])
        else:
            T.copy(
                gathered[place, b, :, :, :],
                gathered[place, b, :, :, :],
                dst=(rank + 1) % size,
                signal=arrived[place],
                after=(arrived[place], ">=", number),
            )
    else:
        T.copy(own[b, half, :, :, :], gathered[place, b, :, :, :], dst=(rank + step) % size, signal=arrived[place])
