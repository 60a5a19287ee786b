# SPDX-License-Identifier: MIT
"""The order of messages, as headers/messages.cuh describes it, in random interleavings.

Ranks are coroutines; a drawn sequence schedules their steps: store a part of a message, signal, poll a flag, read. The
read data must equal the sent data; with one slot less than the protocol has, it does not.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PARTS = 2
"""Steps in which a message is stored, and read."""


@dataclass
class Wires:
    """Slots and flags of all ranks: (sender, receiver, slot)."""

    slots: int
    data: dict[tuple[int, int, int, int], int] = field(default_factory=dict)
    flags: dict[tuple[int, int, int], int] = field(default_factory=dict)

    def stores(self, sender: int, ranks: int, number: int) -> Iterator[None]:
        """Stores a message to every peer."""
        for part in range(PARTS):
            for receiver in range(ranks):
                self.data[sender, receiver, number % self.slots, part] = number
                yield

    def tells(self, sender: int, ranks: int, number: int) -> Iterator[None]:
        """Signal arrival to every peer."""
        for receiver in range(ranks):
            self.flags[sender, receiver, number % self.slots] = number
            yield

    def receives(self, receiver: int, ranks: int, number: int) -> Iterator[None]:
        """Waits for the message of every peer, and reads them."""
        peers = [rank for rank in range(ranks) if rank != receiver]
        for sender in peers:
            while self.flags.get((sender, receiver, number % self.slots)) != number:
                yield
        for part in range(PARTS):
            for sender in peers:
                found = self.data[sender, receiver, number % self.slots, part]
                assert found == number, f"message {number} of rank {sender} was overwritten by {found}"
                yield


def rank_of(wires: Wires, rank: int, ranks: int, calls: list[int], lag: int) -> Iterator[None]:
    """All calls of a rank, each of a number of messages; `lag` more are stored than have been received.

    Without a lag a message carries its flag, as words do.
    """
    number = 0
    for messages in calls:
        for iteration in range(messages + lag):
            if iteration < messages:
                yield from wires.stores(rank, ranks, number + iteration)
            if iteration < messages and lag == 0:
                yield from wires.tells(rank, ranks, number + iteration)
            if iteration >= lag:
                yield from wires.receives(rank, ranks, number + iteration - lag)
            if iteration < messages and lag > 0:
                yield from wires.tells(rank, ranks, number + iteration)
        number += messages


def run(ranks: int, calls: list[int], lag: int, slots: int, order: list[int]) -> None:
    """Every rank to its end."""
    wires = Wires(slots)
    run_all([rank_of(wires, rank, ranks, calls, lag) for rank in range(ranks)], order)


def run_all(running: list[Iterator[None]], order: list[int]) -> None:
    """Run in the drawn order of steps, then round-robin."""
    ranks = len(running)
    alive = set(range(ranks))
    steps = iter(order)
    for iteration in range(100_000):
        if not alive:
            return
        rank = next(steps, iteration) % ranks
        # Long runs of one rank are what lets it get far ahead.
        for _ in range(40 if iteration % 3 else 1):
            if rank in alive and next(running[rank], "ended") == "ended":
                alive.discard(rank)
    raise AssertionError("they wait for each other")


DRAWN = {
    "ranks": st.integers(2, 4),
    "calls": st.lists(st.integers(1, 6), min_size=1, max_size=4),
    "order": st.lists(st.integers(0, 3), max_size=200),
}


FEWEST = {0: 2, 1: 3, 2: 5}
"""Lag -> slots that are enough; long messages have one more, as a power of two lets their number wrap."""


@pytest.mark.parametrize("lag", FEWEST)
@given(**DRAWN)
@settings(max_examples=30, deadline=None)
def test_nobody_overwrites_what_is_still_read(lag: int, ranks: int, calls: list[int], order: list[int]):
    run(ranks, calls, lag, FEWEST[lag], order)


@pytest.mark.parametrize("lag", FEWEST)
def test_a_slot_less_is_too_few(lag: int):
    """One rank runs ahead as far as possible while the other pauses in the middle of a message."""

    def found(order: list[int]) -> bool:
        try:
            run(2, [8], lag, FEWEST[lag] - 1, order)
        except (AssertionError, KeyError):
            return True
        return False

    assert any(found([0] * before + [1] * 60 + [0] * 60) for before in range(1, 40))


# -- straight into targets (headers/moved_messages.cuh) ----------------------------------------------------------------


def straight(wires: Wires, rank: int, ranks: int, calls: int, asks: bool) -> Iterator[None]:
    """Calls in which ranks signal that their targets are free, store into those of others, and then read local ones."""
    peers = [peer for peer in range(ranks) if peer != rank]
    for number in range(1, calls + 1):
        for peer in peers:
            wires.flags[rank, peer, -1] = number  # the word with the target's address
            yield
        yield from wires.stores(rank, ranks, number)  # the first units, into slots
        for peer in peers:
            while asks and wires.flags.get((peer, rank, -1)) != number:
                yield
        for peer in peers:
            wires.data[rank, peer, -1, 0] = number
            yield
        yield from wires.tells(rank, ranks, number)
        yield from wires.receives(rank, ranks, number)
        for _ in range(2):
            for peer in peers:
                assert wires.data[peer, rank, -1, 0] == number, "a target that is still read was overwritten"
                yield


@given(ranks=DRAWN["ranks"], calls=st.integers(1, 5), order=DRAWN["order"])
@settings(max_examples=40, deadline=None)
def test_targets_are_free_when_peers_store_into_them(ranks: int, calls: int, order: list[int]):
    wires = Wires(4)
    run_all([straight(wires, rank, ranks, calls, asks=True) for rank in range(ranks)], order)


def test_who_does_not_ask_overwrites_what_is_read():
    def found(before: int) -> bool:
        wires = Wires(4)
        try:
            run_all([straight(wires, r, 2, 3, asks=False) for r in range(2)], [0] * before + [1] * 60 + [0] * 60)
        except AssertionError:
            return True
        return False

    assert any(map(found, range(1, 60)))
