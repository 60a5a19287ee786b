# SPDX-License-Identifier: MIT
"""Limits on the number of threads are reported by every back end, with the line."""

from typing import Any

import pytest
import tilelang.transform
import torch

import tilescale
import tilescale.language as T
from tests.cuda.support import lowered
from tilescale.backends.cuda import support
from tilescale.errors import Location, ShapeError, UnsupportedError


def product(m: int, n: int, threads: int, scale: str = "block", policy: Any = None) -> Any:
    """A GEMM of one block, or of each of its warpgroups."""
    kept = {} if policy is None else {"policy": policy}

    @T.prim_func
    def run(A: T.Tensor((m, 32), "float16"), B: T.Tensor((32, n), "float16"), C: T.Tensor((2, m, n), "float32")):
        with T.Kernel(device=1, block=1, threads=threads):
            with T.Scale("block"):
                a = T.alloc((m, 32), "float16", level="l1")
                b = T.alloc((32, n), "float16", level="l1")
                T.copy(A, a)
                T.copy(B, b)
                with T.Scale(scale):
                    c = T.alloc((m, n), "float32", level="l0")
                    T.clear(c)
                    T.gemm(a, b, c, **kept)  # the GEMM
                    T.copy(c, C[T.rank("warpgroup") if scale == "warpgroup" else 0, 0, 0])

    return run


def tensors(m: int, n: int) -> list[torch.Tensor]:
    return [torch.ones(m, 32, dtype=torch.float16), torch.ones(32, n, dtype=torch.float16), torch.empty(2, m, n)]


@pytest.mark.parametrize(
    ("m", "n", "threads", "scale", "found"),
    [
        (16, 16, 128, "block", "warps cannot share it out, 4 here"),
        (24, 32, 32, "block", "a multiple of 16 rows"),
        (64, 20, 32, "block", "of 8 columns"),
        (64, 64, 48, "block", "48 threads are not a whole number of warps"),
        (16, 16, 256, "warpgroup", "warps cannot share it out, 4 here"),
    ],
)
def test_a_product_that_warps_cannot_share_out(m: int, n: int, threads: int, scale: str, found: str):
    func = product(m, n, threads, scale)
    for run in (lambda: tilescale.emulate(func, tensors(m, n)), lambda: lowered(func)):
        with pytest.raises(ShapeError) as error:
            run()
        assert found in error.value.message
        assert "# the GEMM" in str(error.value)
        assert error.value.hint


def test_the_emulator_of_another_machine_takes_it():
    values = tensors(16, 16)
    tilescale.emulate(product(16, 16, 128), values, machine="mi300x-8")
    assert values[2][0].unique().tolist() == [32]


@pytest.mark.parametrize(
    ("m", "n", "threads", "scale"),
    [(64, 64, 256, "block"), (32, 16, 32, "block"), (16, 32, 128, "block"), (64, 32, 256, "warpgroup")],
)
def test_a_product_that_warps_share_out(m: int, n: int, threads: int, scale: str):
    values = tensors(m, n)
    tilescale.emulate(product(m, n, threads, scale), values)
    assert values[2][0].unique().tolist() == [32]
    assert lowered(product(m, n, threads, scale)).source({})


# -- tiles in registers ------------------------------------------------------------------------------------------------


def passed_through(shape: tuple[int, int], threads: int, scale: str = "block") -> Any:
    """A tile is added to in registers, by a block or by its second warpgroup."""

    @T.prim_func
    def run(X: T.Tensor(shape, "float32"), Y: T.Tensor(shape, "float32")):
        with T.Kernel(device=1, block=1, threads=threads):
            with T.Scale("block"), T.Scale(scale):
                tile = T.alloc(shape, "float32", level="l0")
                T.copy(X, tile)  # the tile
                for i, j in T.Parallel(*shape):
                    tile[i, j] = tile[i, j] + 1
                T.copy(tile, Y)

    return run


def reduced(shape: tuple[int, int], threads: int) -> Any:
    @T.prim_func
    def run(X: T.Tensor(shape, "float32"), Y: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=threads):
            tile = T.alloc_fragment(shape, "float32")
            sums = T.alloc_fragment(shape[:1], "float32")
            T.copy(X, tile)
            T.reduce_sum(tile, sums, dim=1)  # the sums
            for i, j in T.Parallel(*shape):
                Y[i, j] = X[i, j] + 1

    return run


def cleared(shape: tuple[int, int], threads: int) -> Any:
    """A tile in shared memory has a dimension in front of those of the tensors."""

    @T.prim_func
    def run(X: T.Tensor(shape, "float32"), Y: T.Tensor(shape, "float32")):
        with T.Kernel(1, threads=threads):
            tile = T.alloc_shared((2, *shape), "float32")
            T.clear(tile)  # two tiles
            T.copy(X, tile[1, :, :])
            for i, j in T.Parallel(*shape):
                Y[i, j] = tile[0, i, j] + tile[1, i, j] + 1

    return run


def runs(func: Any, shape: tuple[int, int], machine: str | None = None) -> None:
    x, y = torch.randn(shape), torch.full(shape, float("nan"))
    tilescale.emulate(func, [x, y], machine=machine)
    assert torch.equal(y, x + 1)


@pytest.mark.parametrize(
    ("func", "shape", "line"),
    [
        (passed_through((3, 11), 32), (3, 11), "the tile"),
        (passed_through((33, 7), 64), (33, 7), "the tile"),
        (passed_through((64, 64), 48), (64, 64), "the tile"),
        (passed_through((64, 33), 256, "warpgroup"), (64, 33), "the tile"),
        (reduced((32, 48), 256), (32, 48), "the sums"),
        (reduced((48, 48), 48), (48, 48), "the sums"),
        (cleared((6, 32), 128), (6, 32), "two tiles"),
        (cleared((6, 64), 64), (6, 64), "two tiles"),
    ],
)
def test_a_tile_that_threads_cannot_share_out(func: Any, shape: tuple[int, int], line: str):
    for _ in range(2):
        with pytest.raises(ShapeError, match=f"T.*# {line}") as error:
            runs(func, shape)
        assert error.value.hint


@pytest.mark.parametrize(
    ("shape", "threads", "scale"),
    [((3, 11), 64, "block"), ((48, 48), 48, "block"), ((5, 32), 32, "block"), ((64, 34), 128, "block")],
)
def test_a_tile_in_registers_that_threads_share_out(shape: tuple[int, int], threads: int, scale: str):
    """Also one with fewer elements than threads."""
    runs(passed_through(shape, threads, scale), shape)
    assert lowered(passed_through(shape, threads, scale)).source({})


@pytest.mark.parametrize(("shape", "threads"), [((3, 512), 128), ((5, 128), 32), ((3, 5), 64)])
def test_a_tile_of_three_dimensions_that_threads_share_out(shape: tuple[int, int], threads: int):
    runs(cleared(shape, threads), shape)


def test_a_tile_whose_layout_others_say(monkeypatch: pytest.MonkeyPatch):
    """Each thread holds all 100 elements, which do not divide among 32 threads. Both runs lower the program once."""

    @T.prim_func
    def scaled(X: T.Tensor((100, 128), "float32"), Y: T.Tensor((100, 128), "float32")):
        with T.Kernel(1, threads=32):
            ones = T.alloc_fragment((100,), "float32")
            T.fill(ones, 1)
            for row in T.serial(100):
                for j in T.Parallel(128):
                    Y[row, j] = X[row, j] + ones[row]

    asked: list[Any] = []
    lower = support.lower
    monkeypatch.setattr(support, "lower", lambda *given: asked.append(given) or lower(*given))
    for _ in range(2):
        runs(scaled, (100, 128))
    assert len(asked) == 1


def test_slots_of_a_ring_are_shared_out_whatever_their_number(monkeypatch: pytest.MonkeyPatch):
    """Threads distribute the slot that an operation names, so the program need not be lowered."""

    @T.prim_func
    def run(X: T.Tensor((64, 64), "float16"), Y: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128):
            ring = T.alloc_shared((11, 64, 64), "float16")
            total = T.alloc_fragment((64, 64), "float32")
            T.clear(total)
            for step in T.serial(12):
                T.copy(X, ring[step % 11, :, :])
                T.gemm(ring[step % 11, :, :], ring[step % 11, :, :], total)
            T.copy(total, Y)

    monkeypatch.setattr(support, "lower", None)
    x, y = torch.eye(64, dtype=torch.float16), torch.empty(64, 64)
    tilescale.emulate(run, [x, y], machine="h200-sxm-8")
    assert torch.equal(y, 12 * x.float())
    monkeypatch.undo()
    assert lowered(run).source({})


def test_tiles_are_checked_without_the_rest_of_a_lowering(monkeypatch: pytest.MonkeyPatch):
    later: list[str] = []
    stock = tilelang.transform.StorageRewrite
    monkeypatch.setattr(tilelang.transform, "StorageRewrite", lambda: later.append("StorageRewrite") or stock())
    func = cleared((3, 640), 128)
    runs(func, (3, 640))
    assert not later
    assert lowered(func).source({}) and later


def test_the_emulator_of_another_machine_shares_out_any_tile():
    runs(passed_through((3, 11), 32), (3, 11), "mi300x-8")


def test_a_program_without_a_lowering_is_emulated_and_said_to_be_one(monkeypatch: pytest.MonkeyPatch):
    """In doubt about its tiles a program is lowered, which may fail for another reason."""
    lowerings = []

    def lower(*given: Any) -> Any:
        lowerings.append(given)
        raise UnsupportedError("no bulk copies of such rows", where=Location("program.py", 7))

    monkeypatch.setattr(support, "may_be_uneven", lambda program, machine: True)
    monkeypatch.setattr(support, "lower", lower)
    func, args = product(64, 64, 128), tensors(64, 64)
    for _ in range(2):
        report = tilescale.emulate(func, args, machine="h200-sxm-8")
        assert report.unsupported.message == "no bulk copies of such rows"
        assert "unsupported on h200-sxm-8: no bulk copies of such rows  program.py:7" in str(report)
    assert len(lowerings) == 1 and args[2][0].eq(32).all()


def test_a_program_with_a_lowering_is_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(support, "may_be_uneven", lambda program, machine: True)
    report = tilescale.emulate(product(64, 64, 128), tensors(64, 64), machine="h200-sxm-8")
    assert report.unsupported is None and "unsupported" not in str(report)
