# SPDX-License-Identifier: MIT
"""Offsets of a heap: no overlap, no leak, and the same on all ranks for any order of releases."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tilescale.comm.heap.arena import ALIGNMENT, Arena, round_up
from tilescale.comm.heap.ledger import HeapBlock, Ledger

UNIT = ALIGNMENT


def arena(*pieces: tuple[int, int]) -> Arena:
    """An arena with space at the given (offset, size) pairs, in units."""
    result = Arena()
    for offset, size in pieces:
        result.add(offset * UNIT, size * UNIT)
    return result


def test_best_fit_takes_the_smallest_piece_and_of_these_the_lowest() -> None:
    space = arena((0, 4), (10, 2), (20, 3), (30, 2))
    assert space.allocate(2 * UNIT - 1) == 10 * UNIT
    assert space.allocate(2 * UNIT) == 30 * UNIT
    assert space.allocate(3 * UNIT) == 20 * UNIT
    assert space.size_of(10 * UNIT) == 2 * UNIT and space.size_of(20 * UNIT) == 3 * UNIT
    assert space.allocate(5 * UNIT) is None
    assert space.used == 7 * UNIT


def test_neighbours_merge_in_any_order() -> None:
    for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)):
        space = arena((0, 3))
        offsets = [space.allocate(UNIT) for _ in range(3)]
        for index in order:
            space.free(offsets[index])
        assert space.free_pieces == ((0, 3 * UNIT),)
    space = arena((5, 2), (0, 2))
    space.add(2 * UNIT, 3 * UNIT)
    assert space.free_pieces == ((0, 7 * UNIT),)


def test_growth_counts_what_is_free_at_the_end() -> None:
    space = arena((0, 8))
    first = space.allocate(2 * UNIT)
    assert space.free_before(8 * UNIT) == 6 * UNIT and space.free_before(7 * UNIT) == 0
    assert Arena().free_before(0) == 0
    space.allocate(6 * UNIT)
    space.free(first)
    assert space.free_before(8 * UNIT) == 0
    space.add(8 * UNIT, 4 * UNIT)
    assert space.free_before(12 * UNIT) == 4 * UNIT


def test_every_empty_tensor_has_its_own_place() -> None:
    space = arena((0, 2))
    assert {space.allocate(0), space.allocate(0)} == {0, UNIT}
    assert space.allocate(0) is None


def test_freeing_twice_is_refused() -> None:
    space = arena((0, 2))
    offset = space.allocate(1)
    space.free(offset)
    with pytest.raises(KeyError):
        space.free(offset)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=60))
def test_arena_against_a_map_of_bytes(steps: list[tuple[bool, int]]) -> None:
    space, taken = arena((0, 64)), {}
    for allocate, number in steps:
        if allocate:
            foreseen = space.next_offset(number)
            offset = space.allocate(number)
            assert offset == foreseen
            need = max(round_up(number, UNIT), UNIT)
            if offset is None:
                assert all(size < need for _, size in space.free_pieces)
                continue
            assert offset % UNIT == 0 and offset + need <= 64 * UNIT
            assert all(offset + need <= other or other + size <= offset for other, size in taken.items())
            taken[offset] = need
        elif taken:
            offset = sorted(taken)[number % len(taken)]
            space.free(offset)
            del taken[offset]
        assert space.used == sum(taken.values()) and space.used + sum(s for _, s in space.free_pieces) == 64 * UNIT
        assert all(a + size < b for (a, size), (b, _) in pairwise(space.free_pieces)), "neighbours are merged"


class SeveralRanks(RuleBasedStateMachine):
    """Ranks that allocate together and release whenever they like, each with its own ledger."""

    @initialize(ranks=st.integers(1, 4))
    def start(self, ranks: int) -> None:
        self.ledgers = [Ledger(ranks) for _ in range(ranks)]
        self.held: list[dict[int, HeapBlock]] = [{} for _ in range(ranks)]
        self.told: list[list[int]] = [[] for _ in range(ranks)]
        self.size = 0

    @rule(units=st.integers(0, 6))
    def allocate(self, units: int) -> None:
        released, self.told = self.told, [[] for _ in self.ledgers]
        blocks = []
        for ledger in self.ledgers:
            ledger.settle(released)
            blocks.append(ledger.allocate(units * UNIT))
        if None in blocks:
            assert set(blocks) == {None}
            for ledger in self.ledgers:
                ledger.arena.add(self.size, 8 * UNIT)
            self.size += 8 * UNIT
            blocks = [ledger.allocate(units * UNIT) for ledger in self.ledgers]
        for held, block in zip(self.held, blocks, strict=True):
            assert (block.number, block.offset) == (blocks[0].number, blocks[0].offset)
            held[block.number] = block

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from([rank for rank, held in enumerate(self.held) if held]))
        number = data.draw(st.sampled_from(sorted(self.held[rank])))
        del self.held[rank][number]
        self.told[rank].append(number)

    @invariant()
    def no_block_lies_on_one_that_any_rank_holds(self) -> None:
        live = {block.number: block for held in getattr(self, "held", []) for block in held.values()}
        spans = sorted((block.offset, block.offset + max(block.nbytes, 1)) for block in live.values())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))

    def teardown(self) -> None:
        if not hasattr(self, "ledgers"):
            return
        for held, told in zip(self.held, self.told, strict=True):
            told += held
        for ledger in self.ledgers:
            ledger.settle(self.told)
            assert not ledger.blocks and ledger.arena.used == 0
            assert ledger.arena.free_pieces == (((0, self.size),) if self.size else ())


SeveralRanks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSeveralRanks = SeveralRanks.TestCase


def test_a_block_is_found_by_what_lies_inside() -> None:
    ledger = Ledger(2)
    ledger.arena.add(0, 8 * UNIT)
    first, second = ledger.allocate(UNIT + 4), ledger.allocate(100)
    assert ledger.find(first.offset + UNIT, 4) is first and ledger.find(second.offset, 100) is second
    assert ledger.find(first.offset + UNIT, 8) is None, "reaches beyond the tensor"
    ledger.settle([[first.number], []])
    assert ledger.find(0, 1) is first, "rank 1 still holds it"
    ledger.settle([[], [first.number]])
    assert ledger.find(0, 1) is None and ledger.find(7 * UNIT, 1) is None
