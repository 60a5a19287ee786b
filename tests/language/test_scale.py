# SPDX-License-Identifier: MIT
"""`T.Scale`, `T.rank`, `T.size`: spellings, executing units, and the numbers of units at every level."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale.errors import LevelNotLaunchedError, PhaseError, ShapeError, UnknownLevelError, UsageError

INT = torch.int32


def zeros(units: int, *shape: int) -> list[list[torch.Tensor]]:
    return [[torch.zeros(*shape, dtype=INT)] for _ in range(units)]


# -- spellings ---------------------------------------------------------------------------------------------------------


def run(func, devices: int = 2) -> list[list[int]]:
    args = zeros(devices, 4)
    tilescale.emulate(func, args)
    return [a[0].tolist() for a in args]


WANTED = [[0, 2, 3, 4], [1, 2, 3, 4]]
"""Results of the programs below on two devices: rank and size of the device, rank and size of the last warp."""


def test_names_in_parentheses():
    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=1, threads=128):
            with T.Scale("device") as (d, n):
                A[0] = d
                A[1] = n
            with T.Scale("warp") as (w, ws):
                if w == ws - 1:
                    A[2] = w
                    A[3] = ws

    assert run(f) == WANTED


def test_names_without_parentheses():
    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=1, threads=128):
            with T.Scale("device") as d, n:
                A[0] = d
                A[1] = n
            with T.Scale("warp") as w, ws:
                if w == ws - 1:
                    A[2] = w
                    A[3] = ws

    assert run(f) == WANTED


def test_nested():
    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=1, threads=128):
            with T.Scale("block") as b, bs:
                with T.Scale("device") as d, n:
                    with T.Scale("warp") as w, ws:
                        if w == ws - 1:
                            A[0] = d + b
                            A[1] = n * bs
                            A[2] = w
                            A[3] = ws

    assert run(f) == WANTED


def test_several_in_one_with():
    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=1, threads=128), T.Scale("block"):
            with T.Scale("device") as d, n, T.Scale("warp") as w, ws:
                if w == ws - 1:
                    A[0] = d
                    A[1] = n
                    A[2] = w
                    A[3] = ws

    assert run(f) == WANTED


def test_mixed_spellings_in_one_with():
    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=1, threads=128):
            with T.Scale("block"), T.Scale("device") as (d, n), T.Scale("warp") as w, ws:
                if w == ws - 1:
                    A[0] = d
                    A[1] = n
                    A[2] = w
                    A[3] = ws

    assert run(f) == WANTED


def test_no_names_and_functions_instead():
    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=1, threads=128):
            with T.Scale("device"):
                A[0] = T.rank("device")
                A[1] = T.size("device")
            with T.Scale("warp"):
                if T.rank("warp") == T.size("warp") - 1:
                    A[2] = T.rank("warp")
                    A[3] = T.size("warp")

    assert run(f) == WANTED


def test_one_name_is_the_pair():
    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=1, threads=128):
            with T.Scale("device") as both:
                A[0] = both[0]
                A[1] = both[1]
            A[2] = 3
            A[3] = 4

    assert run(f) == WANTED


def test_another_name_for_the_function():
    scale = T.Scale

    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=1, threads=128):
            with scale("device") as d, n:
                A[0] = d
                A[1] = n
            A[2] = 3
            A[3] = 4

    assert run(f) == WANTED


def test_a_third_name_is_a_context_manager_as_in_python():
    with pytest.raises(NameError, match="other"):

        @T.prim_func
        def f(A: T.Tensor((4,), "int32")):
            with T.Kernel(device=2, block=1, threads=128):
                with T.Scale("device") as d, n, other:  # noqa: F821
                    A[0] = d + n


def test_names_end_with_the_units_that_they_belong_to():
    with pytest.raises(UsageError, match="^w is used outside of the block"):

        @T.prim_func
        def f(A: T.Tensor((4,), "int32")):
            with T.Kernel(2, threads=128) as bx:
                with T.Scale("warp") as w, ws:
                    A[bx] = w
                A[bx] = w


def test_names_of_a_device_outlive_its_scale():
    @T.prim_func
    def f(A: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=1, threads=128):
            with T.Scale("device") as d, n:
                mine = d
            A[0] = mine
            A[1] = n
            A[2] = 3
            A[3] = 4

    assert run(f) == WANTED


# -- ranks and sizes ---------------------------------------------------------------------------------------------------


def test_every_level():
    with tilescale.use_machine("h200-sxm-8x4"):

        @T.prim_func
        def f(A: T.Tensor((2, 4, 128, 14), "int32")):
            with T.Kernel(node=2, device=2, cta_cluster=2, block=(4, 2), threads=128) as (bx, by):
                tx = T.get_thread_binding()
                with T.Scale("thread") as t, ts:
                    A[by, bx, tx, 0] = t
                    A[by, bx, tx, 1] = ts
                with T.Scale("warp") as w, ws:
                    A[by, bx, tx, 2] = w
                    A[by, bx, tx, 3] = ws
                with T.Scale("warpgroup") as g, gs:
                    A[by, bx, tx, 4] = g
                    A[by, bx, tx, 5] = gs
                with T.Scale("block") as b, bs:
                    A[by, bx, tx, 6] = b
                    A[by, bx, tx, 7] = bs
                A[by, bx, tx, 8] = T.rank("cta_cluster")
                A[by, bx, tx, 9] = T.size("cta_cluster")
                with T.Scale("block"), T.Scale("device") as d, ds:
                    A[by, bx, tx, 10] = d
                    A[by, bx, tx, 11] = ds
                with T.Scale("block"), T.Scale("node") as n, ns:
                    A[by, bx, tx, 12] = n
                    A[by, bx, tx, 13] = ns

    args = zeros(4, 2, 4, 128, 14)
    tilescale.emulate(f, args, machine="h200-sxm-8x4")
    by, bx, tx = torch.meshgrid(torch.arange(2), torch.arange(4), torch.arange(128), indexing="ij")
    one = torch.ones_like(tx)
    for unit, (a,) in enumerate(args):
        cluster = by * 2 + bx // 2
        wanted = [tx, 128 * one, tx // 32, 4 * one, 0 * one, one, bx % 2, 2 * one, cluster, 4 * one]
        wanted += [unit % 2 * one, 2 * one, unit // 2 * one, 2 * one]
        torch.testing.assert_close(a, torch.stack(wanted, -1).to(INT))


def test_blocks_count_over_the_grid_without_clusters():
    @T.prim_func
    def f(A: T.Tensor((6, 2), "int32")):
        with T.Kernel(3, 2, threads=32) as (bx, by):
            with T.Scale("block") as b, bs:
                A[by * 3 + bx, 0] = b
                A[by * 3 + bx, 1] = bs

    ((a,),) = args = zeros(1, 6, 2)
    tilescale.emulate(f, args)
    assert a.tolist() == [[i, 6] for i in range(6)]


def test_ranks_of_finer_levels_than_the_executing_one_are_the_threads():
    @T.prim_func
    def f(A: T.Tensor((256, 4), "int32")):
        with T.Kernel(1, threads=(64, 4)):
            tx, ty, tz = T.get_thread_bindings()
            A[ty * 64 + tx, 0] = T.rank("thread")
            A[ty * 64 + tx, 1] = T.rank("warp")
            A[ty * 64 + tx, 2] = T.rank("warpgroup")
            A[ty * 64 + tx, 3] = T.size("warp")

    ((a,),) = args = zeros(1, 256, 4)
    tilescale.emulate(f, args)
    assert a.tolist() == [[t, t // 32, t // 128, 8] for t in range(256)]


def test_warps_count_inside_an_open_warpgroup():
    @T.prim_func
    def f(A: T.Tensor((8, 3), "int32")):
        with T.Kernel(1, threads=256):
            with T.Scale("warpgroup") as g, gs:
                with T.Scale("warp") as w, ws:
                    A[g * 4 + w, 0] = g
                    A[g * 4 + w, 1] = w
                    A[g * 4 + w, 2] = ws

    ((a,),) = args = zeros(1, 8, 3)
    tilescale.emulate(f, args)
    assert a.tolist() == [[i // 4, i % 4, 4] for i in range(8)]


def test_a_cluster_executes_once():
    @T.prim_func
    def f(A: T.Tensor((4,), "int32"), Sum: T.Tensor((8,), "int32")):
        with T.Kernel(cta_cluster=2, block=8, threads=32) as bx:
            with T.Scale("cta_cluster") as c, cs:
                tile = T.alloc((2,), "int32", level="l1")
                A[c] = A[c] + cs
                with T.Scale("block") as b, bs:
                    tile[b] = b + 10 * c
                    T.barrier()
                    Sum[bx] = tile[0] + tile[1]

    a, total = torch.zeros(4, dtype=INT), torch.zeros(8, dtype=INT)
    tilescale.emulate(f, [a, total])
    assert a.tolist() == [4] * 4
    assert total.tolist() == [1 + 20 * (i // 2) for i in range(8)]


def test_a_finer_scale_inside_a_device_phase_opens_the_grid():
    @T.prim_func
    def f(A: T.Tensor((4,), "int32"), B: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=4, threads=64) as bx:
            with T.Scale("device") as d, n:
                for i in T.serial(4):
                    A[i] = i + d
                with T.Scale("block"):
                    B[bx] = A[bx] * 2
                T.barrier()
                with T.Scale("warp") as w, ws:
                    if w == 1:
                        B[bx] = B[bx] + ws

    args = [[torch.zeros(4, dtype=INT) for _ in range(2)] for _ in range(2)]
    tilescale.emulate(f, args)
    assert [a[1].tolist() for a in args] == [[2 * (i + d) + 2 for i in range(4)] for d in range(2)]


def test_scales_in_loops_that_python_unrolls():
    @T.prim_func
    def f(A: T.Tensor((3, 2), "int32")):
        with T.Kernel(1, threads=64):
            for row, factor in enumerate((1, 10, 100)):
                with T.Scale("warp") as w, ws:
                    A[row, w] = (w + 1) * factor

    ((a,),) = args = zeros(1, 3, 2)
    tilescale.emulate(f, args)
    assert a.tolist() == [[1, 2], [10, 20], [100, 200]]


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_unknown_level(mistake):
    levels = "thread, warp, warpgroup, block, cta_cluster, device, node"
    with mistake(UnknownLevelError, "no level 'warpgrop'", "did you mean 'warpgroup'?", levels):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(device=2, block=2, threads=128):
                with T.Scale("warpgrop"):  # <-
                    A[0] = 1


@pytest.mark.parametrize("level", ["device", "node", "cta_cluster"])
@pytest.mark.parametrize("threads", [128, 48])
def test_level_outside_the_launch(mistake, level: str, threads: int):
    with mistake(LevelNotLaunchedError, f"level {level!r} is not part of this launch", "'block'", f"T.Kernel({level}="):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(2, threads=threads):
                with T.Scale(level):  # <-
                    A[0] = 1


def test_rank_and_size_of_a_level_outside_the_launch(mistake):
    with mistake(LevelNotLaunchedError, "'node'"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(device=2, block=2, threads=128) as bx:
                A[bx] = T.size("node")  # <-


def test_threads_that_are_no_whole_warpgroups(mistake):
    with mistake(ShapeError, "192 threads do not divide", "'warpgroup'", "128 each", "multiple of 128"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(2, threads=192) as bx:
                with T.Scale("warpgroup"):  # <-
                    A[bx] = 1


@pytest.mark.parametrize("use", [lambda rank: rank == 0, lambda rank: rank + 1, lambda rank: rank < 1])
def test_a_rank_and_a_size_under_one_name(mistake, use):
    with mistake(UsageError, "a rank and a size, here under one name", "as (rank, size):"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(device=2, block=2, threads=128) as bx:
                with T.Scale("block"), T.Scale("device") as rank:
                    if use(rank):  # <-
                        A[bx] = 1


def test_outside_a_launch(mistake):
    with mistake(UsageError, "T.Scale needs a launch around it", "with T.Kernel(...)"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Scale("device"):  # <-
                A[0] = 1


@pytest.mark.parametrize("call", [lambda: T.rank("device"), lambda: T.size("device"), T.barrier])
def test_outside_a_function(call):
    with pytest.raises(UsageError, match="outside a traced function"):
        call()


def test_scale_outside_a_function():
    with pytest.raises(UsageError, match="T.Scale was called outside a traced function"):
        with T.Scale("device"):
            pass


@pytest.mark.parametrize("level", ["block", "warp"])
def test_rank_of_a_finer_level_in_a_device_phase(mistake, level: str):
    with mistake(PhaseError, f"T.rank({level!r})", "device executes as one unit", "T.Scale('block')"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(device=2, block=2, threads=128):
                with T.Scale("device"):
                    A[0] = T.rank(level)  # <-


def test_threads_directly_in_a_cluster(mistake):
    with mistake(PhaseError, "T.Scale('warp')", "cta_cluster executes as one unit", "T.Scale('block')"):

        @T.prim_func
        def f(A: T.Tensor((8,), "float32")):
            with T.Kernel(cta_cluster=2, block=2, threads=128):
                with T.Scale("cta_cluster"):
                    with T.Scale("warp"):  # <-
                        A[0] = 1


def test_the_scales_of_a_failed_trace_are_gone():
    for _ in range(2):
        with pytest.raises(UnknownLevelError):

            @T.prim_func
            def f(A: T.Tensor((8,), "float32")):
                with T.Kernel(2, threads=128):
                    with T.Scale("warp"):
                        with T.Scale("nothing"):
                            A[0] = 1

    @T.prim_func
    def g(A: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=128):
            with T.Scale("warp") as w, ws:
                A[w] = ws

    ((a,),) = args = zeros(1, 8)
    tilescale.emulate(g, args)
    assert a.tolist() == [4] * 4 + [0] * 4
