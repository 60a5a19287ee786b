# SPDX-License-Identifier: MIT
"""All-to-alls overlapped with the grids that write their inputs and read their results: rewritten programs, equal bits.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tilescale
import tilescale.language as T
from tests.overlap.support import H200, Tensors, check_same, line, overlapped
from tests.overlap.test_grouped import with_capacity
from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.errors import RaceError
from tilescale.program.ops import SIGNAL, WAIT

WIDE = 4


def around(
    devices: int,
    rows: int,
    tile: int,
    *,
    before: bool = True,
    after: bool = True,
    back: bool = False,
    experts: int = 0,
    slots: bool = False,
    columns: int = 1,
    turns: int = 0,
) -> Any:
    """A grid that scales rows, an all-to-all, and a grid that scales the received rows; with `back` a second
    all-to-all.

    Args:
        rows: of the part that a device has for another one.
        before, after: whether there are these grids.
        experts: of each device, by whose numbers tiles of `rows` each are scaled, too; 0 for none.
        slots: whether tensors have a dimension for the devices, so that tiles end with a part.
        columns: number of tiles in a row.
        turns: blocks of a persistent grid; 0 for one block for each tile.
    """
    each, groups = -(-rows // tile), experts or 1
    tiles = devices * groups * each if slots or experts else -(-devices * rows // tile)
    blocks = turns or tiles * columns
    shape: tuple[int, ...] = (devices * rows, WIDE * columns)
    if slots or experts:
        shape = (devices, *[experts] * bool(experts), rows, WIDE * columns)

    @T.macro
    def scaled(source, target, place, factor):
        x = T.alloc((tile, WIDE), "float32", level="l1")
        at, column = place // columns, place % columns * WIDE
        part, group, row = at // (groups * each), at // each % groups, at % each * tile
        if experts:
            T.copy(source[part, group, row, column], x)
        elif slots:
            T.copy(source[part, row, column], x)
        else:
            T.copy(source[at * tile, column], x)
        for i, j in T.Parallel(tile, WIDE):
            x[i, j] = x[i, j] * (factor + group)
        if experts:
            T.copy(x, target[part, group, row, column])
        elif slots:
            T.copy(x, target[part, row, column])
        else:
            T.copy(x, target[at * tile, column])

    @T.macro
    def grid(source, target, block, factor):
        with T.Scale("device"), T.Scale("block"):
            for turn in T.serial(T.ceildiv(tiles * columns - block, turns) if turns else 1):
                scaled(source, target, block + turn * turns, factor)

    @T.prim_func
    def f(X: T.Tensor(shape, "float32"), Y: T.Tensor(shape, "float32")):
        with T.Kernel(device=devices, block=blocks, threads=32) as block:
            made = T.alloc(shape, "float32", level="l2")
            come = T.alloc(shape, "float32", level="l2")
            if before:
                grid(X, made, block, 3)
            with T.Scale("device"):
                if after:
                    T.all_to_all(made if before else X, come)
                else:
                    T.all_to_all(made, Y)
            if back:
                again = T.alloc(shape, "float32", level="l2")
                grid(come, again, block, 5)
                with T.Scale("device"):
                    T.all_to_all(again, Y)
            elif after:
                grid(come, Y, block, 5)

    return f


def arguments(func: Any, devices: int) -> Tensors:
    """An X of its own, and a poisoned Y, for each device."""
    (x, _), rng = (b for _, b in ir.parameters(func)), torch.Generator().manual_seed(0)
    shape = tuple(int(n) for n in x.shape)
    return [[torch.randn(shape, generator=rng), torch.full(shape, torch.nan)] for _ in range(devices)]


def test_without_a_grid_before_it_is_started():
    changed, schedule = overlapped(around(4, 8, 4, before=False), chunk=4)
    text, (move,) = changed.script(), schedule.moves
    assert "T.tilescale.all_to_all(" in text and "chunk=4, slots=0" in text
    assert "at_tile: T.int32 = (device_rank + 4 - at // 2) % 4 * 2 + at % 2" in text
    assert move.why == "each tile waits for its rows" and move.ordered


def test_with_a_grid_before_a_chunk_leaves_when_its_tiles_are_counted():
    changed, schedule = overlapped(around(4, 8, 4), chunk=4)
    text, (move,) = changed.script(), schedule.moves
    assert "all_to_all" not in text and "T.tilescale.signal(T.region(made_done" in text
    assert "(device_rank + 1 + at // 2) % 4" in text and "(device_rank_1 + 4 - at // 2) % 4" in text
    assert move.why == "a chunk is sent when its tiles are counted, each tile waits for its rows"


def test_tiles_of_the_own_part_are_stored_where_it_stays():
    text = overlapped(around(4, 8, 4))[0].script()
    own, other = (text.index(f"T.region({name}[at_tile * 4, 0], 2") for name in ("come", "made"))
    assert text.index("if at_tile // 2 == device_rank") < own < other
    assert not re.search(r" T.copy\(T.region\(made\[device_rank", text)


def test_the_own_part_is_copied_where_tiles_are_not_all_that_touches_it():
    text = overlapped(with_capacity(4, 1, 8, 4, back="all_to_all"))[0].script()
    assert re.search(r" T.copy\(T.region\(made\[device_rank", text)


def test_the_own_part_is_where_the_caller_looks_for_it():
    """The source is an argument: then it holds the local part too."""

    @T.prim_func
    def f(X: T.Tensor((8, 4), "float32"), sent: T.Tensor((8, 4), "float32"), Y: T.Tensor((8, 4), "float32")):
        with T.Kernel(device=2, block=2, threads=32) as block:
            with T.Scale("block"):
                x = T.alloc((4, 4), "float32", level="l1")
                T.copy(X[block * 4, 0], x)
                T.copy(x, sent[block * 4, 0])
            with T.Scale("device"):
                T.all_to_all(sent, Y)

    changed, schedule = overlapped(f)
    assert schedule.moves[0].overlapped
    args = [[torch.randn(8, 4), *(torch.full((8, 4), torch.nan) for _ in range(2))] for _ in range(2)]
    check_same(f, changed, args, seeds=(None,))


def test_there_and_back_what_comes_first_leaves_first():
    changed, schedule = overlapped(around(4, 8, 4, before=False, back=True))
    there, back = schedule.moves
    assert there.overlapped and back.overlapped and there.ordered and back.ordered
    text = changed.script()
    assert re.search(r"T.tilescale.copy\(T.region\(again\[\(device_rank_?\d* \+ 4 - step\) % 4 \* 8", text), text


def test_blocks_without_rows_do_not_make_those_of_others_again():
    """Three blocks for two tiles: put into the order of travel, the last would take one that another has."""
    func = around(2, 2, 2, back=True, turns=3)
    changed, schedule = overlapped(func)
    check_same(func, changed, arguments(func, 2))
    for move in schedule.moves:
        assert move.overlapped and "tiles in program order: some programs have no rows" in move.why


def test_extents_of_loops_need_not_be_simplified():
    """Two neighbouring blocks for one tile: once rewritten, the extent of a loop is the larger of two numbers."""
    func = around(2, 2, 4, back=True, columns=2)
    changed, schedule = overlapped(func)
    assert schedule.moves[0].overlapped
    check_same(func, changed, arguments(func, 2))


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    devices=st.integers(2, 4),
    rows=st.integers(1, 6),
    tile=st.sampled_from((2, 3, 4)),
    grids=st.sampled_from(
        ({}, {"before": False}, {"after": False}, {"back": True}, {"before": False, "back": True})
    ),
    shape=st.sampled_from(({}, {"slots": True}, {"experts": 2}, {"turns": 3}, {"columns": 2})),
    chunk=st.none() | st.integers(1, 6),
    ordered=st.booleans(),
)
def test_results_are_the_same(
    devices: int,
    rows: int,
    tile: int,
    grids: dict[str, bool],
    shape: dict[str, Any],
    chunk: int | None,
    ordered: bool,
):
    func = around(devices, rows, tile, **grids, **shape)
    changed, schedule = overlapped(func, chunk=chunk, ordered=ordered)
    assert all(move.overlapped for move in schedule.moves) or "every tile reads all rows" in str(schedule), schedule
    check_same(func, changed, arguments(func, devices), seeds=(None, 1))


@pytest.mark.parametrize("name", [WAIT.name, SIGNAL.name])
def test_what_is_left_out_would_race(name: str):
    """A wait of a tile, or a tile that is counted: then a copy leaves too early, as its count is one less."""
    changed, _ = overlapped(around(2, 8, 4))

    def without(node: Any) -> Any:
        if name == WAIT.name and isinstance(node, ir.Evaluate) and ir.op_name(node.value) == name:
            return tir.sequence([])
        if name == SIGNAL.name and isinstance(node, ir.Call) and ir.attribute(node, "after") is not None:
            return ir.Call(node.dtype, node.op, [*node.args[:-1], node.args[-1] - 1], node.annotations)
        return None

    broken = changed.with_body(tir.rewrite(changed.body, leave=without))
    with pytest.raises(RaceError):
        tilescale.emulate(broken, arguments(changed, 2), machine=H200, time=False)


def slots_behind_rows(devices: int, rows: int, before: bool) -> Any:
    """A tensor whose parts have a dimension behind that of the rows, exchanged along it."""
    shape = rows, devices, 3, WIDE

    @T.prim_func
    def f(X: T.Tensor(shape, "float32"), Y: T.Tensor(shape, "float32")):
        with T.Kernel(device=devices, block=(rows, devices), threads=32) as (row, part):
            made, come = (T.alloc(shape, "float32", level="l2") for _ in range(2))
            if before:
                with T.Scale("device"), T.Scale("block"):
                    for i, j in T.Parallel(3, WIDE):
                        made[row, part, i, j] = X[row, part, i, j] * 2
            with T.Scale("device"):
                T.all_to_all(made if before else X, come, dim=1)
            with T.Scale("block"):
                for i, j in T.Parallel(3, WIDE):
                    Y[row, part, i, j] = come[row, part, i, j] + 1

    return f


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(("before", "local"), [(False, None), (False, "source"), (True, None)])
def test_slots_behind_rows(devices: int, before: bool, local: str | None):
    func = slots_behind_rows(devices, 5, before)
    changed, schedule = overlapped(func, chunk=2, local=local)
    (move,) = schedule.moves
    assert move.overlapped and ("local rows from the source" in move.why) == (local is not None)
    check_same(func, changed, arguments(func, devices))


# -- what stays in order -----------------------------------------------------------------------------------------------


def exchange_and(
    *, dim: int = 0, written: bool = False, sent: bool = False, known: bool = True, besides: bool = False
) -> Any:
    """An all-to-all of an argument, and a statement that prevents its overlap."""

    @T.prim_func
    def f(X: T.Tensor((16, 16), "float32"), Y: T.Tensor((16, 16), "float32"), R: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=4, threads=32) as b:
            come = T.alloc((16, 16), "float32", level="l2")
            with T.Scale("device"):
                if besides:
                    T.clear(come)
                T.all_to_all(X, come, dim=dim)
            with T.Scale("block"):
                x = T.alloc((4, 16), "float32", level="l1")
                if known:
                    T.copy(come[b * 4, 0], x)
                else:
                    for i, j in T.Parallel(4, 16):
                        x[i, j] = come[R[i], j]
                T.copy(x, Y[b * 4, 0])
                if written:
                    T.copy(x, come[b * 4, 0])
                if sent:
                    T.copy(x, X[b * 4, 0])

    return f


@pytest.mark.parametrize(
    ("against", "reason"),
    [
        ({"dim": 1}, "it does not exchange along the first dimension"),
        ({"written": True}, "no grid makes what it sends; its result is overwritten while it may be in flight"),
        ({"sent": True}, "what it sends is overwritten while it may be in flight"),
        ({"known": False}, "no grid makes what it sends; which rows a tile touches is known at launch only: 'R' says"),
        ({"besides": True}, "what it writes is used before it too"),
    ],
)
def test_what_cannot_be_proven_stays_in_order(against: dict[str, Any], reason: str):
    func = exchange_and(**against)
    changed, schedule = overlapped(func)
    (move,) = schedule.moves
    assert not move.overlapped and move.why.startswith(reason), move
    assert changed.same_as(func)


def test_the_reason_names_the_line():
    (move,) = overlapped(exchange_and(written=True))[1].moves
    assert move.why.endswith(f"(line {line(exchange_and, 'T.copy(x, come')})")
