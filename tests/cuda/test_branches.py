# SPDX-License-Identifier: MIT
"""Grids whose programs branch by their numbers: a grid for each branch, and how these are launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.support import lowered
from tilelang_core import ir
from tilescale.backends.cuda.running import concurrent_grids
from tilescale.backends.cuda.running.steps import KernelLaunch, run
from tilescale.backends.tilelang.lowering.program import ConcurrentGrids
from tilescale.backends.tilelang.lowering.split_grid import NOTE

ROWS, SIZE, TILE = 4, 256, 64


Condition = Callable[[Any, Any, Any], Any]


def first_row(bx: Any, by: Any, rank: Any) -> Any:
    return by == 0


def product(
    condition: Condition = first_row, *, ranked: bool = False, signals: bool = False, loads: bool = True
) -> Any:
    """Programs of the first rows of a grid multiply A, the others another tensor; they wait for a flag of their own."""

    @T.macro
    def tile(X, B, C, bx, by, a, b, c):
        T.clear(c)
        for k in T.Pipelined(SIZE // TILE, num_stages=2) if loads else T.serial(SIZE // TILE):
            T.copy(X[bx * TILE, k * TILE], a)
            T.copy(B[k * TILE, 0], b)
            T.gemm(a, b, c)
        T.copy(c, C[by, bx * TILE, 0])

    @T.prim_func
    def products(
        A: T.Tensor((SIZE, SIZE), "float16"),
        G: T.Tensor((SIZE, SIZE), "float16"),
        B: T.Tensor((SIZE, TILE), "float16"),
        C: T.Tensor((ROWS, SIZE, TILE), "float16"),
    ):
        with T.Kernel(device=2, block=(SIZE // TILE, ROWS), threads=128) as (bx, by):
            told, heard = T.alloc_flags((1,)), T.alloc_flags((1,))
            with T.Scale("block") as (number, _), T.Scale("device") as (rank, _):
                a = T.alloc((TILE, TILE), "float16", level="l1")
                b = T.alloc((TILE, TILE), "float16", level="l1")
                c = T.alloc((TILE, TILE), "float32", level="l0")
                if condition(bx, by, rank):
                    tile(A, B, C, bx, number // (SIZE // TILE) if ranked else by, a, b, c)
                    if signals:
                        T.signal(told[0])
                else:
                    if signals:
                        T.wait(heard[0], ">=", 0)
                    tile(G, B, C, bx, by, a, b, c)

    return products


def grids(func: Any) -> list[tuple[int, ...]]:
    """The extents of a program's grids."""
    return [tuple(map(ir.integer, grid.launch.grid)) for grid in lowered(func, devices=2).lowered.grids]


@pytest.mark.parametrize(
    ("condition", "rows", "swapped"),
    [
        (lambda bx, by, rank: by == 0, (1, 3), False),
        (lambda bx, by, rank: by != 0, (1, 3), True),
        (lambda bx, by, rank: by < 3, (3, 1), False),
        (lambda bx, by, rank: 2 <= by, (2, 2), True),
    ],
)
def test_the_first_programs_are_a_grid_and_so_are_the_others(
    condition: Condition, rows: tuple[int, int], swapped: bool
):
    made = lowered(product(condition), devices=2)
    assert grids(product(condition)) == [(SIZE // TILE, n) for n in rows] and NOTE in made.notes
    loaded = [{str(p.name) for p in grid.kernel.func.params} & {"A_handle", "G_handle"} for grid in made.lowered.grids]
    assert loaded == ([{"G_handle"}, {"A_handle"}] if swapped else [{"A_handle"}, {"G_handle"}])


@pytest.mark.parametrize(
    "how",
    [
        {"condition": lambda bx, by, rank: by % 2 == 0},
        {"condition": lambda bx, by, rank: bx + by < 3},
        {"condition": lambda bx, by, rank: by == rank},
        {"condition": lambda bx, by, rank: by < 4},
        {"ranked": True},
        {"signals": True},
        {"loads": False},
    ],
    ids=["every other one", "two axes", "the device", "all of them", "uses its rank", "waits and signals", "no loads"],
)
def test_others_stay_one_grid(how: dict[str, Any]):
    assert grids(product(**how)) == [(SIZE // TILE, ROWS)]


def test_programs_have_their_own_numbers():
    """Both branches store by the row of the program, the second grid's rows after the first grid's."""
    func = product(lambda bx, by, rank: by < 3)
    first, second = (grid.kernel.func.script() for grid in lowered(func, devices=2).lowered.grids)
    assert "C_1[by, bx * 64" in first and "C_1[by + 3, bx * 64" in second


def test_emulated_it_is_one_grid():
    a, g = torch.randn(2, SIZE, SIZE).half()
    b, c = torch.randn(SIZE, TILE).half(), torch.zeros(2, ROWS, SIZE, TILE, dtype=torch.float16)
    tilescale.emulate(product(lambda bx, by, rank: by < 3), [[a, g, b, own] for own in c])
    for row in range(ROWS):
        want = (a if row < 3 else g).float() @ b.float()
        torch.testing.assert_close(c[0, row].float(), want, rtol=1e-2, atol=1e-1)


# -- launches ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Actions of streams: kernels by their stream, the fork and the join."""
    log, current = list[str](), ["main"]

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        current.append("side" if stream is side else "main")
        yield
        current.pop()

    side = SimpleNamespace(wait_stream=lambda other: log.append("fork"))
    main = SimpleNamespace(wait_stream=lambda other: log.append("join"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(concurrent_grids, "side_stream", lambda device: side)
    monkeypatch.setattr(
        concurrent_grids,
        "grid_step",
        lambda own, name: lambda call: [KernelLaunch(lambda: log.append(f"{name} on {current[-1]}"), [])],
    )
    return log


@pytest.mark.parametrize(
    ("spared", "done"),
    [(0, ["fork", "a on main", "b on side", "join"]), (4, ["a on main", "b on main"])],
    ids=["at once", "the queue needs processors"],
)
def test_grids_of_one_are_launched_at_once(streams: list[str], spared: int, done: list[str]):
    own: Any = SimpleNamespace(spared=spared, device=None)
    run(concurrent_grids.concurrent_grids_step(own, ConcurrentGrids(None, ("a", "b")))(None))
    assert streams == done
