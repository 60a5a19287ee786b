# SPDX-License-Identifier: MIT
"""Remarks of a report: tiles that reach beyond a tensor, outputs written in part, replicas that diverge."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import blank, values


def line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as file:
        return next(number for number, line in enumerate(file, 1) if f"# {text}" in line)


def places(found) -> dict[str, int]:
    return {name: where.line for name, where in found}


def test_a_copy_partly_out_of_bounds_is_remarked_with_its_line():
    @T.prim_func
    def program(X: T.Tensor((64, 64), "float32"), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((64, 64), "float32")
            T.copy(X[32, 0], tile)  # reads beyond X
            T.copy(tile, Y)

    x, y = values(1, 64, 64), blank(64, 64)
    report = tilescale.emulate(program, [x, y])
    assert torch.equal(y, torch.cat([x[32:], torch.zeros(32, 64)]))
    assert places(report.clipped) == {"X": line_of("reads beyond X")} and not report.missed
    place = f"test_remarks.py:{line_of('reads beyond X')}"
    assert f"clipped: part of the access is out of bounds of X x1  {place}" in str(report)


@pytest.mark.parametrize("devices", [2, 3])
def test_a_put_partly_out_of_bounds_is_remarked(devices):
    @T.prim_func
    def program(Y: T.Tensor((48,), "float32")):
        with T.Kernel(device=devices, block=1, threads=32):
            tile = T.alloc((32,), "float32")
            T.fill(tile, 1.0)
            with T.Scale("block"), T.Scale("device") as (rank, size):
                T.copy(tile, Y[32], dst=(rank + 1) % size)  # puts beyond Y

    report = tilescale.emulate(program, [[torch.zeros(48)] for _ in range(devices)])
    assert dict(report.clipped).popitem()[1] == devices
    assert places(report.clipped) == {"Y": line_of("puts beyond Y")}


def test_a_page_of_minus_one_is_remarked_in_copies_and_elements():
    @T.prim_func
    def program(
        pages: T.Tensor((4,), "int32"), cache: T.Tensor((4, 32), "float32"), Y: T.Tensor((4, 32), "float32"),
        Z: T.Tensor((4,), "float32"),
    ):  # fmt: skip
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((32,), "float32")
            for i in T.serial(4):
                T.copy(cache[pages[i], 0:32], tile)  # copies a page
                T.copy(tile, Y[i, 0:32])
            for i in T.Parallel(4):
                Z[i] = cache[pages[i], 0]  # loads of a page

    def lines(pages: list[int]) -> list[int]:
        args = [torch.tensor(pages, dtype=torch.int32), values(1, 4, 32), blank(4, 32), blank(4)]
        return [where.line for _, where in tilescale.emulate(program, args).negative]

    assert lines([3, 1, 0, 2]) == []
    assert lines([3, -1, 0, -1]) == [line_of("copies a page"), line_of("loads of a page")]


def partly(rows: int, devices: int, writes: bool = True):
    @T.prim_func
    def program(X: T.Tensor((64, 32), "float32"), Y: T.Tensor((64, 32), "float32")):
        with T.Kernel(device=devices, block=1, threads=64):
            with T.Scale("block"):
                tile = T.alloc((rows, 32), "float32")
                T.copy(X[0:rows, 0:32], tile)
                if writes:
                    T.copy(tile, Y[0:rows, 0:32])  # writes some rows

    return program


@pytest.mark.parametrize("devices", [1, 3])
def test_an_output_that_is_written_in_part_is_remarked(devices):
    def unwritten(rows: int, check: str = "all"):
        args = [[values(r, 64, 32), blank(64, 32)] for r in range(devices)]
        return tilescale.emulate(partly(rows, devices), args, check=check)

    assert not unwritten(64).unwritten and not unwritten(48, "none").unwritten
    report = unwritten(48)
    assert places(report.unwritten) == {"Y[48:64, 0:32] of device 0": line_of("writes some rows")}
    assert "unwritten: the program does not write Y[48:64, 0:32] of device 0" in str(report)
    assert unwritten(48, "outputs").unwritten == report.unwritten


def test_an_output_that_one_device_alone_writes_is_whole():
    @T.prim_func
    def program(Y: T.Tensor((32,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((32,), "float32")
                T.fill(tile, 1.0)
                if rank == 0:
                    T.copy(tile, Y)

    assert not tilescale.emulate(program, [[blank(32)] for _ in range(2)]).unwritten


def test_an_output_that_nobody_writes_is_remarked():
    @T.prim_func
    def program(n: T.int32, Y: T.Tensor((32,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"):
                if n > 3:
                    for i in T.Parallel(32):
                        Y[i] = 1.0

    def found(n: int):
        return tilescale.emulate(program, [[n, blank(32)] for _ in range(2)]).unwritten

    assert not found(4)
    assert found(3) == [("Y", None)]


def test_a_tensor_that_is_read_too_may_be_written_in_part():
    @T.prim_func
    def program(X: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                X[i] = X[i] * 2.0

    assert not tilescale.emulate(program, [values(1, 64)]).unwritten


def updated(reduces: bool, devices: int):
    """Weights that all devices have, updated by gradients that each has of its own."""

    @T.prim_func
    def program(W: T.Tensor((64,), "float32"), G: T.Tensor((64,), "float32")):
        with T.Kernel(device=devices, block=1, threads=64):
            with T.Scale("block"):
                w, g = T.alloc((64,), "float32", level="l0"), T.alloc((64,), "float32", level="l0")
                T.copy(W, w)
                T.copy(G, g)
                if reduces:
                    with T.Scale("device"):
                        T.allreduce(g)
                for i in T.Parallel(64):
                    w[i] = w[i] - 0.5 * g[i]
                T.copy(w, W)  # writes the weights

    return program


@pytest.mark.parametrize("devices", [2, 4])
def test_replicas_that_a_call_makes_different_are_remarked(devices):
    def diverged(reduces: bool, same: bool = True):
        args = [[values(0 if same else r, 64), values(r + 9, 64)] for r in range(devices)]
        return tilescale.emulate(updated(reduces, devices), args)

    assert not diverged(True).diverged
    assert not diverged(False, same=False).diverged  # each has its own
    report = diverged(False)
    assert places(report.diverged) == {"W[0:64] of device 1": line_of("writes the weights")}
    assert "diverged: all units were given the same" in str(report)
