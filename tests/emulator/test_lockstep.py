# SPDX-License-Identifier: MIT
"""Independent programs in lockstep: the same values, reports, times and errors as one program after the other."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale.backends.emulator import compiled
from tilescale.backends.emulator.execute.grid import Grid
from tilescale.errors import RaceError, TileScaleError

ROWS, COLUMNS = 70, 48


@T.prim_func
def normalized(
    X: T.Tensor((ROWS, COLUMNS), "bfloat16"), S: T.Tensor((3,), "float32"), Y: T.Tensor((ROWS, COLUMNS), "float32")
):
    with T.Kernel(ROWS, threads=64) as bx:
        shared = T.alloc_shared((COLUMNS,), "bfloat16")
        x = T.alloc_fragment((COLUMNS,), "float32")
        greatest = T.alloc_fragment((1,), "float32")
        T.copy(X[bx, 0], shared)
        T.copy(shared, x)
        T.reduce_max(x, greatest, dim=0)
        scale = S[bx % 3]
        for step in T.serial(2):
            for i in T.Parallel(COLUMNS):
                x[i] = T.if_then_else(x[i] > 0, T.exp(x[i] - greatest[0]) * scale, x[i] * step)
            if step == 1:
                greatest[0] = greatest[0] * 2
        greatest[0] = greatest[0] + bx
        for i in T.Parallel(COLUMNS):
            if i < COLUMNS - 1:
                Y[bx, i] = x[i] + greatest[0]


@T.prim_func
def products(
    A: T.Tensor((ROWS * 16, 32), "float16"), B: T.Tensor((24, 32), "float16"), C: T.Tensor((ROWS * 16, 32), "float32")
):
    with T.Kernel(2, ROWS, threads=32) as (bx, by):
        a = T.alloc_shared((16, 32), "float16")
        b = T.alloc_shared((32, 16), "float16")
        c = T.alloc_fragment((16, 16), "float32")
        T.clear(c)
        T.copy(A[by * 16, 0], a)
        T.copy(B[0, bx * 16], b)  # the rows behind the end are 0
        T.gemm(a, b, c)
        for i, j in T.Parallel(16, 16):
            C[by * 16 + i, bx * 16 + j] = c[i, j]


@T.prim_func
def by_warps(
    X: T.Tensor((ROWS * 32,), "float32"), Y: T.Tensor((ROWS * 32,), "float32"), Z: T.Tensor((ROWS,), "float32")
):
    with T.Kernel(ROWS, threads=96) as bx:
        shared = T.alloc_shared((32,), "float32")
        T.copy(X[bx * 32], shared)
        if T.get_thread_binding() < 32:
            total = T.alloc_fragment((1,), "float32")
            mine = T.alloc_fragment((32,), "float32")
            T.copy(shared, mine)
            T.reduce_sum(mine, total, dim=0)
            Z[bx] = total[0]
        else:
            for i in T.Parallel(32):
                Y[bx * 32 + i] = shared[31 - i]


@T.prim_func
def by_threads(
    A: T.Tensor((64,), "float16"), B: T.Tensor((ROWS * 8, 64), "float16"), C: T.Tensor((ROWS * 8,), "float32")
):
    with T.Kernel(ROWS, threads=(8, 4)) as bx:
        row, part = T.get_thread_binding(0), T.get_thread_binding(1)
        a, b = T.alloc_local((4,), "float16"), T.alloc_local((4,), "float16")
        mine, sums = T.alloc_local((1,), "float32"), T.alloc_shared((8,), "float32")
        steps = T.alloc_var("int32", init=1)
        if part == 0:
            sums[row] = bx
        T.clear(mine)
        for k in T.serial(4):
            for i in T.vectorized(4):
                a[i] = A[k * 16 + part * 4 + i]
                b[i] = B[bx * 8 + row, k * 16 + part * 4 + i]
            for i in T.serial(4):
                mine[0] += a[i].astype("float32") * b[i].astype("float32")
            steps += k
        T.atomic_add(sums[row], mine[0])
        T.sync_threads()
        for i in T.Parallel(8):
            C[bx * 8 + i] = sums[i] * steps


@T.prim_func
def with_a_rest(X: T.Tensor((5000,), "float32"), Y: T.Tensor((5000,), "float32")):
    with T.Kernel(T.ceildiv(5000, 32), threads=32) as bx:
        tile = T.alloc_shared((32,), "float32")
        T.copy(X[bx * 32], tile)
        T.copy(tile, Y[bx * 32])


@T.prim_func
def uninitialized(X: T.Tensor((ROWS, 32), "float32"), Y: T.Tensor((ROWS, 32), "float32")):
    with T.Kernel(ROWS, threads=32) as bx:
        tile = T.alloc_shared((32,), "float32")
        T.copy(X[bx, 0:16], tile[0:16])
        T.copy(tile, Y[bx, 0])


def filled(func: Any) -> list[torch.Tensor]:
    """Random inputs, and NaN in outputs."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for parameter in func.params:
        buffer = func.buffer_map[parameter]
        shape, dtype = [int(n) for n in buffer.shape], getattr(torch, str(buffer.dtype))
        made.append(torch.randn(shape, generator=generator).to(dtype))
    return [*made[:-1], torch.full_like(made[-1], float("nan"))]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Numbers of programs that ran one by one, of each grid or part of one."""
    counts: list[int] = []
    run = Grid.run_programs

    def counted(self: Grid, programs: list[Any]) -> None:
        counts.append(len(programs))
        run(self, programs)

    monkeypatch.setattr(Grid, "run_programs", counted)
    return counts


def both(func: Any, monkeypatch: pytest.MonkeyPatch, arguments: Callable[[Any], list[torch.Tensor]] = filled) -> Any:
    """Outcomes in lockstep and one by one: tensors, report, error."""
    outcomes = []
    for runs in (compiled.lockstep, lambda compiler: None):
        monkeypatch.setattr(compiled, "lockstep", runs)
        args, report, error = arguments(func), None, None
        try:
            report = tilescale.emulate(func, args, machine="h200-sxm-8")
        except TileScaleError as found:
            error = found
        outcomes.append((args, report, error))
    return outcomes


@pytest.mark.parametrize(
    ("func", "left"),
    [(normalized, []), (products, []), (by_warps, []), (by_threads, []), (with_a_rest, [29])],
    ids=["rows", "gemm", "warps", "threads", "rest"],
)
def test_bits_remarks_and_times_are_those_of_programs_one_by_one(
    func: Any, left: list[int], alone: list[int], monkeypatch: pytest.MonkeyPatch
):
    (mine, report, _), (expected, reference, _) = both(func, monkeypatch)
    assert alone[: len(left)] == left and len(alone) == len(left) + 1
    for found, tensor in zip(mine, expected, strict=True):
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8))
    assert report.time_us == reference.time_us
    assert str(report) == str(reference)
    assert report.activity == reference.activity


def test_an_error_is_that_of_programs_one_by_one(monkeypatch: pytest.MonkeyPatch):
    (*_, error), (*_, expected) = both(uninitialized, monkeypatch)
    assert str(error) == str(expected)
    assert "block 0 reads tile[16:32], which is uninitialized" in str(error)


@T.prim_func
def neighbours(X: T.Tensor((ROWS + 1, 32), "float32")):
    with T.Kernel(ROWS, threads=32) as bx:
        for i in T.Parallel(32):
            X[bx, i] = X[bx, i] + 1


@T.prim_func
def sums(X: T.Tensor((ROWS, 32), "float32"), Y: T.Tensor((32,), "float32")):
    with T.Kernel(ROWS, threads=32) as bx:
        for i in T.Parallel(32):
            T.atomic_add(Y[i], X[bx, i])


@T.prim_func
def overlapping(X: T.Tensor((ROWS, 32), "float32"), Y: T.Tensor((ROWS * 16 + 16,), "float32")):
    with T.Kernel(ROWS, threads=32) as bx:
        for i in T.Parallel(32):
            Y[bx * 16 + i] = X[0, i]


@T.prim_func
def triangles(X: T.Tensor((ROWS, 32), "float32"), Y: T.Tensor((ROWS, 32), "float32")):
    with T.Kernel(ROWS, threads=32) as bx:
        for k in T.serial(bx % 3 + 1):
            for i in T.Parallel(32):
                Y[bx, i] = X[bx, i] * k


@T.prim_func
def gathered(X: T.Tensor((ROWS, 32), "float32"), N: T.Tensor((ROWS,), "int32"), Y: T.Tensor((ROWS, 32), "float32")):
    with T.Kernel(ROWS, threads=32) as bx:
        tile = T.alloc_shared((32,), "float32")
        T.copy(X[N[bx], 0:32], tile)
        T.copy(tile, Y[bx, 0:32])


@pytest.mark.parametrize(
    "func", [neighbours, sums, overlapping, triangles, gathered], ids=lambda func: func.attrs["global_symbol"]
)
def test_dependent_programs_run_one_by_one(func: Any, alone: list[int]):
    with pytest.raises(RaceError) if func is overlapping else contextlib.nullcontext():
        tilescale.emulate(func, [torch.zeros_like(t) for t in filled(func)], machine="h200-sxm-8")
    assert alone == [ROWS]


def test_a_result_in_place_of_an_argument_is_computed_one_by_one(alone: list[int]):
    whole = torch.arange(5000.0)
    tilescale.emulate(with_a_rest, [whole, whole], machine="h200-sxm-8")
    assert alone == [157]
    assert torch.equal(whole, torch.arange(5000.0))
