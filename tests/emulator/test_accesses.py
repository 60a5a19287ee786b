# SPDX-License-Identifier: MIT
"""Values and accesses: masks, private values, bounds, atomics, poison, prints: what plain kernels rarely combine."""

import warnings

import pytest
import tilelang.transform
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import assert_same, blank, values
from tilescale.errors import OutOfBoundsError, UninitializedReadError, UnsupportedError, UsageError


def ints(*shape, fill=-7):
    return torch.full(shape, fill, dtype=torch.int32)


def test_conditional_expressions_read_only_what_they_take():
    """An index outside the tile in the branch that is not taken is not an access, for a vector or a scalar index."""

    @T.prim_func
    def program(Y: T.Tensor((8,), "int32"), Z: T.Tensor((8,), "int32"), far: T.int32):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((4,), "int32")
            for i in T.Parallel(4):
                tile[i] = i + 1
            for i in T.Parallel(8):
                Y[i] = T.if_then_else(i < 4, tile[i], 0)
                Z[i] = T.if_then_else(i < 0, tile[far], i)

    args = [ints(8), ints(8), 99]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert args[1].tolist() == list(range(8))


def test_private_values_that_differ_are_not_read_where_others_run():
    """The compiler distributes 32 iterations over threads, so the value that each sees is unspecified."""

    @T.prim_func
    def program(Y: T.Tensor((32,), "int32"), same: T.int32):
        with T.Kernel(1, threads=64):
            tx = T.get_thread_binding()
            mine = T.alloc_local((2,), "int32")
            mine[0] = T.if_then_else(same == 1, 5, tx)
            mine[1] = tx
            for i in T.Parallel(32):
                Y[i] = mine[0]

    args = [ints(32), 1]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [5] * 32
    with pytest.raises(UnsupportedError, match="thread-private value was written for 64"):
        tilescale.emulate(program, [ints(32), 0])


def test_private_values_that_differ_are_no_tile():
    @T.prim_func
    def add(X: T.Tensor((2,), "float32"), Y: T.Tensor((2,), "float32")):
        with T.Kernel(1, threads=32):
            mine = T.alloc_local((2,), "float32")
            T.copy(X, mine)
            mine[1] = mine[1] + T.get_thread_binding()
            T.atomic_add(Y, mine)

    with pytest.raises(UsageError, match="'mine' as a whole tile differs between threads"):
        tilescale.emulate(add, [torch.ones(2), torch.zeros(2)])


def test_private_tiles_are_written_before_they_are_read():
    @T.prim_func
    def add(X: T.Tensor((2,), "float32"), Y: T.Tensor((2,), "float32")):
        with T.Kernel(1, threads=32):
            mine = T.alloc_local((2,), "float32")
            T.copy(X[0:1], mine[1:2])
            T.atomic_add(Y, mine)

    with pytest.raises(UninitializedReadError, match=r"reads mine\[0\]"):
        tilescale.emulate(add, [torch.ones(2), torch.zeros(2)])


def test_short_circuit_conditions_guard_accesses():
    @T.prim_func
    def program(Y: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=8):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((4,), "int32")
            T.fill(tile, 3)
            if tx < 4 and tile[tx] == 3:
                Y[tx] = 1
            if tx >= 4 or tile[tx] == 9:
                Y[tx] = 2

    args = [ints(8)]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [1] * 4 + [2] * 4


def test_loads_and_stores_outside_a_tensor_are_guarded():
    @T.prim_func
    def program(X: T.Tensor((5,), "int32"), Y: T.Tensor((5,), "int32"), S: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            total = T.alloc_shared((1,), "int32")
            total[0] = 0
            for i in T.Parallel(8):
                T.atomic_add(total[0], X[i - 1])
                Y[i - 2] = X[i - 1] + 10
            S[0] = total[0]

    x = values(3, 5, dtype="int32")
    args = [x, ints(5), ints(1)]
    tilescale.emulate(program, args)
    padded = [0, *x.tolist(), 0, 0]
    assert args[1].tolist() == [padded[i + 2] + 10 for i in range(5)]
    assert args[2].item() == int(x.sum())


@T.macro
def stores(X, Y, i):
    X[70] = 1


@T.macro
def loads(X, Y, i):
    X[0] = X[-100]


@T.macro
def loads_for_all(X, Y, i):
    X[i] = X[64]


@T.macro
def updates(X, Y, i):
    T.atomic_add(X[70], 1)


@T.macro
def loads_a_row(X, Y, i):
    X[i] = Y[4, i]


@pytest.mark.parametrize("access", [stores, loads, loads_for_all, updates, loads_a_row], ids=lambda macro: macro.name)
def test_a_number_outside_a_tensor_is_an_error(access):
    @T.prim_func
    def program(X: T.Tensor((64,), "int32"), Y: T.Tensor((4, 64), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(32):
                access(X, Y, i)

    with pytest.raises(OutOfBoundsError, match="is outside the buffer") as caught:
        tilescale.emulate(program, [ints(64), ints(4, 64)])
    assert "does not guard an index that is a number" in caught.value.hint and "device 0" in str(caught.value)


def test_negative_indices_count_from_the_end():
    @T.prim_func
    def program(X: T.Tensor((8,), "int32"), Y: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                Y[i] = X[-1 - i]
            Y[-1] = X[-8]

    args = [values(1, 8, dtype="int32"), ints(8)]
    tilescale.emulate(program, args)
    assert args[1].tolist() == [*args[0].flip(0)[:4].tolist(), -7, -7, -7, args[0][0]]


def test_no_index_is_proved_negative_that_plainly_is_not(monkeypatch: pytest.MonkeyPatch):
    """TileLang tries to prove it of every index of such a program, which took seconds of one of many conditions."""

    @T.prim_func
    def program(X: T.Tensor((8,), "int32"), Y: T.Tensor((8,), "int32"), n: T.int32):
        with T.Kernel(1, threads=32):
            last = (n + 4 - 1) // 4
            for i in T.Parallel(4):
                Y[i] = X[T.if_then_else(i < n, i, 0) + T.Select(last < 2, 0, last)]

    monkeypatch.setattr(tilelang.transform, "LegalizeNegativeIndex", lambda: pytest.fail("asked for"))
    args = [values(1, 8, dtype="int32"), ints(8), 3]
    tilescale.emulate(program, args)
    assert args[1][:4].tolist() == args[0][[0, 1, 2, 0]].tolist()


def test_no_index_up_to_an_extent_or_data_is_proved_negative(monkeypatch: pytest.MonkeyPatch):
    """Rows of a GEMM's tile, keys of a sequence: to ask of such indices took longer than the rest of the analysis."""
    rows = T.dynamic("rows")

    @T.prim_func
    def program(X: T.Tensor((rows,), "int32"), Y: T.Tensor((8,), "int32"), counts: T.Tensor((1,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                Y[i] = X[T.min(T.truncdiv(i, 2), rows - 1)] + X[T.min(i, counts[0] - 1)]

    monkeypatch.setattr(tilelang.transform, "LegalizeNegativeIndex", lambda: pytest.fail("asked for"))
    args = [values(1, 3, dtype="int32"), ints(8), torch.tensor([2], dtype=torch.int32)]
    tilescale.emulate(program, args)
    assert args[1].tolist() == (args[0][[0, 0, 1, 1, 2, 2, 2, 2]] + args[0][[0, 1, 1, 1, 1, 1, 1, 1]]).tolist()


def test_what_is_guarded_and_misses_is_told():
    @T.prim_func
    def program(X: T.Tensor((8,), "int32"), at: T.int32):
        with T.Kernel(1, threads=32):
            X[at] = 1
            for i in T.Parallel(4):
                X[i + at] = X[i + at] + 1

    def missed(at):
        return dict(tilescale.emulate(program, [ints(8), at]).missed)

    assert missed(4) == missed(7) == {}
    assert [(name, count) for (name, _), count in missed(9).items()] == [("X", 1), ("X", 2)]
    assert "no effect: access wholly out of bounds of X x2" in str(tilescale.emulate(program, [ints(8), 9]))


def test_a_safe_value_holds_from_where_it_is_noted():
    """After the block that notes it too, and in later launches of the same function: so does stock TileLang's text."""

    @T.prim_func
    def program(A: T.Tensor((4,), "int32"), Y: T.Tensor((4, 8), "int32"), first: T.int32):
        with T.Kernel(1, threads=32):
            T.annotate_safe_value({A: -1})
            for i in T.Parallel(8):
                Y[0, i] = A[first + i]
            with T.sblock():
                T.annotate_safe_value({A: -99})
                for i in T.Parallel(8):
                    Y[1, i] = A[first + i]
            for i in T.Parallel(8):
                Y[2, i] = A[first + i]
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                Y[3, i] = A[first + i]

    args = [torch.arange(4, dtype=torch.int32), ints(4, 8), 2]
    tilescale.emulate(program, args)
    assert args[1].tolist() == [[2, 3] + [outside] * 6 for outside in (-1, -99, -99, -99)]


def test_a_copy_has_the_safe_value_of_the_block_around_it():
    """As in stock TileLang's text, where it holds for copies block by block."""

    @T.prim_func
    def program(A: T.Tensor((4,), "int32"), Y: T.Tensor((5, 8), "int32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((8,), "int32")
            T.annotate_safe_value({A: -1})
            T.copy(A[0:8], tile)
            T.copy(tile, Y[0, 0:8])
            with T.sblock():
                T.annotate_safe_value({A: -99})
                T.copy(A[0:8], tile)
                T.copy(tile, Y[1, 0:8])
                with T.sblock():
                    T.annotate_safe_value({Y: 7})
                    T.copy(A[0:8], tile)
                    T.copy(tile, Y[2, 0:8])
            T.copy(A[0:8], tile)
            T.copy(tile, Y[3, 0:8])
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((8,), "int32")
            T.copy(A[0:8], tile)
            T.copy(tile, Y[4, 0:8])

    args = [torch.arange(4, dtype=torch.int32), ints(5, 8)]
    tilescale.emulate(program, args)
    assert args[1].tolist() == [[0, 1, 2, 3] + [outside] * 4 for outside in (-1, -99, -99, -1, 0)]


def test_what_is_assumed_must_hold():
    @T.prim_func
    def program(X: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=8):
            tx = T.get_thread_binding()
            if tx < 4:
                T.assume(X[tx] > 0)
                X[tx] = X[tx] + 1

    tilescale.emulate(program, [torch.tensor([1, 1, 1, 1, 0, 0, 0, 0], dtype=torch.int32)])
    with pytest.raises(UsageError, match=r"device 0, block 0: .*T.assume\(.*> 0\)"):
        tilescale.emulate(program, [torch.tensor([1, 1, 1, 0, 0, 0, 0, 0], dtype=torch.int32)])


@pytest.mark.varies
def test_atomics_of_active_threads_only():
    @T.prim_func
    def program(S: T.Tensor((4,), "int32"), P: T.Tensor((64,), "int32")):
        with T.Kernel(2, threads=64) as b:
            tx = T.get_thread_binding()
            if tx % 3 == 0:
                T.atomic_add(S[0], tx)
                T.atomic_max(S[1], tx)
                if b == 0:
                    P[tx] = T.atomic_add(S[2], 1, return_prev=True)

    args = [torch.zeros(4, dtype=torch.int32), ints(64)]
    tilescale.emulate(program, args)
    chosen = [t for t in range(64) if t % 3 == 0]
    assert args[0].tolist() == [2 * sum(chosen), max(chosen), len(chosen), 0]
    assert sorted(args[1][chosen].tolist()) == list(range(len(chosen)))
    assert set(args[1][[t for t in range(64) if t % 3]].tolist()) == {-7}


def test_wide_atomics_over_the_end_of_a_tensor_are_guarded():
    @T.prim_func
    def program(X: T.Tensor((64,), "float16"), Y: T.Tensor((65,), "float16"), Z: T.Tensor((3,), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            T.atomic_addx2(Y[tx * 2 + 2], X[tx * 2])
            T.atomic_add(Z[tx - 30], 1)

    x = values(1, 64, dtype="float16")
    args = [x, torch.zeros(65, dtype=torch.float16), torch.zeros(3, dtype=torch.int32)]
    tilescale.emulate(program, args)
    assert_same(args[1], torch.cat([torch.zeros(2), x[:63]]))
    assert args[2].tolist() == [1, 1, 0]


def test_any_and_all_of_a_tile_and_of_private_values():
    @T.prim_func
    def program(X: T.Tensor((4, 8), "bool"), Y: T.Tensor((32, 4), "int32")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            tile = T.alloc_shared((4, 8), "bool")
            mine = T.alloc_local((2,), "bool")
            T.copy(X, tile)
            mine[0] = tx < 3
            mine[1] = tx < 5
            Y[tx, 0] = T.any_of(tile)
            Y[tx, 1] = T.all_of(tile[2, 4:8])
            Y[tx, 2] = T.any_of(mine)
            Y[tx, 3] = T.all_of(mine)

    x = torch.zeros(4, 8, dtype=torch.bool)
    x[2, 4:8] = True
    args = [x, ints(32, 4)]
    tilescale.emulate(program, args)
    assert args[1].tolist() == [[1, 1, t < 5, t < 3] for t in range(32)]


def test_print(capsys):
    @T.prim_func
    def program(X: T.Tensor((2,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"):
                with T.Scale("device") as (rank, _):
                    if rank == 1:
                        T.print(X[0], msg="first")
                        T.print(X)

    tilescale.emulate(program, [[torch.tensor([5 + r, 6], dtype=torch.int32)] for r in range(2)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "device 1, block 0: first 6"
    assert [line.split("X")[-1] for line in lines[1:]] == ["[0] = 6", "[1] = 6"]


def test_overlapping_shift_reads_before_it_writes():
    """As the threads of a warp do, which is a race by the memory model."""

    @T.prim_func
    def program(X: T.Tensor((9,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                X[i + 1] = X[i]

    args = [torch.arange(9, dtype=torch.int32)]
    tilescale.emulate(program, args, check="none")
    assert args[0].tolist() == [0, *range(8)]


def test_fresh_memory_holds_no_zeros():
    """Reads before the first write return poison, in every scope."""

    @T.prim_func
    def program(Y: T.Tensor((3,), "float32")):
        with T.Kernel(1, threads=32):
            a = T.alloc_shared((1,), "float32")
            b = T.alloc_fragment((1,), "float32")
            c = T.alloc_local((1,), "float32")
            Y[0] = a[0]
            Y[1] = b[0]
            Y[2] = c[0]

    args = [torch.zeros(3)]
    tilescale.emulate(program, args, check="none")
    assert args[0].isnan().all()


def test_division_by_zero_and_overflow_are_silent():
    @T.prim_func
    def program(X: T.Tensor((4,), "float32"), Y: T.Tensor((4,), "float16")):
        with T.Kernel(1, threads=32):
            tx = T.get_thread_binding()
            if tx < 4:
                Y[tx] = X[tx] / X[0] * 1e30

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args = [torch.tensor([0.0, 1.0, -1.0, 0.0]), blank(4, dtype="float16")]
        tilescale.emulate(program, args)
    assert_same(args[1], torch.tensor([float("nan"), float("inf"), -float("inf"), float("nan")]))


@pytest.mark.parametrize("extent", [0, 1, 5])
def test_dynamic_extents_down_to_none(extent):
    """A program of devices may launch an empty grid (TileLang itself rejects it, on a GPU)."""
    n = T.dynamic("n")

    @T.prim_func
    def program(X: T.Tensor((n,), "int32"), S: T.Tensor((1,), "int32"), count: T.int32):
        with T.Kernel(device=1, block=T.ceildiv(n, 2), threads=32) as b:
            for i in T.serial(count):
                T.atomic_add(S[0], X[b * 2 + i])

    x = torch.arange(1, extent + 1, dtype=torch.int32)
    args = [x, torch.zeros(1, dtype=torch.int32), 2]
    tilescale.emulate(program, args)
    assert args[1].item() == int(x.sum()) * 32  # every thread adds


def test_assignments_keep_the_value_of_their_time():
    @T.prim_func
    def program(X: T.Tensor((8,), "int32"), Y: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                old = X[i]
                X[i] = 0
                Y[i] = old

    args = [torch.arange(8, dtype=torch.int32), ints(8)]
    tilescale.emulate(program, args)
    assert args[0].tolist() == [0] * 8 and args[1].tolist() == list(range(8))


def test_indices_in_any_order_of_the_loops():
    """Transposed, with loops that an index does not depend on, and with numbers between."""

    @T.prim_func
    def program(X: T.Tensor((4, 3, 5), "int32"), Y: T.Tensor((5, 2, 4), "int32"), Z: T.Tensor((3, 2), "int32")):
        with T.Kernel(1, threads=32):
            for i, k, j in T.Parallel(4, 2, 5):
                Y[j, k, i] = X[i, 1, j] + 100 * Z[2, k]

    X, Z = torch.arange(60, dtype=torch.int32).reshape(4, 3, 5), torch.arange(6, dtype=torch.int32).reshape(3, 2)
    tilescale.emulate(program, [X, Y := ints(5, 2, 4), Z])
    assert torch.equal(Y, (X[:, 1].T[:, None] + 100 * Z[2][None, :, None]).int())
