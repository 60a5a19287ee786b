# SPDX-License-Identifier: MIT
"""Programs whose rows are known at launch only: overlapped once, with equal results for any number of rows."""

from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.halves import half_at_night
from tests.overlap.support import H200, check_same, overlapped
from tests.overlap.test_gather import gather_columns, is_wait
from tests.overlap.test_prefetch import layers
from tests.overlap.test_shifts import around
from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.errors import RaceError, UninitializedReadError, UsageError
from tilescale.passes.overlap.rewrite import overlap
from tilescale.passes.overlap.schedule import Move, Schedule
from tilescale.passes.structure import structure

DEVICES, WIDE, TILE = 4, 8, 4

ROWS = (1, 4, 10, 23)
"""Less than a tile, one, and several with a rest; of a part."""


def gather(*, slots: bool = True, turns: int = 0, last: bool = True) -> Any:
    """Gather rows, then each block doubles a tile of them.

    Args:
        slots: whether the gathered tensor has a dimension for the devices.
        turns: blocks of a persistent grid; 0 for one block for each tile.
        last: whether the parts are along the last axis of the grid.
    """
    rows = T.dynamic("rows")
    whole = (DEVICES, rows, WIDE) if slots else (DEVICES * rows, WIDE)
    tiles, parts = (T.ceildiv(rows, TILE), DEVICES) if slots else (T.ceildiv(DEVICES * rows, TILE), 1)
    grid = (turns or tiles, parts) if last else (parts, turns or tiles)

    @T.prim_func
    def f(X: T.Tensor((1, rows, WIDE) if slots else (rows, WIDE), "float32"), Y: T.Tensor(whole, "float32")):
        with T.Kernel(device=DEVICES, block=grid, threads=32) as (bx, by):
            gathered = T.alloc(whole, "float32", level="l2")
            with T.Scale("device"):
                T.all_gather(X, gathered, dim=0)
            with T.Scale("device"), T.Scale("block"):
                x = T.alloc((TILE, WIDE), "float32", level="l1")
                tile, part = (bx, by) if last else (by, bx)
                for turn in T.serial(T.ceildiv(tiles - tile, turns) if turns else 1):
                    row = (tile + turn * turns) * TILE
                    if slots:
                        T.copy(gathered[part, row, 0], x)
                    else:
                        T.copy(gathered[row, 0], x)
                    for i, j in T.Parallel(TILE, WIDE):
                        x[i, j] = x[i, j] + x[i, j]
                    if slots:
                        T.copy(x, Y[part, row, 0])
                    else:
                        T.copy(x, Y[row, 0])

    return f


def reduction(name: str, *, columns: int = 2) -> Any:
    """Each block writes a tile of the parts of all devices, then these are summed, on their owners or on all."""
    rows = T.dynamic("rows")
    shape = (DEVICES, rows, columns * WIDE)
    result = (1 if name == "reduce_scatter" else DEVICES, *shape[1:])

    @T.prim_func
    def f(X: T.Tensor(shape, "float32"), Y: T.Tensor(result, "float32")):
        with T.Kernel(device=DEVICES, block=(columns, T.ceildiv(rows, TILE), DEVICES), threads=32) as (bx, by, owner):
            parts = T.alloc(shape, "float32", level="l2") if result[0] == 1 else Y
            with T.Scale("device"), T.Scale("block"):
                x = T.alloc((TILE, WIDE), "float32", level="l1")
                T.copy(X[owner, by * TILE, bx * WIDE], x)
                for i, j in T.Parallel(TILE, WIDE):
                    x[i, j] = x[i, j] + x[i, j]
                T.copy(x, parts[owner, by * TILE, bx * WIDE])
            with T.Scale("device"):
                if result[0] == 1:
                    T.reduce_scatter(parts, Y, dim=0)
                else:
                    T.allreduce(Y)

    return f


def exchange(*, reads: bool = True) -> Any:
    """Each block writes a tile for another device; what has been received is doubled by further blocks, if `reads`."""
    rows = T.dynamic("rows")
    shape = (DEVICES, rows, WIDE)

    @T.prim_func
    def f(X: T.Tensor(shape, "float32"), Y: T.Tensor(shape, "float32")):
        with T.Kernel(device=DEVICES, block=(T.ceildiv(rows, TILE), DEVICES), threads=32) as (tile, part):
            sent, got = (T.alloc(shape, "float32", level="l2") for _ in range(2))
            x, y = (T.alloc((TILE, WIDE), "float32", level="l1") for _ in range(2))
            with T.Scale("device"), T.Scale("block"):
                T.copy(X[part, tile * TILE, 0], x)
                for i, j in T.Parallel(TILE, WIDE):
                    x[i, j] = x[i, j] + 1
                T.copy(x, sent[part, tile * TILE, 0])
            with T.Scale("device"):
                T.all_to_all(sent, got if reads else Y, dim=0)
            if reads:
                with T.Scale("device"), T.Scale("block"):
                    T.copy(got[part, tile * TILE, 0], y)
                    for i, j in T.Parallel(TILE, WIDE):
                        y[i, j] = y[i, j] + y[i, j]
                    T.copy(y, Y[part, tile * TILE, 0])

    return f


def sum_of_parts(devices: int, *, steps: int = 2, in_turn: bool = False, rows: Any = None) -> Any:
    """Gather rows, then each block adds up the columns of a tile of all parts, in one loop that begins with local ones.

    Args:
        steps: iterations for each part.
        in_turn: whether each iteration reads another part than the one before.
    """
    rows = T.dynamic("rows") if rows is None else rows

    @T.prim_func
    def f(X: T.Tensor((1, rows, steps * WIDE), "float32"), Y: T.Tensor((rows, WIDE), "float32")):
        with T.Kernel(device=devices, block=(1, T.ceildiv(rows, TILE)), threads=32) as (_, tile):
            gathered = T.alloc((devices, rows, steps * WIDE), "float32", level="l2")
            with T.Scale("device"):
                T.all_gather(X, gathered, dim=0)
            with T.Scale("block"), T.Scale("device") as (rank, _):
                x, y = (T.alloc((TILE, WIDE), "float32", level="l1") for _ in range(2))
                T.clear(y)
                for k in T.Pipelined(devices * steps, num_stages=2):
                    turn, step = (k % devices, k // devices) if in_turn else (k // steps, k % steps)
                    T.copy(gathered[(rank + devices - turn) % devices, tile * TILE, step * WIDE], x)
                    for i, j in T.Parallel(TILE, WIDE):
                        y[i, j] = y[i, j] + x[i, j]
                T.copy(y, Y[tile * TILE, 0])

    return f


PROGRAMS = {
    "gather": gather(),
    "gather, one matrix": gather(slots=False),
    "gather, persistent": gather(turns=2),
    "gather, parts first": gather(last=False),
    "reduce_scatter": reduction("reduce_scatter"),
    "allreduce": reduction("allreduce"),
    "all_to_all": exchange(),
    "all_to_all alone": exchange(reads=False),
    "gather of columns": gather_columns(DEVICES, T.dynamic("rows"), TILE, 3),
    "gather, parts in a loop": sum_of_parts(DEVICES),
    "gather, parts in turn": sum_of_parts(DEVICES, in_turn=True),
    "gather in a loop": layers(DEVICES, 3, T.dynamic("rows"), result="workspace"),
    "ring": around(DEVICES, T.dynamic("rows"), TILE, both=True),
}


SHARES = {"gather of columns": 1, "ring": 0}
"""Axes along which the first argument of a program lies over the devices."""


def of_program(name: str, rows: int) -> list[list[torch.Tensor]]:
    """Arguments of one of the programs."""
    found = arguments(PROGRAMS[name], rows)
    if name in SHARES:
        for mine in found:
            mine[0] = mine[0].chunk(DEVICES, SHARES[name])[0].contiguous()
    return found


def arguments(func: Any, rows: int, devices: int = DEVICES) -> list[list[torch.Tensor]]:
    """Numbers of which sums are exact for each device, and a poisoned result, its last argument."""
    rng, given = torch.Generator().manual_seed(0), []
    buffers = [buffer for _, buffer in ir.parameters(func)]
    values = {var: ir.IntImm("int32", rows) for b in buffers for n in b.shape for var in ir.variables(n)}
    shapes = [[ir.integer(ir.substitute(n, values)) for n in buffer.shape] for buffer in buffers]
    for _ in range(devices):
        numbers = [torch.randint(9, shape, generator=rng).float() for shape in shapes]
        given.append([*numbers[:-1], numbers[-1].fill_(torch.nan)])
    return given


FEW = {TILE: (1, 23), 10: (4, 10)}
"""Numbers of rows by the size of a chunk."""


@pytest.mark.parametrize(
    ("name", "chunk", "counts"),
    [
        *half_at_night([*PROGRAMS], [*FEW.items()]),
        *(pytest.param(name, chunk, ROWS, marks=pytest.mark.nightly) for name in PROGRAMS for chunk in FEW),
    ],
)
def test_results_are_the_same_for_any_number_of_rows(name: str, chunk: int, counts: tuple[int, ...]):
    changed, schedule = overlapped(PROGRAMS[name], chunk=chunk)
    assert all(move.overlapped for move in schedule.moves), schedule
    assert "rows as 4096" in str(schedule)
    for rows in counts:
        check_same(PROGRAMS[name], changed, of_program(name, rows), seeds=(None, 1))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "all_to_all alone"])
def test_a_wait_that_is_left_out_would_race(name: str):
    changed, _ = overlapped(PROGRAMS[name], chunk=TILE)
    without = changed.with_body(tir.rewrite(changed.body, leave=lambda n: tir.sequence([]) if is_wait(n) else None))
    with pytest.raises((RaceError, UninitializedReadError)):
        tilescale.emulate(without, of_program(name, 10), machine=H200, time=False)


@pytest.mark.parametrize("carrier", ["queue", "tiles"])
@pytest.mark.parametrize("name", ["reduce_scatter", "allreduce"])
def test_carriers_of_a_reduction(name: str, carrier: str):
    changed, schedule = overlapped(PROGRAMS[name], chunk=TILE, carrier=carrier)
    assert schedule.moves[0].overlapped and schedule.moves[0].carrier == carrier, schedule
    check_same(PROGRAMS[name], changed, of_program(name, 10))


@pytest.mark.parametrize(
    ("name", "carrier"),
    [("gather", None), ("gather of columns", None), ("all_to_all", None), ("reduce_scatter", "tiles")]
    + [("allreduce", carrier) for carrier in ("queue", "tiles")],
)
def test_flags_are_as_many_for_any_number_of_rows(name: str, carrier: str | None):
    changed, _ = overlapped(PROGRAMS[name], chunk=TILE, carrier=carrier, chunks=9)
    flags = [b for launch in structure(changed, H200).launches for b in launch.buffers if b.data in launch.flags]
    assert flags and all(ir.constant(b.shape[-1]) == 9 for b in flags)
    check_same(PROGRAMS[name], changed, of_program(name, 23), seeds=(None,))


def test_tiles_wait_for_whole_chunks_own_part_first():
    text = overlapped(PROGRAMS["gather"], chunk=10)[0].script()
    assert "part_tile: T.int32 = (device_rank + 4 - part) % 4" in text
    assert "T.tilescale.wait(T.region(gathered_here_1[part_tile, tile // 2]" in text
    assert "T.sblock_alloc_buffer((4, (rows + 8 - 1) // 8)" in text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gather, one matrix", "the last axis of the grid is not that of the parts"),
        ("gather, persistent", "the last axis of the grid is not that of the parts"),
        ("gather, parts first", "the last axis of the grid is not that of the parts"),
    ],
)
def test_tiles_stay_as_written_where_no_axis_is_the_part(name: str, reason: str):
    (move,) = overlapped(PROGRAMS[name])[1].moves
    assert move.overlapped and not move.ordered and reason in move.why


def test_what_likely_rows_do_not_pay_for_stays_in_order():
    (move,) = tilescale.compile(PROGRAMS["gather"], machine=H200, schedule="overlap").moves.moves
    assert not move.overlapped and move.why == "it is not estimated to save time"
    assert move.in_order_s is not None


# -- local rows --------------------------------------------------------------------------------------------------------


def test_local_rows_are_read_from_the_source():
    changed, schedule = overlapped(PROGRAMS["gather"], chunk=8, local="source")
    assert "local rows from the source" in str(schedule)
    text = changed.script()
    local, others = text.partition("if part == 0:")[2].split("else:")
    assert "T.region(X[" in local and "gathered" not in local
    assert "T.region(gathered[" in others and "T.region(X[" not in others
    assert "all_gather" not in text and "part_tile: T.int32 = device_rank" in local
    for rows in ROWS:
        check_same(PROGRAMS["gather"], changed, of_program("gather", rows), seeds=(None, 1))


def visible(*, swizzles: bool = False, again: bool = False) -> Any:
    """A gather into an argument; or into a workspace, by a program that swizzles its blocks, or has two grids."""
    rows = T.dynamic("rows")
    whole = (DEVICES, rows, WIDE)

    @T.prim_func
    def f(X: T.Tensor((1, rows, WIDE), "float32"), Y: T.Tensor(whole, "float32")):
        with T.Kernel(device=DEVICES, block=(T.ceildiv(rows, TILE), DEVICES), threads=32) as (tile, part):
            gathered = T.alloc(whole, "float32", level="l2")
            x, y = (T.alloc((TILE, WIDE), "float32", level="l1") for _ in range(2))
            if swizzles or again:
                with T.Scale("device"):
                    T.all_gather(X, gathered, dim=0)
                with T.Scale("device"), T.Scale("block"):
                    if swizzles:
                        T.use_swizzle(4)
                    T.copy(gathered[part, tile * TILE, 0], x)
                    T.copy(x, Y[part, tile * TILE, 0])
                if again:
                    with T.Scale("device"), T.Scale("block"):
                        T.copy(gathered[part, tile * TILE, 0], y)
                        T.copy(y, Y[part, tile * TILE, 0])
            else:
                with T.Scale("device"):
                    T.all_gather(X, Y, dim=0)
                with T.Scale("device"), T.Scale("block"):
                    T.copy(Y[part, tile * TILE, 0], x)

    return f


@pytest.mark.parametrize(
    ("func", "reason"),
    [
        (visible(), "'Y' is an argument, which the caller sees"),
        (visible(swizzles=True), "the program sets the order of its blocks itself"),
        (visible(again=True), "several grids read it"),
        (gather(last=False), "the last axis of the grid is not that of the parts"),
    ],
)
def test_local_rows_are_copied_where_more_is_known_to_read_them(func: Any, reason: str):
    changed, schedule = overlapped(func, chunk=8, local="source")
    assert f"local rows are copied: {reason}" in str(schedule)
    assert schedule.moves[0].local is None
    check_same(func, changed, arguments(func, 10), seeds=(None, 1))


def columns_of(devices: int, wide: int, rows: Any = None) -> Any:
    """Gather rows, then each block adds one to a tile of some columns of them."""
    rows = T.dynamic("rows") if rows is None else rows
    whole = (devices, rows, wide * WIDE)

    @T.prim_func
    def f(X: T.Tensor((1, rows, wide * WIDE), "float32"), Y: T.Tensor(whole, "float32")):
        with T.Kernel(device=devices, block=(wide, T.ceildiv(rows, TILE), devices), threads=32) as (bx, by, part):
            gathered = T.alloc(whole, "float32", level="l2")
            with T.Scale("device"):
                T.all_gather(X, gathered, dim=0)
            with T.Scale("device"), T.Scale("block"):
                x = T.alloc((TILE, WIDE), "float32", level="l1")
                T.copy(gathered[part, by * TILE, bx * WIDE], x)
                for i, j in T.Parallel(TILE, WIDE):
                    x[i, j] = x[i, j] + 1
                T.copy(x, Y[part, by * TILE, bx * WIDE])

    return f


@pytest.mark.parametrize(
    ("group", "blocks", "rows"),
    [
        *((None, 3, None), (2, None, 23), (3, 5, 23), (8, 100, None)),
        *(pytest.param(*given, marks=pytest.mark.nightly) for given in ((None, 3, 23), (2, None, None))),
        *(pytest.param(*given, marks=pytest.mark.nightly) for given in ((3, 5, None), (8, 100, 23))),
    ],
)
def test_tiles_in_groups_and_in_turns_are_all_made(group: int | None, blocks: int | None, rows: int | None):
    func = columns_of(DEVICES, 3, rows)
    moves = Schedule([Move("all_gather", ("X", "gathered"), chunk=8, local="source", group=group, blocks=blocks)])
    changed, schedule = overlap(func, H200, moves)
    assert "local rows from the source" in str(schedule)
    assert schedule.moves[0].blocks == blocks and schedule.moves[0].group == group
    loops = [stmt for stmt in ir.statements(changed.body) if isinstance(stmt, ir.For)]
    grids = [loop for loop in loops if loop.kind == ir.ForKind.THREAD_BINDING]
    if blocks is not None:
        assert [ir.constant(loop.extent) for loop in grids] == [blocks, 1, 2]
    for count in ROWS if rows is None else (rows,):
        check_same(func, changed, arguments(func, count), seeds=(None, 1))


@pytest.mark.parametrize(
    ("devices", "group", "blocks", "rows"), [(1, 2, None, None), (3, None, 2, 23), (2, 2, None, None), (3, 3, 5, 23)]
)
def test_loops_wait_for_each_part_where_it_begins(devices: int, group: Any, blocks: int | None, rows: int | None):
    func = sum_of_parts(devices, steps=3, rows=rows)
    how = {"group": group, "blocks": blocks, "carrier": "queue", "chunk": 8, "chunks": 3}
    changed, schedule = overlap(func, H200, Schedule([Move("all_gather", ("X", "gathered"), **how)]))
    assert schedule.moves[0].overlapped and schedule.moves[0].group == group, schedule
    for count in ROWS if rows is None else (rows,):
        args = arguments(func, count, devices)
        check_same(func, changed, args, seeds=(None, 1))
        report = tilescale.emulate(changed, args, machine=H200)
        assert {each.messages for each in report.activity} == {(devices - 1) * -(-count // 8)}
    text = changed.script()
    assert ("if k % 3 == 0" in text) == (devices > 1)
    assert devices == 1 or text.index("for chunk in") < text.index("for step in"), "a chunk goes to all units first"


def test_loops_over_parts_make_no_counted_tiles():
    """A producer stores each tile of a part in two pieces: a chunk has twice as many stores as tiles."""
    rows = T.dynamic("rows")
    shape = (DEVICES, rows, 2 * WIDE)

    @T.prim_func
    def f(X: T.Tensor(shape, "float32"), Y: T.Tensor(shape, "float32")):
        with T.Kernel(device=DEVICES, block=(1, T.ceildiv(rows, TILE)), threads=32) as (_, tile):
            sent, got = (T.alloc(shape, "float32", level="l2") for _ in range(2))
            x, y = T.alloc((TILE, WIDE), "float32", level="l1"), T.alloc((TILE, 2 * WIDE), "float32", level="l1")
            with T.Scale("block"):
                for k in T.serial(2 * DEVICES):
                    T.copy(X[k // 2, tile * TILE, k % 2 * WIDE], x)
                    T.copy(x, sent[k // 2, tile * TILE, k % 2 * WIDE])
            with T.Scale("device"):
                T.all_to_all(sent, got, dim=0)
            with T.Scale("block"):
                for part in T.serial(DEVICES):
                    T.copy(got[part, tile * TILE, 0], y)
                    T.copy(y, Y[part, tile * TILE, 0])

    changed, schedule = overlapped(f, chunk=TILE)
    assert schedule.moves[0].overlapped and "counted" not in str(schedule), schedule
    check_same(f, changed, arguments(f, 10), seeds=(None, 1))


def test_local_columns_are_copied():
    changed, schedule = overlapped(PROGRAMS["gather of columns"], chunk=TILE, local="source")
    assert schedule.moves[0].overlapped and "local rows are copied" in str(schedule)
    check_same(PROGRAMS["gather of columns"], changed, of_program("gather of columns", 10), seeds=(None, 1))


def test_tiles_of_one_part_have_no_groups_without_the_source():
    moves = Schedule([Move("all_gather", ("X", "gathered"), carrier="queue", group=2)])
    _, schedule = overlap(columns_of(DEVICES, 3), H200, moves)
    assert "sequential: tiles are rasterized that read local rows from the source" in str(schedule)


def test_a_gather_in_groups_adds_nothing_up():
    moves = Schedule([Move("all_gather", ("X", "gathered"), carrier="queue", group=2, adds="grid")])
    with pytest.raises(UsageError, match="adds='grid' is for reductions"):
        overlap(PROGRAMS["gather, parts in a loop"], H200, moves)


def test_a_grid_of_another_form_has_no_groups():
    moves = Schedule([Move("all_gather", ("X", "gathered"), local="source", group=2)])
    _, schedule = overlap(PROGRAMS["gather"], H200, moves)
    assert "local rows are copied: the axes of the grid are not columns, tiles, parts" in str(schedule)


@pytest.mark.parametrize("fields", [{"local": "copy"}, {"group": 8}, {"local": "source", "blocks": 0}])
def test_other_values_of_fields_are_refused(fields: dict[str, Any]):
    with pytest.raises(UsageError, match="'source'"):
        Move("all_gather", ("X", "Y"), **fields)
