# SPDX-License-Identifier: MIT
"""Branches by a device's rank in and around pipelined loops: a grid for each way, and the host launches one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilescale.language as T
from tests.cuda.fakes import Device
from tests.cuda.support import lowered
from tests.emulator.chain import chain
from tilescale.backends.cuda.lowering.by_rank import NOTE

SIZE, TILE = 128, 64


def product(condition: Callable[[Any, Any], Any], *, around: bool = False, otherwise: bool = True) -> Any:
    """Tiles of A @ B, or of G @ B where the condition does not hold; the branch is in the loop or around it."""

    @T.macro
    def multiply(X, B, bx, a, b, c):
        for k in T.Pipelined(SIZE // TILE, num_stages=2):
            T.copy(X[bx * TILE, k * TILE], a)
            T.copy(B[k * TILE, 0], b)
            T.gemm(a, b, c)

    @T.prim_func
    def products(
        A: T.Tensor((SIZE, SIZE), "float16"),
        G: T.Tensor((SIZE, SIZE), "float16"),
        B: T.Tensor((SIZE, TILE), "float16"),
        C: T.Tensor((SIZE, TILE), "float16"),
    ):
        with T.Kernel(device=2, block=SIZE // TILE, threads=128) as bx:
            with T.Scale("block"), T.Scale("device") as (rank, _):
                a = T.alloc((TILE, TILE), "float16", level="l1")
                b = T.alloc((TILE, TILE), "float16", level="l1")
                c = T.alloc((TILE, TILE), "float32", level="l0")
                T.clear(c)
                if around:
                    if condition(rank, bx):
                        multiply(A, B, bx, a, b, c)
                    elif otherwise:
                        multiply(G, B, bx, a, b, c)
                else:
                    for k in T.Pipelined(SIZE // TILE, num_stages=2):
                        if condition(rank, bx):
                            T.copy(A[bx * TILE, k * TILE], a)
                        elif otherwise:
                            T.copy(G[bx * TILE, k * TILE], a)
                        T.copy(B[k * TILE, 0], b)
                        T.gemm(a, b, c)
                T.copy(c, C[bx * TILE, 0])

    return products


def tensors_of(func: Any) -> list[set[str]]:
    """What each grid of a program loads, of A and G."""
    made = lowered(func, devices=2).lowered.grids
    return [{str(p.name)[0] for p in grid.kernel.func.params} & {"A", "G"} for grid in made]


@pytest.mark.parametrize("around", [False, True], ids=["in the loop", "around it"])
@pytest.mark.parametrize("otherwise", [True, False])
def test_each_way_is_a_grid_that_loads_ahead(around: bool, otherwise: bool):
    func = product(lambda rank, bx: rank == 0, around=around, otherwise=otherwise)
    assert tensors_of(func) == [{"A"}, {"G"} if otherwise else set()]
    made = lowered(func, devices=2)
    assert NOTE in made.notes
    loops = 1 if around and not otherwise else 2
    assert made.source({}).count("warpgroup_reg_dealloc") == loops, "a producer in each"


@pytest.mark.parametrize(
    "condition",
    [lambda rank, bx: bx == 0, lambda rank, bx: bx == rank],
    ids=["of a program", "of both"],
)
def test_what_programs_decide_stays_in_the_grid(condition: Callable[[Any, Any], Any]):
    func = product(condition)
    assert tensors_of(func) == [{"A", "G"}] and NOTE not in lowered(func, devices=2).notes


def test_two_conditions_are_four_ways():
    @T.prim_func
    def f(A: T.Tensor((SIZE, SIZE), "float16"), C: T.Tensor((SIZE, SIZE), "float16")):
        with T.Kernel(device=4, threads=128):
            with T.Scale("block"), T.Scale("device") as (rank, size):
                a = T.alloc((SIZE, TILE), "float16", level="l1")
                for k in T.Pipelined(SIZE // TILE, num_stages=2):
                    if rank > 0:
                        T.copy(A[0, k * TILE], a)
                    if rank < size - 1:
                        T.copy(a, C[0, k * TILE])
                    if rank == 2:
                        T.copy(a, A[0, k * TILE])

    assert len(lowered(f, devices=4).lowered.grids) == 4


@pytest.mark.parametrize("first", [True, False])
def test_the_host_launches_the_way_of_its_rank(first: bool, monkeypatch: pytest.MonkeyPatch):
    device = Device(monkeypatch)
    own = device.program(product((lambda rank, bx: rank == 0) if first else (lambda rank, bx: rank > 0)))
    own([torch.zeros(SIZE, width, dtype=torch.float16) for width in (SIZE, SIZE, TILE, TILE)])
    assert [name for name in device.names() if "products" in str(name)] == ["products_0" if first else "products_1"]


def test_a_chain_waits_in_its_producers():
    made = lowered(chain(3, 2, 64, 128), devices=3).lowered
    first, others = (grid.kernel for grid in made.grids)
    assert (made.rendezvous.entry, made.rendezvous.exit) == (True, False), "as if it were one grid"
    assert "T.Pipelined: a producer loads and makes 1 T.wait" in others.notes
    loaded = [{str(p.name) for p in kernel.func.params} & {"X_handle", "inbox_handle"} for kernel in (first, others)]
    assert loaded == [{"X_handle"}, {"inbox_handle"}]
