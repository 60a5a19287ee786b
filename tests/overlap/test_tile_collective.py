# SPDX-License-Identifier: MIT
"""A grid and the all-reduce of its result: each program all-reduces its tile before it stores it."""

from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.halves import half_at_night
from tests.overlap.support import H200, check_same, overlapped
from tests.overlap.test_symbolic import arguments, reduction
from tilelang_core import ir
from tilelang_core import rewrite as tir
from tilescale.errors import UsageError
from tilescale.hda.current import use_machine
from tilescale.ops.gemm_ar import sequential
from tilescale.ops.gemm_tiles import GemmSpec, GemmTiling
from tilescale.passes.overlap.schedule import COLLECTIVE, Move, Schedule
from tilescale.program.ops import ALLREDUCE

HIGH, WIDE = 4, 8

ROWS = (1, 10, 23)
"""Less than a tile, and several with a rest."""


def doubled(
    devices: int,
    rows: Any,
    *,
    columns: int = 3,
    op: str = "sum",
    bound: bool = True,
    turns: int = 1,
    left: int = 0,
    copies: int = 1,
    fragment: bool = False,
    again: bool = False,
    grids: int = 1,
) -> Any:
    """Each block doubles a tile of a matrix, then the devices reduce the result.

    Args:
        bound: whether the first row and column of a tile have names.
        turns: tiles that a block makes.
        left: rows of tiles that no block makes.
        copies: blocks that make the same tile.
        fragment: whether tiles are stored from registers.
        again: whether a tile is read after its store.
        grids: how many grids the launch has.
    """
    shape = rows, columns * WIDE
    grid = (columns, T.ceildiv(rows, HIGH * turns) - left, copies)[: 3 if copies > 1 else 2]

    @T.prim_func
    def f(X: T.Tensor(shape, "float32"), Y: T.Tensor(shape, "float32"), Z: T.Tensor(shape, "float32")):
        with T.Kernel(device=devices, block=grid, threads=32) as (column, row, *others):
            for number in [*range(grids)]:
                with T.Scale("device"), T.Scale("block"):
                    x = T.alloc((HIGH, WIDE), "float32", level="l0" if fragment else "l1")
                    for turn in T.serial(turns) if turns > 1 else [0]:
                        if bound:
                            m, n = (row * turns + turn) * HIGH, column * WIDE
                            T.copy(X[m, n], x)
                            for i, j in T.Parallel(HIGH, WIDE):
                                x[i, j] = x[i, j] + x[i, j]
                            T.copy(x, Y[m, n])
                        else:
                            T.copy(X[(row * turns + turn) * HIGH, column * WIDE], x)
                            for i, j in T.Parallel(HIGH, WIDE):
                                x[i, j] = x[i, j] + x[i, j]
                            T.copy(x, Y[(row * turns + turn) * HIGH, column * WIDE])
                        if again:
                            T.copy(x, Z[row * HIGH, column * WIDE])
                with T.Scale("device"):
                    T.allreduce(Y if number == 0 else Z, op=op)

    return f


def given(func: Any, devices: int, rows: int) -> list[list[torch.Tensor]]:
    return [[x, y, y.clone()] for x, y, _ in arguments(func, rows)[:devices]]


@pytest.mark.parametrize(
    ("devices", "op", "group", "blocks", "bound", "symbolic"),
    half_at_night(
        [(2, "sum", None, None), (3, "max", 2, None), (2, "sum", None, 5), (4, "sum", 2, 4), (1, "sum", 3, 100)],
        [False, True],
        [False, True],
    ),
)
def test_results_are_the_same(
    devices: int, op: str, group: int | None, blocks: int | None, bound: bool, symbolic: bool
):
    for count in ROWS[-1:] if not symbolic else ROWS:
        func = doubled(devices, T.dynamic("rows") if symbolic else count, op=op, bound=bound)
        changed, schedule = overlapped(func, carrier=COLLECTIVE, group=group, blocks=blocks)
        assert "programs all-reduce their tiles" in str(schedule)
        calls = [stmt.value for stmt in ir.statements(changed.body) if isinstance(stmt, ir.Evaluate)]
        reduced = [ir.region_parts(call.args[0])[0].name for call in calls if call.op.same_as(ALLREDUCE)]
        assert reduced == ["x"]
        check_same(func, changed, given(func, devices, count), seeds=(None, 1))


@pytest.mark.parametrize(
    ("func", "how", "reason"),
    [
        (reduction("reduce_scatter"), {}, "it is a reduce_scatter"),
        (doubled(2, 16, turns=2), {}, "stored in a loop"),
        (doubled(2, 16, left=1), {}, "are not those of the result"),
        (doubled(2, 16, copies=2), {}, "several programs store the same tile"),
        (doubled(2, 16, fragment=True), {}, "not one of float32 in shared memory"),
        (doubled(2, 16, again=True), {}, "is used again"),
        (doubled(2, 16, grids=2), {"group": 2}, "the launch has several grids"),
        (doubled(2, 16, grids=2), {"blocks": 2}, "the launch has several grids"),
        (doubled(2, 16, columns=T.dynamic("columns")), {"group": 2}, "are not columns, tiles"),
    ],
)
def test_other_grids_stay_in_order(func: Any, how: dict[str, int], reason: str):
    _, schedule = overlapped(func, carrier=COLLECTIVE, **how)
    assert not schedule.moves[0].overlapped and reason in schedule.moves[0].why


@pytest.mark.parametrize("columns", [1, 2])
def test_tiles_have_all_columns_of_the_result_or_an_axis_of_the_grid(columns: int):
    @T.prim_func
    def f(X: T.Tensor((16, columns * WIDE), "float32"), Y: T.Tensor((16, columns * WIDE), "float32")):
        with T.Kernel(device=2, block=16 // HIGH, threads=32) as row:
            with T.Scale("device"), T.Scale("block"):
                x = T.alloc((HIGH, WIDE), "float32", level="l1")
                T.copy(X[row * HIGH, 0], x)
                T.copy(x, Y[row * HIGH, 0])
            with T.Scale("device"):
                T.allreduce(Y)

    (move,) = overlapped(f, carrier=COLLECTIVE)[1].moves
    assert move.overlapped == (columns == 1)
    assert move.overlapped or move.why.startswith("the tiles of the grid are not those of the result")


def test_a_tile_of_another_type_is_rounded_after_the_sum():
    @T.prim_func
    def f(X: T.Tensor((8, 8), "float32"), Y: T.Tensor((8, 8), "bfloat16")):
        with T.Kernel(device=2, block=2, threads=32) as row:
            with T.Scale("device"), T.Scale("block"):
                x = T.alloc((4, 8), "float32", level="l1")
                T.copy(X[row * 4, 0], x)
                T.copy(x, Y[row * 4, 0])
            with T.Scale("device"):
                T.allreduce(Y)

    (move,) = overlapped(f, carrier=COLLECTIVE)[1].moves
    assert "not one of bfloat16" in move.why


def test_a_persistent_gemm_takes_about_the_estimated_time():
    """On two devices the sums of all tiles but the last ones are hidden."""
    with use_machine(H200):
        func = sequential(2, GemmSpec(2048, 2048, "bfloat16", GemmTiling(128, 128, 1.0), True, False))
    (rows,) = {var for _, buffer in ir.parameters(func) for n in buffer.shape for var in ir.variables(n)}
    changed, schedule = overlapped(tir.with_values(func, {rows: 1024}), carrier=COLLECTIVE, group=8, blocks=132)
    (move,) = schedule.moves
    simulated = tilescale.emulate(changed, data=False, machine=H200).time_us
    assert move.overlapped_s is not None and move.in_order_s is not None and move.overlapped_s < move.in_order_s
    assert move.overlapped_s * 1e6 == pytest.approx(simulated, rel=0.15)


@pytest.mark.parametrize("fields", [{"carrier": "block"}, {"group": 8}, {"carrier": "tiles", "blocks": 2}])
def test_other_values_of_fields_are_refused(fields: dict[str, Any]):
    with pytest.raises(UsageError, match="collective"):
        Move("allreduce", ("X", "Y"), **fields)


def test_users_pass_it_as_a_schedule():
    moves = Schedule([Move("allreduce", ("Y", "Y"), carrier=COLLECTIVE, blocks=2)])
    kernel = tilescale.compile(doubled(2, T.dynamic("rows")), machine=H200, schedule=moves)
    assert kernel.moves.moves[0].overlapped and kernel.moves.moves[0].blocks == 2
