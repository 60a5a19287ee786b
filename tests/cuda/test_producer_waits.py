# SPDX-License-Identifier: MIT
"""A wait in a producer: its warps stay converged, for any warp that sees the flag first."""

from pathlib import Path

import pytest

from tests.cuda.host_text import on_host
from tilelang_core.specialise import PRODUCER_THREADS
from tilescale.backends.cuda.headers import header

STEPS = 8
NOBODY, FIRST, ALL = 0, 0b1, 0b1111  # warps, as bits
TEXT = "".join(map(header, ("memory.cuh", "sync.cuh", "producer.cuh")))
RETURNS = "if (threadIdx.x % threads >= warp) return;"


@pytest.mark.parametrize("sleepers", [NOBODY, FIRST])
def test_no_warp_of_a_producer_is_left_behind_its_stages(sleepers: int, tmp_path: Path):
    assert on_host(TEXT, "host_producer.h", tmp_path).stuck_warps(STEPS, sleepers) == 0


def test_warps_that_each_wait_for_the_flag_are(tmp_path: Path):
    """They arrive a phase after the loads, and see the parity of each stage's barrier alone."""
    assert RETURNS in TEXT
    assert on_host(TEXT.replace(RETURNS, ""), "host_producer.h", tmp_path).stuck_warps(STEPS, ALL) == 3


def test_the_warps_are_those_of_stock_tilelangs_producer():
    assert f"constexpr unsigned threads = {PRODUCER_THREADS}, warp = 32;" in TEXT
