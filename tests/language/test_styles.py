# SPDX-License-Identifier: MIT
"""Ways to write a program: prim_func, factories, eager style, macros, tuned parameters; and the machines it is for."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import tilelang
import torch

import tilescale
import tilescale.language as T
from tilescale.errors import UnknownLevelError, UsageError


@T.macro
def scaled_rows(source, target, factor):
    """Every warp multiplies its rows by `factor` and adds its rank."""
    with T.Scale("warp") as warp, warps:
        mine, out = T.view(source, layout=T.FullRow), T.view(target, layout=T.FullRow)
        for i, j in T.Parallel(mine.shape[0], mine.shape[1]):
            out[i, j] = mine[i, j] * factor + warp


def scaled(a: torch.Tensor, factor: float, tile: int = 8) -> torch.Tensor:
    """Result of `scaled_rows` for tiles of a number of rows, with two warps."""
    warp = torch.arange(a.shape[0]) % tile // (tile // 2)
    return a * factor + warp[:, None]


A = torch.arange(128.0).reshape(32, 4)


# -- factories ---------------------------------------------------------------------------------------------------------


@tilescale.jit
def lazy(rows: int, tile: int = 8, devices: int = 1):
    @T.prim_func
    def kernel(X: T.Tensor((rows, 4), "float32"), Y: T.Tensor((rows, 4), "float32")):
        with T.Kernel(device=devices, block=rows // tile, threads=64) as bx:
            x = T.alloc((tile, 4), "float32")
            y = T.alloc((tile, 4), "float32")
            T.copy(X[bx * tile, 0], x)
            scaled_rows(x, y, 2)
            T.copy(y, Y[bx * tile, 0])

    return kernel


def test_lazy_style():
    out = torch.zeros_like(A)
    lazy(32)(A, out)
    torch.testing.assert_close(out, scaled(A, 2))
    assert lazy(32) is lazy(32)
    assert lazy(32) is not lazy(32, tile=16)


def test_lazy_style_with_outputs():
    @tilescale.jit(out_idx=[-1])
    def make(rows):
        return lazy.get_tir(rows)

    torch.testing.assert_close(make(32)(A), scaled(A, 2))


def test_eager_style():
    @tilescale.jit
    def double(X, Y):
        rows, columns = T.const("rows, columns")
        X: T.Tensor[[rows, columns], T.float32]
        Y: T.Tensor[[rows, columns], T.float32]
        with T.Kernel(rows // 8, threads=64) as bx:
            x = T.alloc((8, columns), "float32")
            y = T.alloc((8, columns), "float32")
            T.copy(X[bx * 8, 0], x)
            scaled_rows(x, y, 2)
            T.copy(y, Y[bx * 8, 0])

    for a in (A, A.reshape(16, 8)):
        out = torch.zeros_like(a)
        double(a, out)
        torch.testing.assert_close(out, scaled(a, 2))


def test_eager_style_by_level_names_alone():
    """No name of TileLang's eager style is called before the launch."""

    @tilescale.jit
    def double(X: T.Tensor((32, 4), "float32"), Y: T.Tensor((32, 4), "float32")):
        with T.Kernel(device=1, block=4, threads=64) as bx:
            with T.Scale("warp") as warp, warps:
                for i, j in T.Parallel(4, 4):
                    row = bx * 8 + warp * 4 + i
                    Y[row, j] = X[row, j] * 2 + warp

    out = torch.zeros_like(A)
    double(A, out)
    torch.testing.assert_close(out, scaled(A, 2))


def test_eager_style_with_outputs():
    @tilescale.jit
    def double(X):
        rows, columns = T.const("rows columns")
        X: T.Tensor[[rows, columns], T.float32]
        Y = T.empty((rows, columns), "float32")
        with T.Kernel(device=1, block=1, threads=64):
            x = T.alloc((rows, columns), "float32")
            y = T.alloc((rows, columns), "float32")
            T.copy(X, x)
            scaled_rows(x, y, 2)
            T.copy(y, Y)
        return Y

    torch.testing.assert_close(double(A), scaled(A, 2, tile=32))


def test_stock_jit_traces_our_programs():
    @tilelang.jit
    def make(rows):
        @T.prim_func
        def kernel(X: T.Tensor((rows, 4), "float32")):
            with T.Kernel(device=2, block=1, threads=64):
                with T.Scale("device") as rank, size:
                    X[0, 0] = rank

        return kernel

    args = [[torch.zeros(8, 4)] for _ in range(2)]
    tilescale.emulate(make.get_tir(8), args)
    assert [a[0, 0].item() for (a,) in args] == [0, 1]


# -- tuned parameters --------------------------------------------------------------------------------------------------


def tuned():
    return tilelang.autotune(configs=[{"tile": 8}, {"tile": 16}])(
        tilescale.jit(target={"kind": "cuda", "arch": "sm_90"})(lazy.func.orig_func)
    )


@pytest.mark.parametrize("tile", [8, 16])
def test_tuned_parameters_given_by_the_caller(tile: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)  # TileLang's tuner writes its log where it runs.
    kernel = tuned()(32, tile=tile)
    assert [int(n) for n in kernel.program.launches[0].grid] == [32 // tile]
    out = torch.zeros_like(A)
    kernel(A, out)
    torch.testing.assert_close(out, scaled(A, 2, tile))


def test_tuned_parameters_given_by_the_tuner():
    kernel = tuned().jit_impl(32, __tune_params={"tile": 16})
    assert [int(n) for n in kernel.program.launches[0].grid] == [2]


def test_several_configurations_at_once():
    kernels = lazy.par_compile([{"rows": 32, "tile": 16}, (32, 32)])
    assert [[int(n) for n in k.program.launches[0].grid] for k in kernels] == [[2], [1]]


# -- macros ------------------------------------------------------------------------------------------------------------


def test_macros_with_scopes_and_views_as_arguments():
    @T.macro
    def fill_half(view, value):
        with T.Scale("warp") as warp, warps:
            T.fill(T.view(view, layout=T.FullCol), value + warp)

    @T.macro
    def fill_all(tile):
        with T.Scale("warpgroup") as group, groups:
            fill_half(T.view(tile, layout=T.FullRow), group * 10)

    @T.prim_func
    def f(X: T.Tensor((4, 8), "int32")):
        with T.Kernel(1, threads=256):
            tile = T.alloc((4, 8), "int32")
            fill_all(tile)
            T.copy(tile, X)

    x = torch.zeros(4, 8, dtype=torch.int32)
    tilescale.emulate(f, [x])
    assert x.tolist() == [[0, 0, 1, 1, 2, 2, 3, 3]] * 2 + [[10, 10, 11, 11, 12, 12, 13, 13]] * 2


def test_macros_that_return_values_and_take_python_functions():
    @T.macro
    def next_of(rank, size, step):
        return (rank + step) % size

    @T.macro
    def exchange(source, target, peer_of):
        with T.Scale("device") as rank, size:
            peer = peer_of(rank, size, 1)
            T.copy(source, target, dst=peer)
            T.barrier()

    @T.prim_func
    def f(X: T.Tensor((4,), "int32"), Y: T.Tensor((4,), "int32")):
        with T.Kernel(device=3, block=1, threads=32):
            exchange(X, Y, next_of)

    args = [[torch.full((4,), rank).int(), torch.zeros(4).int()] for rank in range(3)]
    tilescale.emulate(f, args)
    assert [y[0].item() for _, y in args] == [2, 0, 1]


def test_a_macro_used_in_two_phases():
    @T.macro
    def total(X):
        with T.Scale("device"):
            T.allreduce(X)

    @T.prim_func
    def f(X: T.Tensor((4,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            total(X)
            X[bx] = X[bx] + bx
            total(X)

    args = [[torch.ones(4)] for _ in range(2)]
    tilescale.emulate(f, args)
    assert args[0][0].tolist() == [4, 6, 8, 10]


# -- machines ----------------------------------------------------------------------------------------------------------


def test_a_kernel_for_each_machine():
    default = lazy(32)
    with tilescale.use_machine("a100-sxm-8"):
        other = lazy(32)
    assert (default.machine.name, other.machine.name) == ("h200-sxm-8", "a100-sxm-8")
    assert lazy(32) is default


def test_eager_templates_for_each_machine():
    sizes = []

    @tilescale.jit
    def f(X):
        (n,) = (T.const("n"),)
        X: T.Tensor[[n], T.float32]
        sizes.append(tilescale.current_machine().name)
        with T.Kernel(n, threads=64) as bx:
            X[bx] = 1

    f(torch.zeros(4))
    with tilescale.use_machine("a100-sxm-8"):
        f(torch.zeros(4))
    assert set(sizes) == {"h200-sxm-8", "a100-sxm-8"}


def test_a_machine_given_to_jit():
    @tilescale.jit(machine="wafer-mesh")
    def make(n):
        @T.prim_func
        def kernel(X: T.Tensor((n,), "float32")):
            with T.Kernel(core=2):
                with T.Scale("core") as rank, size:
                    X[0] = rank + size

        return kernel

    kernel = make(4)
    assert kernel.machine.name == "wafer-mesh"
    args = [[torch.zeros(4)] for _ in range(2)]
    tilescale.emulate(kernel.ir, args, machine="wafer-mesh")
    assert [a[0].item() for (a,) in args] == [2, 3]
    with pytest.raises(UnknownLevelError, match="machine h200-sxm-8 has no level 'core'"):
        tilescale.jit(make.func.orig_func)(4)


def test_traced_again_for_another_machine():
    seen = []

    def layout(i):
        seen.append(tilescale.current_machine().name)
        return i // 4

    @T.prim_func
    def f(X: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("device") as rank, size:
                T.fill(T.view(X, layout=layout), rank)

    for machine in ("b200-sxm-8", "mi300x-8"):
        args = [[torch.zeros(4)] for _ in range(2)]
        tilescale.emulate(f, args, machine=machine)
        assert args[1][0].tolist() == [1] * 4
        assert seen[-1] == machine


def test_an_eager_program_cannot_be_traced_again():
    @tilescale.jit
    def f(X: T.Tensor((8,), "float32")):
        with T.Kernel(device=1, block=1, threads=32):
            X[0] = 1

    func = f.get_tir()
    with pytest.raises(UsageError, match="traced for another machine than 'a100-sxm-8'"):
        tilescale.emulate(func, [torch.zeros(8)], machine="a100-sxm-8")


# -- what TileLang logs ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("tilelang").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("tilelang").removeHandler(handler)


@pytest.mark.parametrize("level", ["WARNING", "DEBUG"])
def test_the_rewritten_source_of_a_mistake_is_logged_for_debugging_alone(level: str):
    logging.getLogger("tilescale").setLevel(level)
    try:
        with logged() as messages, pytest.raises(ZeroDivisionError):

            @T.prim_func
            def g(X: T.Tensor((8,), "float32")):
                with T.Kernel(1, threads=32):
                    X[0] = 1 // 0
    finally:
        logging.getLogger("tilescale").setLevel(logging.NOTSET)

    assert ["Failed to build prim_func from g" in message for message in messages] == [True] * (level == "DEBUG")
