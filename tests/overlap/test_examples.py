# SPDX-License-Identifier: MIT
"""Simulated programs in phases, compiled with overlap, compared with overlap by hand with the same tiles.

At these sizes the compiler overlaps by default. Examples 22 and 23 are overlapped by hand: their copy queues send while
the grid multiplies, with the best chunks of 256, 512 and 1024 rows. Where there is no such example, the baseline is the
program in order.
"""

from typing import Any

import pytest

import tilescale
from tests.ladder import NUMBERED, load
from tests.overlap.support import H200
from tilescale.tuning import programs

SIZE, SMALL, LARGE = 4096, 3072, (8192, 4096, 2048)
"""Rows and columns of the examples' matrices; M, N and K of GEMMs with tiles of 128 x 256 on each of 2 devices."""

AS_THERE = {"tile": programs.BLOCK, "stages": 4, "threads": 256, "dtype": "bfloat16"}
"""Parameters of the GEMMs of LARGE."""


def simulated(func: Any) -> float:
    return tilescale.emulate(func, data=False, machine=H200).time_us


def compiled(func: Any) -> float:
    """Times of a program that is compiled, and overlapped by the estimate."""
    kernel = tilescale.compile(func, machine=H200)
    assert all(move.overlapped for move in kernel.moves.moves), kernel.moves
    return simulated(kernel.ir)


def by_hand(number: int, devices: int, shape: tuple[int, int, int], chunk: int, **given: Any) -> float:
    """Those of an example that was overlapped by hand."""
    return simulated(load(NUMBERED[number]).overlapped(devices, *shape, chunk=chunk, **given))


@pytest.mark.parametrize(
    ("number", "hand", "devices", "size", "chunk", "share"),
    [
        (6, 22, 2, SIZE, 1024, 0.97),
        pytest.param(7, 23, 2, SMALL, 256, 0.97, marks=pytest.mark.nightly),
        # By hand the gather is in place: local rows are not copied.
        pytest.param(6, 22, 4, SIZE, 256, 0.9, marks=pytest.mark.nightly),
    ],
)
def test_examples_in_phases_reach_what_was_overlapped_by_hand(
    number: int, hand: int, devices: int, size: int, chunk: int, share: float
):
    mine = compiled(load(NUMBERED[number]).phases(devices, size, size, size))
    assert mine * share <= by_hand(hand, devices, (size, size, size), chunk)


@pytest.mark.nightly
def test_a_product_with_large_tiles_and_a_gather_reaches_it_too():
    m, n, k = LARGE
    mine = compiled(programs.gather_and_gemm(H200, 2, LARGE))
    assert mine * 0.97 <= by_hand(22, 2, (m, 2 * n, k), 512, **AS_THERE)


@pytest.mark.nightly
def test_a_product_with_large_tiles_and_a_scatter_has_a_grid_behind():
    """By hand a tile adds up in the registers of its GEMM, where the compiler's additional sums do not fit."""
    m, n, k = LARGE
    mine = compiled(programs.gemm_and_scatter(H200, 2, LARGE))
    assert mine * 0.9 <= by_hand(23, 2, (m, n, 2 * k), 256, **AS_THERE)


@pytest.mark.parametrize(
    ("number", "program", "size"), [(8, "tp_gemm", SIZE), pytest.param(15, "phases", SMALL, marks=pytest.mark.nightly)]
)
def test_products_with_an_all_reduce_gain_a_tenth_of_their_time_in_order(number: int, program: str, size: int):
    """Example 8 is the tensor-parallel GEMM of the white paper."""
    func = getattr(load(NUMBERED[number]), program)(2, size, size, size)
    assert compiled(func) <= 0.9 * simulated(func)
