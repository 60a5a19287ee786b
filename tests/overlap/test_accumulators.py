# SPDX-License-Identifier: MIT
"""A grid and the reduce-scatter of its result: programs add what has arrived to their accumulators."""

from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.halves import half_at_night
from tests.overlap.support import H200, check_leaves
from tilescale.errors import TileScaleError, UsageError
from tilescale.passes.overlap.rewrite import overlap
from tilescale.passes.overlap.schedule import ACCUMULATORS, QUEUE, Move, Schedule
from tilescale.passes.scratch import as_parameters

HIGH, WIDE, CHUNK = 4, 8, 8

ROWS = (1, 10, 23)
"""Less than a tile, and several with a rest."""

COMBINED = {"sum": torch.add, "max": torch.maximum}


def rounded(
    devices: int, rows: Any, *, columns: int = 20, op: str = "sum", again: str = "", direct: bool = False
) -> Any:
    """Each block doubles a tile for the device of its third index, in float32, and stores it in bfloat16.

    Args:
        columns: not always a multiple of those of a tile.
        again: which tile is read after the store.
        direct: whether tiles are rounded by their store.
    """
    grid = (-(-columns // WIDE), T.ceildiv(rows, HIGH), devices)

    @T.prim_func
    def f(
        X: T.Tensor((devices, rows, columns), "float32"),
        Y: T.Tensor((1, rows, columns), "bfloat16"),
        Z: T.Tensor((devices, rows, columns), "float32"),
    ):
        with T.Kernel(device=devices, block=grid, threads=32) as (column, row, owner):
            parts = T.alloc((devices, rows, columns), "bfloat16", level="l2")
            with T.Scale("device"), T.Scale("block"):
                total = T.alloc((HIGH, WIDE), "float32", level="l0")
                out = T.alloc((HIGH, WIDE), "bfloat16", level="l1")
                m, n = row * HIGH, column * WIDE
                T.copy(X[owner, m, n], total)
                for i, j in T.Parallel(HIGH, WIDE):
                    total[i, j] = total[i, j] + total[i, j]
                if direct:
                    T.copy(total, parts[owner, m, n])
                else:
                    T.copy(total, out)
                    T.copy(out, parts[owner, m, n])
                if again == "total":
                    T.copy(total, Z[owner, m, n])
                if again == "out":
                    T.copy(out, Z[owner, m, n])
            with T.Scale("device"):
                T.reduce_scatter(parts, Y, op=op)

    return f


def overlapped(func: Any, **how: Any) -> tuple[Any, Move]:
    fields = {"chunk": CHUNK, "carrier": QUEUE, "adds": ACCUMULATORS, **how}
    changed, schedule = overlap(func, H200, Schedule([Move("reduce_scatter", ("parts", "Y"), **fields)]))
    return changed, schedule.moves[0]


def given(devices: int, rows: int, columns: int = 20) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    shape = devices, rows, columns
    return [[torch.randn(shape), torch.zeros(1, rows, columns).bfloat16(), torch.zeros(shape)] for _ in range(devices)]


def wanted(args: list[list[torch.Tensor]], op: str) -> list[list[torch.Tensor]]:
    """Local rows unrounded, then those of the ranks before."""
    devices, made = len(args), []
    for rank, (x, _, z) in enumerate(args):
        total = 2 * x[rank]
        for step in range(1, devices):
            total = COMBINED[op](total, (2 * args[(rank - step) % devices][0][rank]).bfloat16().float())
        made.append([x, total.bfloat16()[None], z])
    return made


@pytest.mark.parametrize(
    ("devices", "op", "columns", "how", "symbolic"),
    half_at_night(
        [
            (1, "sum", 16, {"group": 1}),
            (2, "sum", 20, {}),
            (3, "max", 16, {"group": 2}),
            (3, "sum", 20, {"blocks": 5}),
            (4, "sum", 24, {"group": 2, "blocks": 4, "chunks": 3}),
        ],
        [False, True],
    ),
)
def test_local_rows_are_not_rounded_before_the_sum(
    devices: int, op: str, columns: int, how: dict[str, int], symbolic: bool
):
    for rows in ROWS if symbolic else ROWS[-1:]:
        func = rounded(devices, T.dynamic("rows") if symbolic else rows, columns=columns, op=op)
        changed, move = overlapped(func, **how)
        assert move.overlapped and move.adds == ACCUMULATORS, move.why
        args = given(devices, rows, columns)
        check_leaves(changed, args, wanted(args, op), seeds=(None, 1))


@pytest.mark.parametrize(
    ("how", "reason"),
    [({"again": "total"}, "copy of registers"), ({"again": "out"}, "used again"), ({"direct": True}, "is not one of")],
)
def test_other_tiles_are_added_by_a_grid(how: dict[str, Any], reason: str):
    _, move = overlapped(rounded(2, 16, **how))
    assert move.adds == "grid" and reason in move.why


def test_tiles_of_another_type_than_the_wire_are_added_by_a_grid():
    """The tile in shared memory takes what has arrived."""

    @T.prim_func
    def f(X: T.Tensor((2, 4, 8), "float32"), Y: T.Tensor((1, 4, 8), "float32")):
        with T.Kernel(device=2, block=(1, 1, 2), threads=32) as (column, row, owner):
            parts = T.alloc((2, 4, 8), "float32", level="l2")
            with T.Scale("device"), T.Scale("block"):
                total, out = (T.alloc((4, 8), "float32", level=level) for level in ("l0", "l1"))
                T.copy(X[owner, row * 4, column * 8], total)
                T.copy(total, out)
                T.copy(out, parts[owner, row * 4, column * 8])
            with T.Scale("device"):
                T.reduce_scatter(parts, Y)

    _, move = overlapped(f, wire="bfloat16")
    assert move.adds == "grid" and "bfloat16 in shared memory" in move.why


def flags(func: Any) -> list[tuple[Any, ...]]:
    made = tilescale.compile(func, machine=H200, schedule="sequential").program
    (launch,) = made.launches
    return [tuple(map(str, b.shape)) for b in launch.buffers if b.data in launch.flags]


def test_flags_are_as_many_for_any_number_of_rows():
    func = rounded(2, T.dynamic("rows"))
    assert flags(overlapped(func, chunks=3)[0]) == [("2", "3")] * 2
    assert flags(overlapped(rounded(2, 16), chunks=3)[0]) == [("2", "2")] * 2, "rows are known"


def test_more_chunks_than_flags_are_an_error():
    changed, _ = overlapped(rounded(2, T.dynamic("rows")), chunks=2)
    with pytest.raises(TileScaleError, match="parts_"):
        tilescale.emulate(changed, given(2, 2 * CHUNK + 1), machine=H200)


def test_memory_of_a_program_becomes_parameters():
    """But for its flags; the results are the same."""
    changed, _ = overlapped(rounded(2, T.dynamic("rows")))
    func = as_parameters(changed)
    names = [p.name for p in tilescale.compile(func, machine=H200, schedule="sequential").program.parameters]
    assert names == ["X", "Y", "Z", "parts", "parts_inbox"]
    args = given(2, 10)
    scratch = [[torch.full((2, 10, 20), torch.nan).bfloat16() for _ in range(2)] for _ in args]
    tilescale.emulate(func, [[*a, *s] for a, s in zip(args, scratch, strict=True)], machine=H200)
    for (_, y, _), (_, want, _) in zip(args, wanted(args, "sum"), strict=True):
        assert torch.equal(y, want)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"adds": "registers"}, "accumulators"), ({"chunks": 0}, "positive"), ({"blocks": 2}, "queue")],
)
def test_other_values_of_fields_are_refused(fields: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        Move("reduce_scatter", ("X", "Y"), **fields)
