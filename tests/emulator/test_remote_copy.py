# SPDX-License-Identifier: MIT
"""Copies to and from peers, signals and waits between devices."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.chain import chain
from tests.emulator.support import DTYPES, WORLDS, assert_same, blank, values
from tilescale.errors import OutOfBoundsError


def flags(n=1):
    return torch.zeros(n, dtype=torch.int32)


# -- whole tensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_put_and_get_of_whole_tensors(world):
    """Every device writes its right neighbour's Y and reads its left neighbour's X: both are the left one's."""

    @T.prim_func
    def program(X: T.Tensor((3, 5), "float32"), Y: T.Tensor((3, 5), "float32"), Z: T.Tensor((3, 5), "float32")):
        with T.Kernel(device=world, threads=32):
            with T.Scale("device") as (rank, size):
                T.copy(X, Y, dst=(rank + 1) % size)
                T.copy(X, Z, src=(rank + size - 1) % size)
                T.barrier()

    args = [[values(r, 3, 5), blank(3, 5), blank(3, 5)] for r in range(world)]
    report = tilescale.emulate(program, args)
    for rank, (_, put, got) in enumerate(args):
        assert_same(put, args[rank - 1][0])
        assert_same(got, args[rank - 1][0])
    crossed = 0 if world == 1 else 2 * 60  # its own copies, and those that its neighbours make
    assert [(a.sent, a.received) for a in report.activity] == [(crossed, crossed)] * world


@pytest.mark.parametrize("dtype", DTYPES)
def test_put_of_a_slice_of_every_type(dtype):
    @T.prim_func
    def program(X: T.Tensor((4, 6), dtype), Y: T.Tensor((4, 6), dtype)):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device") as (rank, _):
                T.copy(X[1:3, 2:6], Y[2:4, 0:4], dst=1 - rank)

    args = [[values(r, 4, 6, dtype=dtype), blank(4, 6, dtype=dtype)] for r in range(2)]
    tilescale.emulate(program, args)
    for rank, (_, y) in enumerate(args):
        expected = blank(4, 6, dtype=dtype)
        expected[2:4, 0:4] = args[1 - rank][0][1:3, 2:6]
        assert_same(y, expected)


# -- tiles of programs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["l0", "l1"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_put_with_signal_then_read(dtype, layer):
    """Send tiles round the ring with a signal each; a unit that waits for it reads the arrived tile."""
    world, blocks = 3, 4

    @T.prim_func
    def program(
        X: T.Tensor((blocks * 4, 8), dtype),
        Y: T.Tensor((blocks * 4, 8), dtype),
        Z: T.Tensor((blocks * 4, 8), dtype),
        F: T.Tensor((blocks,), "int32"),
    ):
        with T.Kernel(device=world, block=blocks, threads=32) as b:
            with T.Scale("block"):
                tile = T.alloc((4, 8), dtype, level=layer)
                T.copy(X[b * 4, 0], tile)
                with T.Scale("device") as (rank, size):
                    T.copy(tile, Y[b * 4, 0], dst=(rank + 1) % size, signal=F[b])
                    T.wait(F[b], ">=", 1)
                T.copy(Y[b * 4, 0], tile)
                T.copy(tile, Z[b * 4, 0])

    shape = (blocks * 4, 8)
    args = [[values(r, *shape, dtype=dtype), blank(*shape, dtype=dtype), blank(*shape, dtype=dtype), flags(blocks)]
            for r in range(world)]  # fmt: skip
    report = tilescale.emulate(program, args)
    for rank, (_, _, z, f) in enumerate(args):
        assert_same(z, args[rank - 1][0])
        assert f.tolist() == [1] * blocks
    assert [a.signals for a in report.activity] == [blocks] * world


@pytest.mark.parametrize("world", [2, 5, 8])
def test_every_program_reads_from_every_peer(world):
    @T.prim_func
    def program(X: T.Tensor((6, 4), "int32"), Y: T.Tensor((6, 4), "int32")):
        with T.Kernel(device=world, block=3, threads=32) as b:
            with T.Scale("block"):
                part = T.alloc((2, 4), "int32", level="l0")
                total = T.alloc((2, 4), "int32", level="l0")
                T.clear(total)
                with T.Scale("device") as (rank, size):
                    for step in T.serial(size):
                        T.copy(X[b * 2, 0], part, src=(rank + step) % size)
                        for i, j in T.Parallel(2, 4):
                            total[i, j] = total[i, j] * 3 + part[i, j]
                T.copy(total, Y[b * 2, 0])

    args = [[values(r, 6, 4, dtype="int32"), blank(6, 4, dtype="int32")] for r in range(world)]
    tilescale.emulate(program, args)
    for rank, (_, y) in enumerate(args):
        expected = torch.zeros(6, 4, dtype=torch.int32)
        for step in range(world):
            expected = expected * 3 + args[(rank + step) % world][0]
        assert_same(y, expected)


def test_tail_tiles_are_clipped_at_the_peer():
    """37 rows in tiles of 16: the last put writes 5 rows of the peer and none beyond."""

    @T.prim_func
    def program(X: T.Tensor((37, 8), "float32"), Y: T.Tensor((37, 8), "float32"), Z: T.Tensor((37, 8), "float32")):
        with T.Kernel(device=2, block=T.ceildiv(37, 16), threads=32) as b:
            with T.Scale("block"):
                tile = T.alloc((16, 8), "float32")
                T.copy(X[b * 16, 0], tile)
                with T.Scale("device") as (rank, _):
                    T.copy(tile, Y[b * 16, 0], dst=1 - rank)
                    T.copy(X[b * 16, 0], tile, src=1 - rank)
                T.copy(tile, Z[b * 16, 0])

    args = [[values(r, 37, 8), blank(37, 8), blank(37, 8)] for r in range(2)]
    tilescale.emulate(program, args)
    for rank, (_, put, got) in enumerate(args):
        assert_same(put, args[1 - rank][0])
        assert_same(got, args[1 - rank][0])


# -- signals and waits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compare", "value", "seen"),
    [("==", 3, 3), ("!=", 0, 1), (">=", 3, 3), (">", 3, 4), ("<=", -2, -2), ("<", -2, -3)],
)
def test_a_wait_opens_at_the_first_value_that_compares(compare, value, seen):
    """Device 0 counts up or down one by one and waits for the answer: the waiter sees exactly the first right value."""
    step, rounds = (1, 4) if seen > 0 else (-1, 4)

    @T.prim_func
    def program(F: T.Tensor((2,), "int32"), S: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device") as (rank, _):
                if rank == 0:
                    for i in T.serial(rounds):
                        T.signal(F[0], step, dst=1)
                        T.wait(F[1], ">=", i + 1)
                else:
                    for i in T.serial(rounds):
                        if i == abs(seen) - 1:
                            T.wait(F[0], compare, value)
                            S[0] = F[0]
                        T.wait(F[0], "==", (i + 1) * step)
                        T.signal(F[1], dst=0)

    args = [[flags(2), torch.full((1,), 99, dtype=torch.int32)] for _ in range(2)]
    tilescale.emulate(program, args)
    assert args[1][1].item() == seen


def test_set_overwrites_and_add_accumulates():
    @T.prim_func
    def program(F: T.Tensor((4,), "int32")):
        with T.Kernel(device=3, threads=32):
            with T.Scale("device") as (rank, _):
                T.signal(F[0], 5, dst=0)
                T.signal(F[1], rank + 7, op="set", dst=rank)
                T.signal(F[2], -2)
                T.barrier()
                T.signal(F[3], F[0], op="set")

    args = [[flags(4)] for _ in range(3)]
    tilescale.emulate(program, args)
    assert [a[0].tolist() for a in args] == [[15, 7, -2, 15], [0, 8, -2, 0], [0, 9, -2, 0]]


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32"])
def test_flags_of_every_integer_type(dtype):
    @T.prim_func
    def program(F: T.Tensor((2, 2), dtype)):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device") as (rank, _):
                T.signal(F[rank, 1], 2, dst=1 - rank)
                T.wait(F[1 - rank, 1], "==", 2)

    args = [[torch.zeros(2, 2, dtype=getattr(torch, dtype))] for _ in range(2)]
    tilescale.emulate(program, args)
    for rank, (f,) in enumerate(args):
        expected = torch.zeros(2, 2, dtype=torch.int64)
        expected[1 - rank, 1] = 2
        assert_same(f.to(torch.int64), expected)


def test_put_with_signal_of_a_value_and_set():
    @T.prim_func
    def program(X: T.Tensor((4,), "float32"), Y: T.Tensor((4,), "float32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device") as (rank, _):
                T.copy(X, Y, dst=1 - rank, signal=F[0], value=41, op="set")
                T.wait(F[0], "==", 41)

    args = [[values(r, 4), blank(4), torch.full((1,), -9, dtype=torch.int32)] for r in range(2)]
    tilescale.emulate(program, args)
    assert_same(args[0][1], args[1][0])
    assert_same(args[1][1], args[0][0])


@pytest.mark.parametrize("rounds", [1, 5])
def test_ping_pong(rounds):
    """A value goes back and forth and grows by one at each end; only right order gives the right number."""

    @T.prim_func
    def program(X: T.Tensor((1,), "int32"), F: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, threads=32):
            with T.Scale("device") as (rank, _):
                for i in T.serial(rounds):
                    if rank == 0:
                        X[0] = X[0] + 1
                        T.copy(X, X, dst=1, signal=F[0])
                        T.wait(F[0], ">=", i + 1)
                    else:
                        T.wait(F[0], ">=", i + 1)
                        X[0] = X[0] * 2
                        T.copy(X, X, dst=0, signal=F[0])

    args = [[flags(), flags()] for _ in range(2)]
    tilescale.emulate(program, args)
    expected = 0
    for _ in range(rounds):
        expected = (expected + 1) * 2
    assert args[0][0].item() == expected


def test_all_gather_by_hand_with_one_flag_for_each_source():
    world, blocks, rows = 4, 2, 4

    @T.prim_func
    def program(
        X: T.Tensor((blocks * rows, 8), "float16"),
        Y: T.Tensor((world, blocks * rows, 8), "float16"),
        F: T.Tensor((world, blocks), "int32"),
        S: T.Tensor((blocks, rows, 8), "float32"),
    ):
        with T.Kernel(device=world, block=blocks, threads=64) as b:
            with T.Scale("block"):
                tile = T.alloc((rows, 8), "float16")
                total = T.alloc((rows, 8), "float32", level="l0")
                T.copy(X[b * rows, 0], tile)
                T.clear(total)
                with T.Scale("device") as (rank, size):
                    for step in T.serial(size):
                        T.copy(tile, Y[rank, b * rows, 0], dst=(rank + step) % size, signal=F[rank, b])
                    for source in T.serial(size):
                        T.wait(F[source, b], ">=", 1)
                        for i, j in T.Parallel(rows, 8):
                            total[i, j] += Y[source, b * rows + i, j]
                T.copy(total, S[b, 0, 0])

    sources = [values(r, blocks * rows, 8, dtype="float16") for r in range(world)]
    args = [[x.clone(), blank(world, *x.shape, dtype="float16"), torch.zeros(world, blocks, dtype=torch.int32),
             blank(blocks, rows, 8)] for x in sources]  # fmt: skip
    tilescale.emulate(program, args)
    total = sum(x.double() for x in sources).reshape(blocks, rows, 8)
    for _, gathered, _, summed in args:
        assert_same(gathered, torch.stack(sources))
        torch.testing.assert_close(summed.double(), total, rtol=1e-6, atol=1e-6)


# -- a peer spins instead of waiting -----------------------------------------------------------------------------------


def test_a_loop_that_polls_with_an_atomic_sees_the_signal():
    @T.prim_func
    def program(F: T.Tensor((1,), "int32"), D: T.Tensor((1,), "int32")):
        with T.Kernel(device=2, threads=32):
            with T.Scale("block"):
                with T.Scale("device") as (rank, _):
                    if rank == 1:
                        seen = T.alloc_var("int32")
                        seen = 0
                        while seen == 0:
                            seen = T.atomic_add(F[0], 0, return_prev=True)
                        D[0] = seen
                    else:
                        T.signal(F[0], 3, dst=1)

    args = [[flags(), flags()] for _ in range(2)]
    tilescale.emulate(program, args)
    assert args[1][1].item() == 3


def test_a_polling_loop_that_counts_its_looks_lets_others_run():
    @T.prim_func
    def program(F: T.Tensor((1,), "int32"), D: T.Tensor((1,), "int32")):
        with T.Kernel(2, threads=32) as b:
            if b == 0:
                while F[0] == 0:
                    D[0] += 1
            else:
                F[0] = 1

    args = [flags(), flags()]
    tilescale.emulate(program, args, check="none")  # plain accesses: they do race
    assert args[0].item() == 1 and args[1].item() >= 1


def test_a_bounded_polling_loop_lets_others_run():
    @T.prim_func
    def program(F: T.Tensor((1,), "int32"), D: T.Tensor((1,), "int32")):
        with T.Kernel(2, threads=32) as b:
            if b == 0:
                for i in T.serial(1000):
                    if F[0] == 1:
                        D[0] = i
                        T.loop_break()
            else:
                F[0] = 1

    args = [flags(), flags()]
    tilescale.emulate(program, args, check="none")  # plain accesses: they do race
    assert 1 <= args[1].item() < 1000


@pytest.mark.varies
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("bounded", [False, True])
def test_a_polling_loop_lets_those_run_who_have_waited(bounded, seed):
    """Device 0 waits for device 1 before it signals; meanwhile device 1 spins, and writes in between."""

    @T.prim_func
    def program(F: T.Tensor((1,), "int32"), G: T.Tensor((1,), "int32"), D: T.Tensor((2,), "int32")):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                if rank == 0:
                    T.wait(G[0], ">=", 1)
                    T.signal(F[0], dst=1)
                else:
                    T.signal(G[0], dst=0)
                    if bounded:
                        for _ in T.serial(1000):
                            D[0] += 1
                            if T.atomic_load(F[0], memory_order="acquire") == 1:
                                T.loop_break()
                    else:
                        while T.atomic_load(F[0], memory_order="acquire") == 0:
                            D[0] += 1
                    D[1] = 1

    args = [[flags(), flags(), flags(2)] for _ in range(2)]
    tilescale.emulate(program, args, schedule_seed=seed)
    assert args[1][2][1] == 1 and args[1][2][0] < 100


# -- beyond the end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [8, -4, 40])
def test_a_copy_wholly_outside_the_peers_tensor(begin):
    @T.prim_func
    def program(X: T.Tensor((8,), "float32"), n: T.int32):
        with T.Kernel(device=2, block=1, threads=32):
            with T.Scale("block"), T.Scale("device") as (rank, _):
                tile = T.alloc((4,), "float32")
                T.fill(tile, 1)
                T.copy(tile, X[n], dst=1 - rank)

    with pytest.raises(OutOfBoundsError) as error:
        tilescale.emulate(program, [[values(r, 8), begin] for r in range(2)])
    assert f"X[{begin}] is outside" in error.value.message and "this one begins beyond it" in error.value.hint


def test_a_flag_outside_its_tensor():
    @T.prim_func
    def program(F: T.Tensor((2,), "int32")):
        with T.Kernel(device=1, block=3, threads=32) as b:
            T.signal(F[b])

    with pytest.raises(OutOfBoundsError) as error:
        tilescale.emulate(program, [flags(2)])
    assert "F[2] is outside" in error.value.message and "as there are units that use one" in error.value.hint


@pytest.mark.parametrize("world", WORLDS)
def test_a_chain_of_products(world):
    """Each device loads from another tensor than the first one, and sends to another one than the last."""
    batches, rows, width = 3, 64, 128
    X = values(0, batches, rows, width, dtype="float16")
    weights = [values(1 + r, width, width, dtype="float16") / 12 for r in range(world)]
    args = [[X if r == 0 else torch.zeros_like(X), w, torch.zeros_like(X)] for r, w in enumerate(weights)]
    tilescale.emulate(chain(world, batches, rows, width), args)
    expected = X
    for w in weights:
        expected = (expected.float() @ w.float()).half()
    torch.testing.assert_close(args[-1][2], expected, rtol=2e-2, atol=1e-2)
