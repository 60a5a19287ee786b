# SPDX-License-Identifier: MIT
"""All-gathers overlapped with the grids that read their results: rewritten programs, equal results."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tilescale
import tilescale.language as T
from tests.cuda.support import notes
from tests.overlap.support import H200, check_same, line, overlapped
from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.errors import RaceError, UninitializedReadError, UsageError
from tilescale.hda import Machine
from tilescale.passes.overlap.rewrite import overlap
from tilescale.passes.overlap.schedule import Schedule
from tilescale.program.ops import WAIT

WIDE = 8


def gather_then_scale(
    devices: int,
    rows: int,
    tile: int,
    *,
    slots: bool = False,
    columns: int = 1,
    rows_first: bool = False,
    flat: bool = False,
    turns: int = 0,
    grids: int = 1,
) -> Any:
    """Gather rows, then each block multiplies a tile of them by the number of its column.

    Args:
        rows: of each device.
        slots: whether the gathered tensor has a dimension for the devices, so that tiles end with a part.
        rows_first: whether neighbours in the grid work on different rows.
        flat: whether the grid has one axis.
        turns: blocks of a persistent grid; 0 for one block for each tile.
        grids: how many grids read it.
    """
    total = devices * rows
    tiles = devices * -(-rows // tile) if slots else -(-total // tile)
    high = -(-rows // tile) * tile  # rows of a part as tiles count them
    whole = (devices, rows, WIDE) if slots else (total, WIDE)
    grid = (tiles, columns) if rows_first else (columns, tiles)
    if flat or turns:
        grid = (min(turns, tiles * columns) if turns else tiles * columns, 1)

    @T.prim_func
    def f(X: T.Tensor(whole, "float32"), Y: T.Tensor((grids, columns, *whole), "float32")):
        with T.Kernel(device=devices, block=grid, threads=32) as (bx, by):
            gathered = T.alloc(whole, "float32", level="l2")
            with T.Scale("device"):
                T.all_gather(T.view(X, layout=T.FullRow), gathered, dim=0)
            for number in range(grids):
                with T.Scale("device"), T.Scale("block"):
                    x = T.alloc((tile, WIDE), "float32", level="l1")
                    for turn in T.serial(T.ceildiv(tiles * columns - bx, turns) if turns else 1):
                        place = bx + turn * turns
                        at = (place // columns if flat or turns else bx if rows_first else by) * tile
                        column = place % columns if flat or turns else by if rows_first else bx
                        part, row = at // high, at % high
                        if slots:
                            T.copy(gathered[part, row, 0], x)
                        else:
                            T.copy(gathered[at, 0], x)
                        for i, j in T.Parallel(tile, WIDE):
                            x[i, j] = x[i, j] * (column + number + 1)
                        if slots:
                            T.copy(x, Y[number, column, part, row, 0])
                        else:
                            T.copy(x, Y[number, column, at, 0])

    return f


def arguments(func: Any, devices: int) -> list[list[torch.Tensor]]:
    """A share of X and a poisoned Y for each device."""
    x, y = (tuple(int(n) for n in buffer.shape) for _, buffer in ir.parameters(func))
    rng = torch.Generator().manual_seed(0)
    shares = torch.randn(x, generator=rng).chunk(devices)
    return [[share.contiguous(), torch.full(y, torch.nan)] for share in shares]


def test_tiles_wait_for_the_rows_that_they_read_own_part_first():
    changed, schedule = overlapped(gather_then_scale(4, 32, 16), chunk=16)
    text = changed.script()
    assert re.search(r"(\w+)_tile: T.int32 = \(device_rank \+ 4 - \1 // 2\) % 4 \* 2 \+ \1 % 2", text)
    assert re.search(r"T.tilescale.wait\(T.region\(gathered_here_1\[at // 32, at % 32 // 16\]", text)
    assert "chunk=16" in text
    (move,) = schedule.moves
    assert move.overlapped and move.ordered and move.chunk == 16


def test_a_part_after_the_other_where_neighbours_read_different_rows():
    changed, schedule = overlapped(gather_then_scale(4, 32, 16, columns=3, rows_first=True))
    assert schedule.moves[0].ordered
    assert "(device_rank + 4 - iteration // 6) % 4 * 2 + iteration % 6 % 2" in changed.script()


def test_tiles_that_are_taken_in_turns_wait_in_the_loop():
    changed, schedule = overlapped(gather_then_scale(4, 32, 16, turns=3))
    assert not schedule.moves[0].ordered
    assert "tiles in program order: the grid is persistent" in str(schedule)
    loop = changed.script().index("for turn")
    assert changed.script().index("T.tilescale.wait") > loop


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    devices=st.integers(2, 8),
    rows=st.integers(1, 12),
    tile=st.sampled_from((2, 3, 4, 5)),
    shape=st.sampled_from(({}, {"rows_first": True}, {"flat": True}, {"turns": 3})),
    slots=st.booleans(),
    columns=st.integers(1, 3),
    grids=st.integers(1, 2),
    chunk=st.none() | st.integers(1, 12),
    ordered=st.booleans(),
)
def test_results_are_the_same(
    devices: int,
    rows: int,
    tile: int,
    shape: dict[str, Any],
    slots: bool,
    columns: int,
    grids: int,
    chunk: int | None,
    ordered: bool,
):
    func = gather_then_scale(devices, rows, tile, slots=slots, columns=columns, grids=grids, **shape)
    changed, schedule = overlapped(func, chunk=chunk, ordered=ordered)
    assert schedule.moves[0].overlapped or schedule.moves[0].why.startswith("every tile reads all rows"), schedule
    check_same(func, changed, arguments(func, devices), seeds=(None, 1))


def test_a_device_alone_stays_in_order():
    (move,) = overlapped(gather_then_scale(1, 8, 4))[1].moves
    assert not move.overlapped and move.why == "there is one unit only"


def gather_columns(devices: int, rows: int, tile: int, wide: int, turns: int = 0) -> Any:
    """Gather columns, then each block doubles a tile of whole rows."""
    tiles = -(-rows // tile)
    blocks = turns or tiles

    @T.prim_func
    def f(X: T.Tensor((rows, devices * wide), "float32"), Y: T.Tensor((rows, devices * wide), "float32")):
        with T.Kernel(device=devices, block=blocks, threads=32) as b:
            whole = T.alloc((rows, devices * wide), "float32", level="l2")
            with T.Scale("device"):
                T.all_gather(T.view(X, layout=T.FullCol), whole, dim=1)
            with T.Scale("block"):
                x = T.alloc((tile, devices * wide), "float32", level="l1")
                for turn in T.serial(T.ceildiv(tiles - b, turns) if turns else 1):
                    T.copy(whole[(b + turn * turns) * tile, 0], x)
                    for i, j in T.Parallel(tile, devices * wide):
                        x[i, j] = x[i, j] + x[i, j]
                    T.copy(x, Y[(b + turn * turns) * tile, 0])

    return f


@settings(max_examples=4, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    devices=st.integers(2, 4),
    rows=st.integers(3, 9),
    tile=st.integers(1, 2),
    turns=st.sampled_from((0, 2)),
    chunk=st.none() | st.integers(1, 9),
)
def test_columns_come_row_by_row(devices: int, rows: int, tile: int, turns: int, chunk: int | None):
    func = gather_columns(devices, rows, tile, 3, turns)
    changed, schedule = overlapped(func, chunk=chunk)
    assert schedule.moves[0].overlapped, schedule
    args = [[torch.randn(rows, 3), torch.full((rows, 3 * devices), torch.nan)] for _ in range(devices)]
    check_same(func, changed, args, seeds=(None, 1))
    without = changed.with_body(tir.rewrite(changed.body, leave=lambda n: tir.sequence([]) if is_wait(n) else None))
    with pytest.raises((RaceError, UninitializedReadError)):
        tilescale.emulate(without, args, machine=H200, time=False)


def test_a_wait_that_is_left_out_would_race():
    changed, _ = overlapped(gather_then_scale(2, 8, 4))
    without = changed.with_body(tir.rewrite(changed.body, leave=lambda n: tir.sequence([]) if is_wait(n) else None))
    with pytest.raises(RaceError):
        tilescale.emulate(without, arguments(changed, 2), machine=H200, time=False)


def test_behind_a_reduction_the_own_part_is_in_place_before_the_gather_starts():
    """Copies of the reduction wait for tiles; no later operation of the queue overtakes them, also not a local copy."""

    @T.prim_func
    def f(X: T.Tensor((16, 8), "float32"), Y: T.Tensor((16, 8), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as b:
            made, mine, whole = (T.alloc((n, 8), "float32", level="l2") for n in (16, 8, 16))
            x, y = (T.alloc((4, 8), "float32", level="l1") for _ in range(2))
            T.copy(X[b * 4, 0], x)
            T.copy(x, made[b * 4, 0])
            with T.Scale("device"):
                T.reduce_scatter(made, mine, dim=0)
                T.all_gather(mine, whole)
            with T.Scale("block"):
                T.copy(whole[b * 4, 0], y)
                T.copy(y, Y[b * 4, 0])

    changed, schedule = overlapped(f, carrier="queue")
    assert all(move.overlapped for move in schedule.moves), schedule
    assert "T.region(whole[device_rank" in changed.script().partition("T.tilescale.all_gather(")[2].partition("\n")[0]
    given_ = [[torch.randint(9, (16, 8)).float(), torch.full((16, 8), torch.nan)] for _ in range(2)]
    check_same(f, changed, given_)
    assert any("all_gather(signal=)" in note for note in notes(changed))


def is_wait(node: Any) -> bool:
    return isinstance(node, ir.Evaluate) and ir.op_name(node.value) == WAIT.name


# -- what stays in order -----------------------------------------------------------------------------------------------


def gather_and(
    *,
    before: bool = False,
    writes: bool = False,
    on_device: bool = False,
    again: bool = False,
    reads: bool = True,
    impl: str | None = None,
    dim: int = 0,
    barrier: bool = False,
    known: bool = True,
    whole: bool = False,
) -> Any:
    """A gather, and a statement that prevents its overlap."""

    @T.prim_func
    def f(X: T.Tensor((16, 16), "float32"), Y: T.Tensor((16, 16), "float32"), R: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=4, threads=32) as b:
            gathered = T.alloc((16, 16), "float32", level="l2")
            with T.Scale("device"):
                mine = T.view(X, layout=T.FullRow if dim == 0 else T.FullCol)
                if before:
                    T.clear(gathered)
                T.all_gather(mine, gathered, dim=dim, impl=impl)
                if again:
                    T.all_gather(mine, gathered, dim=dim)
                if on_device:
                    T.copy(gathered, Y)
            with T.Scale("device"), T.Scale("block"):
                x = T.alloc((4, 16), "float32", level="l1")
                if reads:
                    if whole:
                        every = T.alloc((16, 16), "float32", level="l1")
                        T.copy(gathered, every)
                        T.copy(every[b * 4, 0], x)
                    elif known:
                        T.copy(gathered[b * 4, 0], x)
                    else:
                        for i, j in T.Parallel(4, 16):
                            x[i, j] = gathered[R[i], j]
                else:
                    T.clear(x)
                if barrier:
                    with T.Scale("device"):
                        T.allreduce(x)
                T.copy(x, Y[b * 4, 0])
                if writes:
                    T.copy(x, gathered[b * 4, 0])

    return f


REASONS = {
    "before": "what it writes is used before it too",
    "writes": "its result is overwritten while it may be in flight",
    "on_device": "its result is used outside of a grid",
    "again": "its result is overwritten while it may be in flight",
    "barrier": "programs of the grid synchronize",
}


@pytest.mark.parametrize("what", REASONS)
def test_what_cannot_be_proven_stays_in_order(what: str):
    func = gather_and(**{what: True})
    changed, schedule = overlapped(func)
    move = schedule.moves[0]
    assert not move.overlapped and move.why.startswith(REASONS[what])
    assert changed.same_as(func)


def test_the_reason_names_the_line():
    _, schedule = overlapped(gather_and(writes=True))
    assert schedule.moves[0].why.endswith(f"(line {line(gather_and, 'T.copy(x, gathered')})")


def test_other_reasons():
    for given_, reason in (
        ({"reads": False}, "no grid reads its result"),
        ({"impl": "ring"}, "impl='ring' was requested"),
        ({"known": False}, "which rows a tile touches is known at launch only: 'R' says"),
        ({"whole": True}, "every tile reads all rows"),
    ):
        (move,) = overlapped(gather_and(**given_))[1].moves
        assert not move.overlapped and move.why.startswith(reason), move


# -- schedules ---------------------------------------------------------------------------------------------------------


def test_what_does_not_pay_stays_in_order():
    kernel = tilescale.compile(gather_then_scale(4, 8, 4), machine=H200, schedule="overlap")
    (move,) = kernel.moves.moves
    assert not move.overlapped and move.why == "it is not estimated to save time"
    assert "sequential: it is not estimated to save time; estimated" in kernel.schedule


def test_a_schedule_can_be_edited_and_passed_back():
    func = gather_then_scale(4, 8, 4)
    kernel = tilescale.compile(func, machine=H200, schedule="overlap")
    kernel.moves.moves[0].overlapped, kernel.moves.moves[0].chunk = True, 4
    again = tilescale.compile(func, machine=H200, schedule=kernel.moves)
    assert "overlapped, 4 rows at a time" in again.schedule
    assert "start all_gather(X, gathered)" in again.schedule


def test_a_schedule_of_another_program_is_refused():
    _, other = overlap(gather_and(again=True), H200)
    with pytest.raises(UsageError, match="the schedule is for"):
        tilescale.compile(gather_then_scale(4, 8, 4), machine=H200, schedule=other)
    with pytest.raises(UsageError, match="a positive number of rows"):
        tilescale.Move("all_gather", ("X", "Y"), chunk=0)


def test_of_shards_by_rows_and_columns_the_rows_come_beside_the_grid():
    """Rows are split over two nodes, columns over the devices of each: the first gather feeds the second, so it stays.
    """
    servers, (nodes, devices), (high, wide) = Machine.load("h200-sxm-8x4"), (2, 3), (12, 6)
    with tilescale.use_machine(servers):

        @T.prim_func
        def f(
            X: T.Tensor((high // nodes, wide // devices), "float32"),
            Y: T.Tensor((high, wide), "float32"),
        ):
            with T.Kernel(node=nodes, device=devices, block=-(-high // 4), threads=32) as b:
                rows = T.alloc((high // nodes, wide), "float32", level="l2")
                whole = T.alloc((high, wide), "float32", level="l2")
                with T.Scale("device"):
                    T.all_gather(X, rows, dim=1)
                with T.Scale("device"), T.Scale("node"):
                    T.all_gather(rows, whole, dim=0)
                with T.Scale("block"):
                    x = T.alloc((4, wide), "float32", level="l1")
                    T.copy(whole[b * 4, 0], x)
                    for i, j in T.Parallel(4, wide):
                        x[i, j] = x[i, j] * 2
                    T.copy(x, Y[b * 4, 0])

    _, first = overlap(f, servers)
    changed, schedule = overlap(f, servers, Schedule([replace(move, overlapped=True) for move in first.moves]))
    assert [move.overlapped for move in schedule.moves] == [False, True]
    second = line(test_of_shards_by_rows_and_columns_the_rows_come_beside_the_grid, "T.all_gather(rows")
    assert f"its result is used outside of a grid (line {second})" in str(schedule)
    whole = torch.randn(high, wide, generator=torch.Generator().manual_seed(0))
    shards = [part.contiguous() for rows in whole.chunk(nodes) for part in rows.chunk(devices, 1)]
    for seed in (None, 1):
        args = [[part, torch.full((high, wide), torch.nan)] for part in shards]
        tilescale.emulate(changed, args, machine=servers, time=False, schedule_seed=seed)
        assert all(torch.equal(y, 2 * whole) for _, y in args)
