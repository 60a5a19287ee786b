# SPDX-License-Identifier: MIT
"""Vector and word operations of threads in stock TileLang: ramps, wide loads, cp.async, ldmatrix, reductions."""

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import assert_same, blank, values
from tilescale.errors import NoDataError, OutOfBoundsError, UsageError


def integers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


# -- vectors -----------------------------------------------------------------------------------------------------------


def test_slices_are_copied_and_computed_with_lane_by_lane():
    @T.prim_func
    def program(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32"), Z: T.Tensor((64,), "float16")):
        with T.Kernel(1, threads=16):
            t = T.get_thread_binding()
            four = T.alloc_local((4,), "float32")
            four[0:4] = X[t * 4 : t * 4 + 4]
            Y[T.Ramp(t * 4, 1, 4)] = four[T.Ramp(0, 1, 4)] * T.Broadcast(T.float32(2), 4)
            Z[T.Ramp(t * 4, 1, 4)] = T.Cast("float16x4", four[T.Ramp(3, -1, 4)])

    args = [values(1, 64), blank(64), blank(64, dtype="float16")]
    tilescale.emulate(program, args)
    assert_same(args[1], args[0] * 2)
    assert_same(args[2], args[0].reshape(16, 4).flip(1).reshape(-1).half())


def test_a_vector_is_read_whole_before_it_is_written():
    @T.prim_func
    def program(X: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=1):
            X[T.Ramp(1, 1, 4)] = X[T.Ramp(0, 1, 4)]

    x = integers(8)
    tilescale.emulate(program, [x])
    assert x.tolist() == [0, 0, 1, 2, 3, 5, 6, 7]


def test_a_vector_beyond_a_tile_is_an_error():
    @T.prim_func
    def program(X: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=1):
            tile = T.alloc_shared((6,), "int32")
            tile[T.Ramp(4, 1, 4)] = X[T.Ramp(0, 1, 4)]
            X[0] = tile[4]

    with pytest.raises(OutOfBoundsError, match="tile"):
        tilescale.emulate(program, [integers(8)])


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_words_go_through_registers_under_a_predicate(width, dtype):
    """Loads return zero where their predicate is false, stores leave memory unchanged."""
    count, threads = width // 8 // getattr(torch, dtype).itemsize, 8
    load, store = getattr(T, f"ldg{width}"), getattr(T, f"stg{width}")

    @T.prim_func
    def program(
        X: T.Tensor((threads, count), dtype), Y: T.Tensor((threads, count), dtype), Z: T.Tensor((threads, count), dtype)
    ):
        with T.Kernel(1, threads=threads):
            t = T.get_thread_binding()
            store(Y[t, 0:count], load(X[t, 0:count], pred=t < 5))
            store(Z[t, 0:count], load(X[t, 0:count]), pred=t >= 2)

    x = values(1, threads, count).mul(50).to(getattr(torch, dtype))
    args = [x, torch.ones_like(x), torch.ones_like(x)]
    tilescale.emulate(program, args)
    assert_same(args[1][:5], x[:5])
    assert not args[1][5:].any()
    assert_same(args[2][2:], x[2:])
    assert (args[2][:2] == 1).all()
    assert tilescale.emulate(program, data=False).time_us > 0


def test_words_are_held_in_variables_and_seen_as_other_types():
    @T.prim_func
    def program(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32")):
        with T.Kernel(1, threads=16):
            t = T.get_thread_binding()
            tile = T.alloc_shared((64,), "float32")
            held = T.alloc_local((2,), "uint32x4")
            held[1] = T.ldg128(X[t * 4 : t * 4 + 4])
            T.sts128(tile[t * 4], held[1])
            T.sync_threads()
            words = T.lds128(tile[(15 - t) * 4])
            Y[T.Ramp(t * 4, 1, 4)] = T.reinterpret(words, "float32x4")

    args = [values(1, 64), blank(64)]
    tilescale.emulate(program, args)
    assert_same(args[1], args[0].reshape(16, 4).flip(0).reshape(-1))
    with pytest.raises(NoDataError, match="what happens next depends on the values of 'seen'"):
        tilescale.emulate(branching(), data=False)


def branching():
    """The next action of a thread depends on a word."""

    @T.prim_func
    def program(X: T.Tensor((64,), "int32")):
        with T.Kernel(1, threads=16):
            t = T.get_thread_binding()
            seen = T.alloc_local((4,), "int32")
            seen[0:4] = X[t * 4 : t * 4 + 4]
            for _ in T.serial(seen[1]):
                T.stg32(X[t], T.uint32(1))

    return program


def test_a_copy_by_threads_fills_with_zeros_where_its_predicate_fails():
    @T.prim_func
    def program(X: T.Tensor((16, 8), "float16"), Y: T.Tensor((16, 8), "float16")):
        with T.Kernel(1, threads=16):
            t = T.get_thread_binding()
            tile = T.alloc_shared((16, 8), "float16")
            T.ptx_cp_async(
                T.access_ptr(tile[t, 0], "w", 8), T.access_ptr(X[t, 0], "r", 8), 8, predicate=t % 2 == 0
            )
            T.ptx_commit_group()
            T.ptx_wait_group(0)
            T.sync_threads()
            for i in T.serial(8):
                Y[t, i] = tile[15 - t, i]

    assert tilescale.emulate(program, data=False).utilization["l2"] > 0
    args = [values(1, 16, 8, dtype="float16"), blank(16, 8, dtype="float16")]
    tilescale.emulate(program, args)
    expected = args[0].clone()
    expected[1::2] = 0
    assert_same(args[1], expected.flip(0))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_matrices_are_spread_over_the_threads_of_a_warp(count, transpose):
    """Thread t gets elements 2 (t % 4) and the next of row t // 4 of each matrix (PTX ISA, ldmatrix)."""

    @T.prim_func
    def program(X: T.Tensor((64, 8), "float16"), Y: T.Tensor((64, 2 * count), "float16")):
        with T.Kernel(1, threads=64):
            t = T.get_thread_binding()
            tile = T.alloc_shared((64, 8), "float16")
            mine = T.alloc_local((2 * count,), "float16")
            T.copy(X, tile)
            T.ptx_ldmatrix(
                transpose, count, T.access_ptr(tile[t, 0], "r", 8), T.access_ptr(mine[0], "w", 2 * count)
            )
            for i in T.serial(2 * count):
                Y[t, i] = mine[i]

    assert tilescale.emulate(program, data=False).utilization["l1"] > 0
    args = [values(1, 64, 8, dtype="float16"), blank(64, 2 * count, dtype="float16")]
    tilescale.emulate(program, args)
    for thread in range(64):
        for matrix in range(count):
            first = thread // 32 * 32 + matrix * 8
            rows = args[0][first : first + 8]
            rows = rows.T if transpose else rows
            column = thread % 4 * 2
            expected = rows[thread % 32 // 4, column : column + 2]
            assert_same(args[1][thread, 2 * matrix : 2 * matrix + 2], expected)


# -- between threads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (4, 32), (8, 8)])
def test_threads_of_a_row_sum_up(rows, columns):
    """Like the matrix-vector products of stock TileLang: each row of threads has its sum, on all of its threads."""

    @T.prim_func
    def program(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((rows, columns), "float32")):
        with T.Kernel(1, threads=(columns, rows)):
            tx = T.get_thread_binding(0)
            ty = T.get_thread_binding(1)
            mine = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            mine[0] = X[ty, tx]
            with T.attr(
                T.comm_reducer(lambda x, y: x + y, [T.Cast("float32", 0)]),
                "reduce_scope",
                T.reinterpret(T.uint64(0), dtype="handle"),
            ):
                T.evaluate(
                    T.tvm_thread_allreduce(T.uint32(1), mine[0], tx != 1, total[0], tx, dtype="handle")
                )
            Y[ty, tx] = total[0]

    args = [values(1, rows, columns), blank(rows, columns)]
    tilescale.emulate(program, args)
    left_out = args[0].clone()
    left_out[:, 1] = 0
    torch.testing.assert_close(args[1], left_out.sum(1, keepdim=True).expand(rows, columns))


def test_a_reduction_without_combination_says_what_to_write():
    @T.prim_func
    def program(Y: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            total = T.alloc_local((1,), "float32")
            T.evaluate(T.tvm_thread_allreduce(T.uint32(1), Y[t], True, total[0], t, dtype="handle"))
            Y[t] = total[0]

    with pytest.raises(UsageError, match="comm_reducer"):
        tilescale.emulate(program, [values(1, 32)])


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_a_thread_reduces_elements_of_its_own(op: str):
    @T.prim_func
    def program(X: T.Tensor((32, 8), "float32"), Y: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=32):
            t = T.get_thread_binding()
            mine, total = T.alloc_local((8,), "float32"), T.alloc_local((1,), "float32")
            for i in T.serial(8):
                mine[i] = X[t, i]
            T.reduce(mine, total, op, dim=0, clear=True)
            Y[t] = total[0]

    args = [values(1, 32, 8), blank(32)]
    tilescale.emulate(program, args)
    torch.testing.assert_close(args[1], {"sum": args[0].sum(1), "max": args[0].amax(1), "min": args[0].amin(1)}[op])


# -- reducers of the first kind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("replication", [{"replication": "all"}, {"replication": "none"}, {}], ids=str)
def test_a_fragment_as_a_reducer_takes_what_all_iterations_add(op, replication):
    begin = {"sum": 0.0, "max": -1e30, "min": 1e30}[op]

    @T.prim_func
    def program(X: T.Tensor((16, 24), "float32"), Y: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=32):
            result = T.alloc_reducer((16,), "float32", op=op, **replication)
            T.fill(result, begin)
            for step in T.serial(3):
                for i, j in T.Parallel(16, 8):
                    if op == "sum":
                        result[i] += X[i, step * 8 + j]
                    elif op == "max":
                        result[i] = T.max(result[i], X[i, step * 8 + j])
                    else:
                        result[i] = T.min(X[i, step * 8 + j], result[i])
            T.finalize_reducer(result)
            T.copy(result, Y)

    args = [values(1, 16, 24), blank(16)]
    tilescale.emulate(program, args)
    expected = {"sum": args[0].sum(1), "max": args[0].amax(1), "min": args[0].amin(1)}[op]
    torch.testing.assert_close(args[1], expected)


# -- rows anywhere -----------------------------------------------------------------------------------------------------


def test_four_rows_are_gathered_and_scattered():
    rows = (7, 2, 2, 11)

    @T.prim_func
    def program(X: T.Tensor((12, 16), "float16"), Y: T.Tensor((12, 16), "float16")):
        with T.Kernel(1, threads=128):
            tile = T.alloc_shared((4, 8), "float16")
            full = T.alloc_barrier(1)
            if T.shuffle_elect(128):
                T.mbarrier_expect_tx(full, T.tma_gather4_bytes(8, "float16"))
                T.tma_gather4(X, tile, 4, rows, barrier=full)
                T.barrier_arrive(full)
            T.mbarrier_wait_parity(full, 0)
            if T.shuffle_elect(128):
                T.tma_scatter4(tile, Y, 8, (0, 3, 5, 9))
                T.tma_store_arrive()
                T.tma_store_wait(0)

    args = [values(1, 12, 16, dtype="float16"), torch.zeros(12, 16).half()]
    tilescale.emulate(program, args, machine="b200-sxm-8")
    expected = torch.zeros(12, 16).half()
    expected[[0, 3, 5, 9], 8:] = args[0][list(rows), 4:12]
    assert_same(args[1], expected)


def test_threads_are_bound_along_two_axes():
    """Inside a launch, as TileLang's matrix-vector products bind them."""

    @T.prim_func
    def program(Y: T.Tensor((4, 32), "int32")):
        with T.Kernel(1, threads=(32, 4)):
            x = T.thread_binding(0, 32, thread="threadIdx.x")
            y = T.thread_binding(0, 4, thread="threadIdx.y")
            mine = T.alloc_local((1,), "int32")
            mine[0] = 100 * y + x
            Y[y, x] = mine[0]

    Y = blank(4, 32, dtype="int32")
    tilescale.emulate(program, [Y])
    assert Y.tolist() == [[100 * y + x for x in range(32)] for y in range(4)]
