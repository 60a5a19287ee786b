# SPDX-License-Identifier: MIT
"""Examples in phases, compiled with overlap, take no longer on the emulated machine than what people overlapped."""

import pytest

import tilescale
from tests.ladder import NUMBERED, load
from tests.overlap.support import H200

SHARE, SIZE = 0.97, 1024
"""Of the speed of the program that was overlapped by hand; rows and columns of the matrices."""


@pytest.mark.parametrize("number", [6, 7, 15])
def test_phases_reach_what_was_overlapped_by_hand(number: int):
    example = load(NUMBERED[number])
    kernel = tilescale.compile(example.phases(4, SIZE, SIZE, SIZE), machine=H200, schedule="overlap")
    mine, by_hand = (
        tilescale.emulate(func, data=False, machine=H200).time_us
        for func in (kernel.ir, example.tile_by_tile(4, SIZE, SIZE, SIZE))
    )
    assert mine * SHARE <= by_hand
