# SPDX-License-Identifier: MIT
"""Gathers in layer loops: started one layer ahead, into the other one of two buffers."""

from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.overlap.support import H200, check_same, overlapped
from tilelang_core import ir

COLUMNS = 32


def layers(devices: int, count: int, rows: int = 8, result: str = "workspace", writes: str = "nothing") -> Any:
    """Gather each layer's weights, and add them to a running sum.

    Args:
        rows: of each device's part.
        result: where they are gathered, a "workspace" or an "argument".
        writes: additional target of a layer: "nothing", the "source" or the "result".
    """
    total = devices * rows

    @T.prim_func
    def f(
        W: T.Tensor((count * rows, COLUMNS), "float32"),
        Y: T.Tensor((total, COLUMNS), "float32"),
        G: T.Tensor((total, COLUMNS), "float32"),
    ):
        with T.Kernel(device=devices, block=-(-total // 16), threads=64) as b:
            whole = G if result == "argument" else T.alloc((total, COLUMNS), "float32", level="l2")
            for layer in T.serial(count):
                with T.Scale("device"):
                    T.all_gather(W[layer * rows : (layer + 1) * rows, 0:COLUMNS], whole)
                with T.Scale("block"):
                    w = T.alloc((16, COLUMNS), "float32")
                    y = T.alloc((16, COLUMNS), "float32", level="l0")
                    T.copy(whole[b * 16, 0], w)
                    T.copy(Y[b * 16, 0], y)
                    for i, j in T.Parallel(16, COLUMNS):
                        y[i, j] = y[i, j] * 0.5 + w[i, j] * (layer + 1)
                    T.copy(y, Y[b * 16, 0])
                    if writes == "source":
                        W[layer * rows, 0] = 1.0
                    if writes == "result":
                        whole[0, 0] = 1.0

    return f


def arguments(func: Any, devices: int) -> list[list[torch.Tensor]]:
    """Weights of its own and zeroed results for each device."""
    weights, *results = (tuple(int(n) for n in buffer.shape) for _, buffer in ir.parameters(func))
    generator = torch.Generator().manual_seed(devices)
    return [[torch.randn(weights, generator=generator), *map(torch.zeros, results)] for _ in range(devices)]


@pytest.mark.parametrize("devices", [2, 3, 8])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_layers_compute_the_same_one_gather_ahead(devices, count):
    func = layers(devices, count)
    changed, schedule = overlapped(func)
    (move,) = schedule.moves
    assert move.overlapped and "one iteration of its loop ahead" in move.why
    check_same(func, changed, arguments(func, devices), seeds=(None, 0, 1, 2))


@pytest.mark.parametrize("rows", [5, 24])
def test_tiles_are_clipped_at_the_end_of_their_buffer(rows):
    func = layers(3, 4, rows)
    changed, _ = overlapped(func)
    check_same(func, changed, arguments(func, 3))


def test_two_gathers_of_a_layer_are_both_ahead():
    @T.prim_func
    def func(
        U: T.Tensor((32, COLUMNS), "float32"), V: T.Tensor((4, 8, COLUMNS), "float32"),
        Y: T.Tensor((16, COLUMNS), "float32"),
    ):  # fmt: skip
        with T.Kernel(device=2, block=1, threads=64):
            first = T.alloc((16, COLUMNS), "float32", level="l2")
            second = T.alloc((2, 8, COLUMNS), "float32", level="l2")
            for layer in T.serial(4):
                with T.Scale("device"):
                    T.all_gather(U[layer * 8 : layer * 8 + 8, 0:COLUMNS], first)
                    T.all_gather(V[layer, 0:8, 0:COLUMNS], second)
                with T.Scale("block"):
                    for i, j in T.Parallel(16, COLUMNS):
                        Y[i, j] = Y[i, j] * 0.5 + first[i, j] * second[i // 8, i % 8, j]

    changed, schedule = overlapped(func)
    assert [move.overlapped for move in schedule.moves] == [True, True]
    generator = torch.Generator().manual_seed(1)
    args = [
        [*(torch.randn(*shape, COLUMNS, generator=generator) for shape in ((32,), (4, 8))), torch.zeros(16, COLUMNS)]
        for _ in range(2)
    ]
    check_same(func, changed, args)


def test_layers_with_another_collective_behind_the_grid():
    @T.prim_func
    def func(W: T.Tensor((32, COLUMNS), "float32"), Y: T.Tensor((16, COLUMNS), "float32")):
        with T.Kernel(device=2, block=1, threads=64):
            whole = T.alloc((16, COLUMNS), "float32", level="l2")
            for layer in T.serial(4):
                with T.Scale("device"):
                    T.all_gather(W[layer * 8 : layer * 8 + 8, 0:COLUMNS], whole)
                with T.Scale("block"):
                    for i, j in T.Parallel(16, COLUMNS):
                        Y[i, j] = Y[i, j] * 0.5 + whole[i, j] * (T.rank("device") + 1)
                with T.Scale("device"):
                    T.allreduce(Y)

    changed, schedule = overlapped(func, kept=("Y",))
    assert [move.overlapped for move in schedule.moves] == [True, False]
    args = [[torch.randn(32, COLUMNS), torch.zeros(16, COLUMNS)] for _ in range(2)]
    check_same(func, changed, args)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"result": "argument"}, "is an argument"),
        ({"writes": "source"}, "what it sends is written while it may be in flight"),
        ({"writes": "result"}, "its result is written, viewed or reached by others"),
        ({"count": 1}, "its loop has one iteration only"),
    ],
)
def test_what_cannot_be_ahead_stays_in_order_and_says_why(options, why):
    func = layers(**{"devices": 2, "count": 3, **options})
    changed, schedule = overlapped(func)
    (move,) = schedule.moves
    assert not move.overlapped and why in move.why
    assert "sequential" in str(move)


def products(devices: int, size: int, count: int) -> Any:
    """Layers of a GEMM, each with gathered weights."""
    rows = size // devices

    @T.prim_func
    def products(W: T.Tensor((count * rows, size), "bfloat16"), X: T.Tensor((2, size, size), "bfloat16")):
        with T.Kernel(device=devices, block=(size // 128, size // 128), threads=256) as (bx, by):
            whole = T.alloc((size, size), "bfloat16", level="l2")
            for layer in T.serial(count):
                with T.Scale("device"):
                    T.all_gather(W[layer * rows : (layer + 1) * rows, 0:size], whole)
                with T.Scale("block"):
                    a, b = T.alloc((128, 64), "bfloat16"), T.alloc((64, 128), "bfloat16")
                    c = T.alloc((128, 128), "float32", level="l0")
                    T.clear(c)
                    for k in T.Pipelined(size // 64, num_stages=3):
                        T.copy(X[layer % 2, by * 128, k * 64], a)
                        T.copy(whole[k * 64, bx * 128], b)
                        T.gemm(a, b, c)
                    T.copy(c, X[(layer + 1) % 2, by * 128, bx * 128])

    return products


def test_large_layers_are_faster_and_the_default_chooses_it():
    func = products(4, 4096, 4)
    kernel = tilescale.compile(func)
    (move,) = kernel.moves.moves
    assert move.overlapped and "ahead" in kernel.schedule
    before, after = (tilescale.emulate(f, machine=H200, data=False).time_us for f in (func, kernel.ir))
    assert after < 0.92 * before
    assert move.overlapped_s * 1e6 == pytest.approx(after, rel=0.25)
