# SPDX-License-Identifier: MIT
"""Reduce-scatters and all-reduces overlapped with the grid that writes their input: the same bits, in any order."""

import functools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tilescale
import tilescale.language as T
from tests.emulator.support import drawn_tiles
from tests.overlap.support import H200, Tensors, check_leaves, check_same, line, overlapped
from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.errors import RaceError, UsageError
from tilescale.passes.overlap.rewrite import overlap
from tilescale.passes.overlap.schedule import Move, Schedule


def scale_then_reduce(
    devices: int,
    rows: int,
    tile: int,
    *,
    columns: int = 8,
    dtype: str = "float32",
    op: str = "sum",
    everywhere: bool = False,
    slots: bool = False,
    rows_first: bool = False,
    turns: int = 0,
) -> Any:
    """Each block writes a tile of twice X, then the parts of all devices are reduced: local rows, or all of them, to Y.

    Args:
        rows: of each device.
        slots: whether what is reduced has a dimension for the devices, so that tiles end with a part.
        rows_first: whether neighbours in the grid work on different rows.
        turns: blocks of a persistent grid; 0 for one block for each tile.
    """
    total, wide = devices * rows, 4
    high = -(-rows // tile) * tile  # rows of a part as tiles count them
    tiles = devices * high // tile if slots else -(-total // tile)
    across = -(-columns // wide)
    whole = (devices, rows, columns) if slots else (total, columns)
    result = whole if everywhere else (1, rows, columns) if slots else (rows, columns)
    grid = (turns, 1) if turns else (tiles, across) if rows_first else (across, tiles)

    @T.prim_func
    def f(X: T.Tensor(whole, dtype), Y: T.Tensor(result, dtype)):
        with T.Kernel(device=devices, block=grid, threads=32) as (bx, by):
            made = T.alloc(whole, dtype, level="l2")
            with T.Scale("device"), T.Scale("block"):
                x = T.alloc((tile, wide), dtype, level="l1")
                for turn in T.serial(T.ceildiv(tiles * across - bx, turns) if turns else 1):
                    place = bx + turn * turns
                    at = (place // across if turns else bx if rows_first else by) * tile
                    column = (place % across if turns else by if rows_first else bx) * wide
                    if slots:
                        T.copy(X[at // high, at % high, column], x)
                    else:
                        T.copy(X[at, column], x)
                    for i, j in T.Parallel(tile, wide):
                        x[i, j] = x[i, j] + x[i, j]
                    if everywhere:
                        T.copy(x, Y[at, column])
                    elif slots:
                        T.copy(x, made[at // high, at % high, column])
                    else:
                        T.copy(x, made[at, column])
            with T.Scale("device"):
                if everywhere:
                    T.allreduce(Y, op=op)
                else:
                    T.reduce_scatter(made, Y, op=op, dim=0)

    return f


def arguments(func: Any, devices: int) -> Tensors:
    """An X of its own, and a poisoned Y, for each device."""
    (x, y), rng = ((b for _, b in ir.parameters(func))), torch.Generator().manual_seed(0)
    shapes = [tuple(int(n) for n in b.shape) for b in (x, y)]
    dtype = getattr(torch, str(x.dtype))
    return [
        [(torch.randn(shapes[0], generator=rng) * 3).to(dtype), torch.full(shapes[1], 113).to(dtype)]
        for _ in range(devices)
    ]


def in_order_of_ranks(args: Tensors, op: str, everywhere: bool, dim: int = 0) -> Tensors:
    """Expected arguments afterwards: narrow types combined in float32, and rounded once."""
    combine = torch.maximum if op == "max" else torch.add
    parts = [x + x for x, _ in args]
    total = parts[0].float() if parts[0].dtype == torch.bfloat16 else parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    shares = [total] * len(args) if everywhere else total.chunk(len(args), dim)
    return [[x, share.to(x.dtype).contiguous()] for (x, _), share in zip(args, shares, strict=True)]


def test_others_rows_first_and_a_chunk_leaves_when_its_tiles_are_counted():
    changed, schedule = overlapped(scale_then_reduce(4, 16, 4), chunk=8, carrier="queue")
    text = changed.script()
    assert "(device_rank + 1 + " in text and "// 4) % 4 * 4" in text
    assert "T.tilescale.signal(T.region(made_done" in text
    assert '4, level="device", far="dst", op="add", after=">=")' in text  # two rows of tiles, two columns
    assert schedule.moves[0].ordered and schedule.moves[0].chunk == 8


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    devices=st.integers(2, 8),
    rows=st.integers(1, 9),
    tile=st.sampled_from((2, 3, 4)),
    columns=st.sampled_from((4, 6, 8)),
    shape=st.sampled_from(({}, {"rows_first": True}, {"turns": 3}, {"slots": True}, {"everywhere": True})),
    kind=st.sampled_from((("bfloat16", "sum"), ("float32", "max"), ("float32", "sum"), ("int32", "sum"))),
    chunk=st.none() | st.integers(1, 9),
    carrier=st.sampled_from((None, "queue", "tiles")),
    ordered=st.booleans(),
)
def test_results_are_the_same(
    devices: int,
    rows: int,
    tile: int,
    columns: int,
    shape: dict[str, Any],
    kind: tuple[str, str],
    chunk: int | None,
    carrier: str | None,
    ordered: bool,
):
    func = scale_then_reduce(devices, rows, tile, columns=columns, dtype=kind[0], op=kind[1], **shape)
    changed, schedule = overlapped(func, chunk=chunk, carrier=carrier, ordered=ordered)
    assert schedule.moves[0].overlapped or carrier == "tiles", schedule  # not all tiles can go by themselves
    if not schedule.moves[0].overlapped:
        return
    args = arguments(func, devices)
    with drawn_tiles():
        check_leaves(changed, args, in_order_of_ranks(args, kind[1], "everywhere" in shape), seeds=(None, 1))


def test_a_number_that_is_none_stays_in_a_maximum():
    func = scale_then_reduce(3, 4, 2, op="max")
    changed, schedule = overlapped(func, chunk=2)
    assert schedule.moves[0].overlapped
    args = arguments(func, 3)
    for device, (x, _) in enumerate(args):
        x.view(-1)[device] = torch.nan
    tilescale.emulate(changed, args, machine=H200, progress=False)
    found = torch.cat([y for _, y in args]).view(-1).isnan()
    assert found[:3].all() and not found[3:].any()


def test_a_grid_behind_adds_up_where_it_is_asked_for():
    func = scale_then_reduce(4, 16, 4)
    _, schedule = overlapped(func, chunk=8, carrier="queue")
    (move,) = schedule.moves
    assert move.adds == "tiles"
    move.adds = "grid"
    changed, again = overlap(func, H200, schedule)
    assert again.moves[0].adds == "grid" and "a separate grid accumulates: as requested" in str(again)
    args = arguments(func, 4)
    check_leaves(changed, args, in_order_of_ranks(args, "sum", False), seeds=(None,))
    with pytest.raises(UsageError, match="adds='nobody'"):
        Move("reduce_scatter", ("X", "Y"), adds="nobody")


def scale_then_scatter_columns(
    devices: int, columns: int, tile: int, rows: int, dtype: str = "float32", turns: int = 0
) -> Any:
    """Each block writes a tile of twice X, then the parts of all devices are added up: local columns to Y.

    Args:
        columns: of each device.
        turns: blocks of a persistent grid; 0 for one block for each tile.
    """
    total, high = devices * columns, 4
    across, down = -(-total // tile), -(-rows // high)

    @T.prim_func
    def f(X: T.Tensor((rows, total), dtype), Y: T.Tensor((rows, columns), dtype)):
        with T.Kernel(device=devices, block=(turns, 1) if turns else (across, down), threads=32) as (bx, by):
            made = T.alloc((rows, total), dtype, level="l2")
            with T.Scale("device"), T.Scale("block"):
                x = T.alloc((high, tile), dtype, level="l1")
                for turn in T.serial(T.ceildiv(across * down - bx, turns) if turns else 1):
                    at = ((bx + turn * turns) // across if turns else by) * high
                    column = ((bx + turn * turns) % across if turns else bx) * tile
                    T.copy(X[at, column], x)
                    for i, j in T.Parallel(high, tile):
                        x[i, j] = x[i, j] + x[i, j]
                    T.copy(x, made[at, column])
            with T.Scale("device"):
                T.reduce_scatter(made, Y, dim=1)

    return f


@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    devices=st.integers(2, 5),
    columns=st.integers(1, 9),
    tile=st.sampled_from((2, 3, 4)),
    rows=st.sampled_from((4, 6, 8)),
    turns=st.sampled_from((0, 0, 3)),
    dtype=st.sampled_from(("float32", "bfloat16")),
    chunk=st.none() | st.integers(1, 9),
    carrier=st.sampled_from((None, "queue", "tiles")),
)
def test_columns_are_scattered_alike(chunk: int | None, carrier: str | None, **shape: Any):
    func = scale_then_scatter_columns(**shape)
    changed, schedule = overlapped(func, chunk=chunk, carrier=carrier)
    assert schedule.moves[0].overlapped or carrier == "tiles", schedule
    if schedule.moves[0].overlapped:
        args = arguments(func, shape["devices"])
        with drawn_tiles():
            check_leaves(changed, args, in_order_of_ranks(args, "sum", False, dim=1), seeds=(None, 1))


def test_others_columns_come_first_and_own_tiles_add_up():
    changed, schedule = overlapped(scale_then_scatter_columns(4, 16, 4, 8), chunk=8, carrier="queue")
    text, (move,) = tilescale.compile(changed, machine=H200).python, schedule.moves
    assert move.ordered and "local tiles accumulate" in move.why and "8 columns at a time" in str(schedule)
    assert "T.copy(made[:, (device_rank + 1 + step) % 4 * 16 + chunk * 8" in text


def test_parts_are_where_the_caller_looks_for_them():
    """The reduced tensor is an argument: it holds local tiles too, so a later grid adds up."""

    @T.prim_func
    def f(X: T.Tensor((16, 4), "float32"), parts: T.Tensor((16, 4), "float32"), Y: T.Tensor((8, 4), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as block:
            with T.Scale("block"):
                x = T.alloc((4, 4), "float32", level="l1")
                T.copy(X[block * 4, 0], x)
                T.copy(x, parts[block * 4, 0])
            with T.Scale("device"):
                T.reduce_scatter(parts, Y)

    changed, schedule = overlapped(f, carrier="queue")
    assert schedule.moves[0].overlapped and "a separate grid accumulates" in schedule.moves[0].why
    args = [[torch.randn(16, 4), torch.full((16, 4), torch.nan), torch.full((8, 4), torch.nan)] for _ in range(2)]
    check_same(f, changed, args, seeds=(None, 1))
    assert not overlapped(f, carrier="tiles")[1].moves[0].overlapped


def test_tiles_go_to_their_owners_where_the_queue_begins_late():
    changed, schedule = overlapped(scale_then_reduce(4, 16, 4), carrier="tiles")
    text, (move,) = changed.script(), schedule.moves
    assert move.overlapped and move.carrier == "tiles" and "made_done" not in text
    assert re.search(r"T.tilescale.copy\(T.region\(x_1\[0, 0\].*T.region\(made_inbox", text)


def test_the_cheaper_carrier_is_the_first_choice():
    func = scale_then_reduce(4, 16, 4)
    chosen, tiles, queue = (overlapped(func, carrier=carrier)[1].moves[0] for carrier in (None, "tiles", "queue"))
    assert chosen.carrier == "tiles" and chosen.overlapped_s == tiles.overlapped_s < queue.overlapped_s


def test_the_queue_is_the_first_choice_where_the_link_takes_most_of_the_time():
    func = scale_then_reduce(2, 1 << 13, 128, columns=512)
    chosen, tiles, queue = (overlapped(func, carrier=carrier)[1].moves[0] for carrier in (None, "tiles", "queue"))
    assert chosen.carrier == "queue" and chosen.overlapped_s == queue.overlapped_s < tiles.overlapped_s


def test_blocks_in_an_order_of_their_own_do_not_wait():
    @T.prim_func
    def f(X: T.Tensor((16, 16), "float32"), Y: T.Tensor((8, 16), "float32")):
        with T.Kernel(device=2, block=(4, 4), threads=32) as (bx, by):
            T.use_swizzle(2)
            made = T.alloc((16, 16), "float32", level="l2")
            with T.Scale("device"), T.Scale("block"):
                x = T.alloc((4, 4), "float32", level="l1")
                T.copy(X[by * 4, bx * 4], x)
                T.copy(x, made[by * 4, bx * 4])
            with T.Scale("device"):
                T.reduce_scatter(made, Y, dim=0)

    (move,) = overlapped(f)[1].moves
    assert "a separate grid accumulates: the program sets the order of its blocks itself" in move.why


def test_a_tile_that_is_not_counted_would_race():
    changed, _ = overlapped(scale_then_reduce(2, 8, 4), carrier="queue")
    without = changed.with_body(tir.rewrite(changed.body, leave=_without_after))
    with pytest.raises(RaceError):
        tilescale.emulate(without, arguments(changed, 2), machine=H200, time=False)


def _without_after(node: Any) -> Any:
    """A copy that waits for one tile less."""
    if not isinstance(node, ir.Call) or ir.attribute(node, "after") is None:
        return None
    *args, count = node.args
    return ir.Call(node.dtype, node.op, [*args, count - 1], node.annotations)


# -- what stays in order -----------------------------------------------------------------------------------------------


def reduce_and(
    *,
    between: bool = False,
    written: bool = False,
    unmade: bool = False,
    uneven: bool = False,
    partly: bool = False,
    function: bool = False,
    inside: bool = False,
) -> Any:
    """A reduction, and a statement that prevents its overlap."""
    rows = 15 if uneven else 16

    @T.prim_func
    def f(X: T.Tensor((rows, 8), "float32"), Y: T.Tensor((8, 8), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as b:
            made = T.alloc((rows, 8), "float32", level="l2")
            with T.Scale("device"), T.Scale("block"):
                x = T.alloc((4, 8), "float32", level="l1")
                T.copy(X[b * 4, 0], x)
                if not unmade:
                    if partly:
                        if b < 2:
                            T.copy(x, made[b * 4, 0])
                    else:
                        T.copy(x, made[b * 4, 0])
            with T.Scale("device"):
                if between:
                    T.clear(made)
                if function:
                    T.allreduce(made, fn=lambda a, b: a + b)
                elif uneven:
                    T.allreduce(made)
                elif inside:
                    T.reduce_scatter(made, made[0:8, 0:8], dim=0)
                else:
                    T.reduce_scatter(made, Y, dim=0)
                if written:
                    T.clear(made)

    return f


REASONS = {
    "between": "no grid makes what it reduces",
    "written": "what it sends is overwritten while it may be in flight",
    "unmade": "no grid makes what it reduces",
    "uneven": "15 rows do not divide among 2 units",
    "partly": "no tile makes some of the rows",
    "function": "it combines tiles by a function",
    "inside": "its result is a part of 'made' itself",
}


@pytest.mark.parametrize("what", REASONS)
def test_what_cannot_be_proven_stays_in_order(what: str):
    func = reduce_and(**{what: True})
    changed, schedule = overlapped(func)
    (move,) = schedule.moves
    assert not move.overlapped and move.why.startswith(REASONS[what])
    assert changed.same_as(func)


def test_a_grid_in_a_loop_stays_in_order():
    @T.prim_func
    def f(X: T.Tensor((16, 8), "float32"), Y: T.Tensor((8, 8), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as b:
            made = T.alloc((16, 8), "float32", level="l2")
            for turn in T.serial(2):
                with T.Scale("device"), T.Scale("block"):
                    x = T.alloc((4, 8), "float32", level="l1")
                    T.copy(X[b * 4, 0], x)
                    T.fill(x, turn)
                    T.copy(x, made[b * 4, 0])
            with T.Scale("device"):
                T.reduce_scatter(made, Y, dim=0)

    (move,) = overlapped(f)[1].moves
    assert move.why.startswith("the grid that makes what it reduces is in a loop or a branch")


def test_the_reason_names_the_line():
    (move,) = overlapped(reduce_and(written=True))[1].moves
    assert move.why.endswith(f"(line {line(reduce_and, 'if written') + 1})")


# -- rounded parts
# -------------------------------------------------------------------------------------------------------


def rounded(func: Any, carrier: str | None = None, adds: str | None = None) -> tuple[Any, Move]:
    """A program whose parts travel as bfloat16, and the remark on its collective."""
    _, schedule = overlap(func, H200)
    asked = {"overlapped": True, "chunk": 4, "carrier": carrier, "adds": adds, "wire": "bfloat16"}
    changed, schedule = overlap(func, H200, Schedule([replace(move, **asked) for move in schedule.moves]))
    return changed, schedule.moves[0]


@pytest.mark.parametrize("adds", ["tiles", "grid"])
@pytest.mark.parametrize("shape", [{}, {"everywhere": True}, {"slots": True, "op": "max"}], ids=str)
def test_parts_of_others_are_rounded_once_where_that_is_asked_for(shape: dict[str, Any], adds: str):
    devices, rows = 3, 8
    func = scale_then_reduce(devices, rows, 4, **shape)
    changed, move = rounded(func, adds=adds)
    assert move.overlapped and move.adds == adds and ", as bfloat16: " in str(move)
    args = arguments(func, devices)
    got = [[tensor.clone() for tensor in mine] for mine in args]
    tilescale.emulate(changed, got, machine=H200, time=False, schedule_seed=1)
    combine = torch.maximum if shape.get("op") == "max" else torch.add
    parts = [(2 * x).reshape(devices, rows, -1) for x, _ in args]

    def combined(owner: int) -> torch.Tensor:
        mine = [p[owner] if rank == owner else p[owner].bfloat16().float() for rank, p in enumerate(parts)]
        return functools.reduce(combine, mine)

    sums = [combined(owner) for owner in range(devices)]
    for rank, (_, y) in enumerate(got):
        want = torch.cat(sums) if shape.get("everywhere") else sums[rank]
        assert torch.equal(y.reshape(want.shape), want)


def test_nothing_is_rounded_that_gains_nothing_or_that_nobody_asked_for():
    assert "not narrower" in rounded(scale_then_reduce(2, 8, 4, dtype="float16"))[1].why
    assert "tiles that programs send" in rounded(scale_then_reduce(2, 8, 4), carrier="tiles")[1].why
    with pytest.raises(UsageError, match="it is one of bfloat16, float16, any"):
        Move("reduce_scatter", ("X", "Y"), wire="int8")
    assert overlapped(scale_then_reduce(2, 8, 4))[1].moves[0].wire is None


@pytest.mark.parametrize(
    ("rows", "dtype", "wire"), [(16384, "float32", "bfloat16"), (4096, "bfloat16", None), (8, "float32", None)]
)
def test_where_rounding_is_allowed_the_cost_decides(rows: int, dtype: str, wire: str | None):
    """A grid that only doubles takes less time than the transfer of its rows: half of many bytes save time."""
    func = scale_then_reduce(2, rows, rows // 8, columns=1024, dtype=dtype)
    given = (Schedule([Move("reduce_scatter", ("made", "Y"), wire=wire)]) for wire in ("any", None))
    asked, exact = (overlap(func, H200, schedule)[1].moves[0] for schedule in given)
    assert asked.overlapped and asked.wire == wire
    assert exact.wire is None and ("with wire='any' parts would be rounded" in exact.why) == (wire is not None)
