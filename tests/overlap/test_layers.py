# SPDX-License-Identifier: MIT
"""Whole layers, a gather before their grids and a reduction after them, on devices that hold few blocks at once.

A waiting tile's block stays resident. If fewer blocks than tiles are resident, an order in which a tile waits for one
without a resident block would be a deadlock.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tilescale
import tilescale.language as T
from tests.overlap.support import REDUCTIONS, copies
from tilescale.hda import Machine
from tilescale.passes.overlap.rewrite import overlap
from tilescale.passes.overlap.schedule import Schedule
from tilescale.passes.structure import structure

WIDE, HIDDEN = 8, 12
"""Columns of a layer's input and output, and between its grids."""


@cache
def with_places(count: int) -> Machine:
    """H200s with a number of SMs each, which hold one block of the most threads."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "small.yaml"
        path.write_text(f"extends: h200-sxm-8\ntitle: small\nlevels: {{block: {{count: {count}}}}}\n", encoding="utf-8")
        return Machine.load(path)


def layer(devices: int, rows: int, tile: int, end: str, threads: int = 1024) -> Any:
    """Rows are gathered; a grid computes hidden columns of them, a second grid columns of the result.

    Args:
        rows: of each device.
        end: collective of the results of all devices: "reduce_scatter", "allreduce" or "nothing".
    """
    total = devices * rows
    mine = rows if end == "reduce_scatter" else total

    @T.prim_func
    def f(X: T.Tensor((rows, WIDE), "float32"), Y: T.Tensor((mine, WIDE), "float32")):
        with T.Kernel(device=devices, block=(2, -(-total // tile)), threads=threads) as (bx, by):
            gathered = T.alloc((total, WIDE), "float32", level="l2")
            hidden = T.alloc((total, HIDDEN), "float32", level="l2")
            made = T.alloc((total, WIDE), "float32", level="l2")
            with T.Scale("device"):
                T.all_gather(X, gathered)
            with T.Scale("block"):
                x = T.alloc((tile, WIDE), "float32", level="l1")
                h = T.alloc((tile, HIDDEN // 2), "float32", level="l1")
                T.copy(gathered[by * tile, 0], x)
                for i, j in T.Parallel(tile, HIDDEN // 2):
                    h[i, j] = x[i, j % WIDE] * (bx + j + 1)
                T.copy(h, hidden[by * tile, bx * (HIDDEN // 2)])
            with T.Scale("device"), T.Scale("block"):
                y = T.alloc((tile, HIDDEN), "float32", level="l1")
                z = T.alloc((tile, WIDE // 2), "float32", level="l1")
                T.copy(hidden[by * tile, 0], y)
                for i, j in T.Parallel(tile, WIDE // 2):
                    z[i, j] = (y[i, j] - y[i, j + HIDDEN // 2] * bx) * (T.rank("device") + 1)
                if end == "reduce_scatter":
                    T.copy(z, made[by * tile, bx * (WIDE // 2)])
                else:
                    T.copy(z, Y[by * tile, bx * (WIDE // 2)])
            with T.Scale("device"):
                if end == "reduce_scatter":
                    T.reduce_scatter(made, Y)
                elif end == "allreduce":
                    T.allreduce(Y)

    return f


@settings(max_examples=3, deadline=None, derandomize=True, phases=[Phase.generate])
@given(
    devices=st.integers(2, 3),
    rows=st.integers(3, 8),
    tile=st.sampled_from((2, 3, 4)),
    end=st.sampled_from(("reduce_scatter", "allreduce", "nothing")),
    places=st.integers(1, 3),
    asked=st.fixed_dictionaries(
        {
            "chunk": st.none() | st.integers(1, 8),
            "adds": st.sampled_from((None, "grid")),
            "ordered": st.booleans(),
        }
    ),
    seed=st.integers(0, 99),
)
def test_results_are_the_same_where_few_tiles_have_a_place(
    devices: int, rows: int, tile: int, end: str, places: int, asked: dict[str, Any], seed: int
):
    machine = with_places(places)
    with tilescale.use_machine(machine):
        func = layer(devices, rows, tile, end)
    _, first = overlap(func, machine)
    adds = asked.pop("adds")
    wanted = Schedule(
        [
            replace(m, overlapped=True, carrier=None, adds=adds if m.collective in REDUCTIONS else None, **asked)
            for m in first.moves
        ]
    )
    changed, schedule = overlap(func, machine, wanted)
    assert all(move.overlapped for move in schedule.moves), schedule
    rng = torch.Generator().manual_seed(0)
    args = [[torch.randn(shape, generator=rng) for shape in _shapes(devices, rows, end)] for _ in range(devices)]
    want, got = copies(args), copies(args)
    tilescale.emulate(func, want, machine=machine, time=False)
    tilescale.emulate(changed, got, machine=machine, time=False, schedule_seed=seed)
    for (_, expected), (_, y) in zip(want, got, strict=True):
        assert torch.equal(y, expected)


def test_tiles_that_add_up_start_in_order_whatever_else_is_shuffled():
    """Four tiles and two places: begun in another order, own tiles would hold them until tiles without a place send."""
    machine = with_places(1)
    with tilescale.use_machine(machine):
        func = layer(2, 3, 3, "reduce_scatter")
    _, first = overlap(func, machine)
    changed, _ = overlap(func, machine, Schedule([replace(move, overlapped=True) for move in first.moves]))
    assert [launch.in_order for launch in structure(changed, machine).launches] == [True]
    args = [[torch.ones(shape) for shape in _shapes(2, 3, "reduce_scatter")] for _ in range(2)]
    for seed in range(16):
        tilescale.emulate(changed, copies(args), machine=machine, time=False, schedule_seed=seed)


def _shapes(devices: int, rows: int, end: str) -> list[tuple[int, int]]:
    return [(rows, WIDE), (rows if end == "reduce_scatter" else devices * rows, WIDE)]
