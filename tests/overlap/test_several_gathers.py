# SPDX-License-Identifier: MIT
"""Gathers that one grid reads, as of a matrix and of its scales: overlapped together, and in slices of columns."""

from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.overlap.support import H200, check_same
from tests.overlap.test_gather import is_wait
from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.errors import RaceError, UninitializedReadError, UsageError
from tilescale.passes.overlap.rewrite import overlap
from tilescale.passes.overlap.schedule import Move, Schedule
from tilescale.passes.scratch import as_parameters
from tilescale.passes.structure import structure

WIDE, STEPS, TILE = 8, 6, 4


def scaled_sums(devices: int, *, together: bool = True, backwards: bool = False) -> Any:
    """Gather rows and a factor for each, then sum columns of each row, or `backwards`, and multiply: in one grid, or
    in two.
    """
    rows = T.dynamic("rows")

    @T.prim_func
    def f(
        X: T.Tensor((1, rows, STEPS * WIDE), "float32"),
        S: T.Tensor((1, rows), "float32"),
        Y: T.Tensor((devices, rows, WIDE), "float32"),
    ):
        with T.Kernel(device=devices, block=(1, T.ceildiv(rows, TILE), devices), threads=32) as (_, tile, part):
            whole = T.alloc((devices, rows, STEPS * WIDE), "float32", level="l2")
            factors = T.alloc((devices, rows), "float32", level="l2")
            x, y, z = (T.alloc((TILE, WIDE), "float32", level="l1") for _ in range(3))
            with T.Scale("device"):
                T.all_gather(S, factors, dim=0)
                T.all_gather(X, whole, dim=0)
            with T.Scale("device"), T.Scale("block"):
                T.clear(y)
                for k in T.Pipelined(STEPS, num_stages=2):
                    T.copy(whole[part, tile * TILE, ((STEPS - 1 - k) if backwards else k) * WIDE], x)
                    for i, j in T.Parallel(TILE, WIDE):
                        y[i, j] = y[i, j] + x[i, j]
                if together:
                    scale(y, factors, part, tile, rows)
                T.copy(y, Y[part, tile * TILE, 0])
            if not together:
                with T.Scale("device"), T.Scale("block"):
                    T.copy(Y[part, tile * TILE, 0], z)
                    scale(z, factors, part, tile, rows)
                    T.copy(z, Y[part, tile * TILE, 0])

    return f


@T.macro
def scale(y, factors, part, tile, rows):
    for i, j in T.Parallel(TILE, WIDE):
        y[i, j] = y[i, j] * factors[part, T.min(tile * TILE + i, rows - 1)]


def arguments(devices: int, rows: int) -> list[list[torch.Tensor]]:
    rng = torch.Generator().manual_seed(0)
    shapes = (1, rows, STEPS * WIDE), (1, rows)
    numbers = [[torch.randint(9, shape, generator=rng).float() for shape in shapes] for _ in range(devices)]
    return [[*own, torch.full((devices, rows, WIDE), torch.nan)] for own in numbers]


def moves(**how: Any) -> Schedule:
    """Both read from their sources; all factors of a part have one flag."""
    factors = Move("all_gather", ("S", "factors"), chunks=1, local="source")
    return Schedule([factors, Move("all_gather", ("X", "whole"), chunk=8, chunks=3, local="source", **how)])


FORMS: list[dict[str, Any]] = [{}, {"slices": 3}, {"group": 2}, {"group": 2, "blocks": 3}]


PAIRED = {1: FORMS[2], 2: FORMS[1]}
"""By day: one form for each smaller number of devices, all of them for four."""


@pytest.mark.parametrize(
    ("devices", "how"),
    [
        pytest.param(devices, how, marks=[pytest.mark.nightly] * (PAIRED.get(devices, how) != how))
        for devices in (1, 2, 4)
        for how in FORMS
    ],
    ids=str,
)
def test_gathers_of_one_grid_are_overlapped_together(devices: int, how: dict[str, Any]):
    func = scaled_sums(devices)
    changed, schedule = overlap(func, H200, moves(**how))
    assert str(schedule).count("local rows from the source") == 2
    assert "all_gather" not in changed.script()
    for rows in (1, 10, 23):
        check_same(func, changed, arguments(devices, rows), seeds=(None, 1))


def test_all_that_one_peer_gets_is_sent_before_the_next_ones():
    changed, _ = overlap(scaled_sums(3), H200, moves())
    sent = tilescale.emulate(changed, arguments(3, 20), machine=H200)
    assert {each.messages for each in sent.activity} == {2 * (1 + 3)}
    (steps,) = [s for s in ir.statements(changed.body) if isinstance(s, ir.For) and str(s.loop_var) == "step"]
    assert "S[" in str(steps) and "X[" in str(steps)


@pytest.mark.parametrize("how", FORMS[:2], ids=str)
def test_waits_that_are_left_out_would_race(how: dict[str, Any]):
    """Those for rows; of one queue the factors arrive before them."""
    changed, _ = overlap(scaled_sums(4), H200, moves(**how))
    leave = lambda node: tir.sequence([]) if is_wait(node) and "whole_here" in str(node) else None  # noqa: E731
    without = changed.with_body(tir.rewrite(changed.body, leave=leave))
    with pytest.raises((RaceError, UninitializedReadError)):
        tilescale.emulate(without, arguments(4, 10), machine=H200, time=False)


def test_a_tile_waits_for_a_slice_where_it_begins():
    changed, schedule = overlap(scaled_sums(4), H200, moves(slices=3))
    assert "in 3 slices of columns" in str(schedule)
    flags = [b for launch in structure(changed, H200).launches for b in launch.buffers if b.data in launch.flags]
    assert {str(b.name): ir.constants(b.shape) for b in flags} == {"factors_here": [4, 1], "whole_here": [4, 3]}
    text = changed.script().partition("else:")[2]
    assert "if k % 2 == 0:" in text and "T.region(whole_here_1[part_tile, k // 2]" in text


@pytest.mark.parametrize(("slices", "reason"), [(4, "no loop of its tiles"), (5, "48 columns are not 5 slices")])
def test_slices_are_whole_steps_of_one_width(slices: int, reason: str):
    move = overlap(scaled_sums(4), H200, moves(slices=slices))[1].moves[1]
    assert not move.overlapped and reason in move.why
    with pytest.raises(UsageError, match="it takes local='source'"):
        Move("all_gather", ("X", "whole"), slices=slices)


def test_slices_are_read_in_their_order():
    move = overlap(scaled_sums(4, backwards=True), H200, moves(slices=3))[1].moves[1]
    assert not move.overlapped and "no loop of its tiles iterates over slices of columns" in move.why


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("how", FORMS[2:], ids=str)
def test_rows_that_the_caller_has_moved_are_not_sent(how: dict[str, Any], devices: int):
    func, rows = scaled_sums(devices), 10
    schedule = moves(**how)
    for move in schedule.moves:
        move.carrier = "caller"
    changed, made = overlap(func, H200, schedule)
    assert str(made).count("the caller has moved the rows") == 2
    assert not any(map(is_wait, ir.statements(changed.body))) and "tilescale.copy" not in changed.script()
    want, got = arguments(devices, rows), arguments(devices, rows)
    tilescale.emulate(func, want, machine=H200, time=False)
    factors, whole = (torch.cat([own[i] for own in got]) for i in (1, 0))
    for rank, own in enumerate(got):
        own += [whole.clone(), factors.clone()]
        own[3][rank] = own[4][rank] = torch.nan  # local rows are read in place
    tilescale.emulate(as_parameters(changed), got, machine=H200, time=False)
    assert all(torch.equal(mine[2], other[2]) for mine, other in zip(got, want, strict=True))


def test_a_caller_moves_rows_of_gathers_with_local_rows_in_the_source_alone():
    schedule = moves()
    schedule.moves[0] = Move("all_gather", ("S", "factors"), carrier="caller")
    with pytest.raises(UsageError, match="carrier='caller'"):
        overlap(scaled_sums(2), H200, schedule)


def test_gathers_of_two_grids_are_overlapped_one_by_one():
    func = scaled_sums(3, together=False)
    changed, schedule = overlap(func, H200, moves())
    assert all(move.overlapped for move in schedule.moves)
    assert str(schedule).count("local rows from the source") == 2
    assert len([s for s in ir.statements(changed.body) if isinstance(s, ir.For) and str(s.loop_var) == "step"]) == 2
    check_same(func, changed, arguments(3, 10), seeds=(None, 1))
