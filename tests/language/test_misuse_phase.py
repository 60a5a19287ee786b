# SPDX-License-Identifier: MIT
"""Phases used wrongly: found when a program is taken apart, with the user's line and what to do."""

import pytest

import tilescale.language as T
from tilescale.errors import PhaseError, UsageError
from tilescale.hda import Machine
from tilescale.passes.pipeline import analyse

H200 = Machine.load("h200-sxm-8")


def test_a_program_index_in_a_device_phase(mistake):
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            with T.Scale("device"):
                A[bx] = 1  # <-

    with mistake(PhaseError, "'bx' is an index of a block", "once per device", "T.Scale('block')"):
        analyse(f, H200)


def test_a_thread_index_in_a_device_phase(mistake):
    @T.prim_func
    def f(A: T.Tensor((64,), "float32")):
        with T.Kernel(device=2, block=4, threads=32):
            tx = T.get_thread_binding()
            with T.Scale("device"):
                A[tx] = 1  # <-

    with mistake(PhaseError, "'tx' is an index of a block"):
        analyse(f, H200)


def test_a_product_in_a_device_phase(mistake):
    @T.prim_func
    def f(A: T.Tensor((64, 64), "float16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(device=2, block=4, threads=32):
            with T.Scale("device"):
                T.gemm(A, A, C)  # <-

    with mistake(PhaseError, "T.gemm needs the threads of a block", "T.Scale('block')"):
        analyse(f, H200)


def test_a_program_index_in_a_device_phase_through_a_variable(mistake):
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            row = bx * 2  # <-
            with T.Scale("device"):
                A[row] = 1

    with mistake(PhaseError, "'bx' is an index of a block"):
        analyse(f, H200)


@pytest.mark.parametrize("control", ["if", "for"])
def test_a_program_index_in_control_flow_around_phases(mistake, control: str):
    @T.prim_func
    def branch(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            if bx == 0:  # <-
                with T.Scale("device"):
                    T.barrier()

    @T.prim_func
    def loop(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            for _ in T.serial(bx):  # <-
                with T.Scale("device"):
                    T.barrier()

    with mistake(PhaseError, "'bx' is an index of a block"):
        analyse(branch if control == "if" else loop, H200)


def test_a_tile_used_across_phases(mistake):
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            tile = T.alloc((1,), "float32")
            T.copy(A[bx], tile)
            with T.Scale("device"):
                T.barrier()
            T.copy(tile, A[bx])  # <-

    hints = "keep it in device memory", "`with T.Scale('block'):`"
    with mistake(PhaseError, "tile 'tile' is used in two phases", "(first used)", *hints):
        analyse(f, H200)


def test_a_tile_of_blocks_in_a_device_phase(mistake):
    @T.prim_func
    def f(A: T.Tensor((8,), "float32"), B: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=1, threads=32):
            tile = T.alloc((8,), "float32")
            T.copy(A, tile)
            with T.Scale("device") as (rank, _):
                T.copy(tile, B, dst=1 - rank)  # <-

    with mistake(PhaseError, "tile 'tile' is one of a block", "once per device", "inside T.Scale('block')"):
        analyse(f, H200)


def test_a_view_of_a_tile_used_across_phases(mistake):
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            tile = T.alloc((1,), "float32")
            part = T.view(tile, (1, 1))
            T.copy(A[bx], tile)
            with T.Scale("device"):
                T.barrier()
            A[bx] = part[0, 0]  # <-

    with mistake(PhaseError, "tile 'tile' is used in two phases"):
        analyse(f, H200)


def test_a_tile_used_in_a_condition_across_phases(mistake):
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            tile = T.alloc((1,), "float32")
            T.copy(A[bx], tile)
            with T.Scale("device"):
                T.barrier()
            if tile[0] > 0:  # <-
                A[bx] = 0

    with mistake(PhaseError, "tile 'tile' is used in two phases"):
        analyse(f, H200)


def test_a_value_read_from_memory_in_another_phase(mistake):
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            before = A[bx]
            with T.Scale("device"):
                T.allreduce(A)
            A[bx] = A[bx] - before  # <-

    with mistake(PhaseError, "'before' is read from memory in one phase and used in another", "(read here)"):
        analyse(f, H200)


@pytest.mark.parametrize("where", ["statement", "condition", "loop", "copy", "macro"])
def test_a_split_parameter_used_whole(mistake, where: str):
    @T.macro
    def touch(X):
        T.clear(X)  # <-

    @T.prim_func
    def f(A: T.Tensor((8,), "float32"), n: T.Tensor((8,), "int32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            with T.Scale("device"):
                mine = T.view(A, layout=T.FullRow)
                own = T.view(n, layout=T.FullRow)
            mine[0] = own[0]
            if where == "statement":
                mine[bx] = A[bx]  # <-
            if where == "condition":
                if A[0] > 0:  # <-
                    mine[bx] = 1
            if where == "loop":
                for _ in T.serial(n[0]):  # <-
                    mine[bx] = 1
            if where == "copy":
                T.copy(A[bx], mine[bx])  # <-
            if where == "macro":
                touch(A)

    with mistake(UsageError, "is split over level 'device' by a view, but used whole here", "use the view"):
        analyse(f, H200)


def test_launches_with_different_units(mistake):
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            A[bx] = 1
        with T.Kernel(device=4, block=4, threads=32) as bx:  # <-
            A[bx] = 2

    with mistake(PhaseError, "use different units: device=2 and device=4", "the same levels"):
        analyse(f, H200)


def test_a_launch_with_and_one_without_devices(mistake):
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            A[bx] = 1
        with T.Kernel(4, threads=32) as bx:  # <-
            A[bx] = 2

    with mistake(PhaseError, "device=2 and one device"):
        analyse(f, H200)


def test_no_launch():
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        T.evaluate(0)

    with pytest.raises(UsageError, match="'f' launches nothing"):
        analyse(f, H200)


def test_an_extent_that_differs_between_units(mistake):
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(device=2, block=4, threads=32):
            with T.Scale("device") as (rank, size):
                work = T.alloc((rank + 1,), "float32", level="l2")  # <-
                T.clear(work)

    with mistake(UsageError, "the shape (rank + 1) of 'work' depends on rank, which has no value"):
        analyse(f, H200)


def test_an_extent_of_a_loop(mistake):
    @T.prim_func
    def f(A: T.Tensor((8,), "float32")):
        with T.Kernel(2, threads=32):
            for i in T.serial(4):
                tile = T.alloc_shared((i + 1,), "float32")  # <-
                T.clear(tile)

    with mistake(UsageError, "'tile' depends on i"):
        analyse(f, H200)


def test_extents_that_follow_from_the_arguments():
    n = T.dynamic("n")

    @T.prim_func
    def f(A: T.Tensor((n,), "float32"), m: T.int32):
        with T.Kernel(device=2, block=4, threads=32):
            with T.Scale("device") as (rank, size):
                work = T.alloc((n // size, m + 1), "float32", level="l2")
                T.clear(work)

    analyse(f, H200)
