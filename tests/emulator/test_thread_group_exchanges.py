# SPDX-License-Identifier: MIT
"""Exchanges below the program: tiles between warpgroups, warps and threads, collectives of every kind and type."""

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.emulator.support import DTYPES, OPS, assert_rounded, assert_same, blank, values, wide

LEVELS = {"warpgroup": (2, 128), "warp": (3, 32)}
"""Level -> how many units of it a program has, of how many threads."""


def ints(*shape):
    return torch.full(shape, -7, dtype=torch.int32)


# -- exchanges ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scope", ["l0", "l1"])
def test_tiles_that_units_own_go_round(level, scope):
    units, lanes = LEVELS[level]

    @T.prim_func
    def program(Y: T.Tensor((units, 4), "int32")):
        with T.Kernel(1, threads=units * lanes):
            with T.Scale(level) as (rank, size):
                mine = T.alloc((4,), "int32", level=scope)
                theirs = T.alloc((4,), "int32", level=scope)
                for i in T.Parallel(4):
                    mine[i] = rank * 10 + i
                T.copy(mine, theirs, dst=(rank + 1) % size)
                T.barrier()
                T.copy(theirs, Y[rank, 0])

    args = [ints(units, 4)]
    tilescale.emulate(program, args)
    for rank, row in enumerate(args[0].tolist()):
        assert row == [(rank - 1) % units * 10 + i for i in range(4)]


def test_halves_are_exchanged_through_views_and_gathered():
    """Each warpgroup computes half the columns, then both hold all: by copies to the peer, and by a gather."""
    rows, columns = 4, 8

    @T.prim_func
    def program(X: T.Tensor((rows, columns), "float32"), Y: T.Tensor((2, 2, rows, columns), "float32")):
        with T.Kernel(1, threads=256):
            scores = T.alloc_shared((rows, columns), "float32")
            with T.Scale("warpgroup") as (wg, wgs):
                half = T.view(scores, layout=T.FullCol)
                other = T.alloc((rows, columns // 2), "float32", level="l0")
                for i, j in T.Parallel(rows, columns // 2):
                    half[i, j] = X[i, wg * (columns // 2) + j] * 2
                T.copy(half, other, dst=(wg + 1) % wgs)
                T.all_gather(half)
                T.copy(other, Y[0, wg, 0:rows, 0:4])
                T.copy(scores, Y[1, wg, 0, 0])

    x = values(1, rows, columns)
    args = [x, blank(2, 2, rows, columns)]
    tilescale.emulate(program, args)
    for wg in (0, 1):
        assert_same(args[1][0, wg, :, :4], x[:, (1 - wg) * 4 : (1 - wg) * 4 + 4] * 2)
        assert_same(args[1][1, wg], x * 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_allreduce_between_thread_groups_of_every_type(level, dtype):
    units, lanes = LEVELS[level]

    @T.prim_func
    def program(X: T.Tensor((units, 16), dtype), Y: T.Tensor((units, 16), dtype), M: T.Tensor((units, 16), dtype)):
        with T.Kernel(1, threads=units * lanes):
            with T.Scale(level) as (rank, _):
                mine = T.alloc((16,), dtype, level="l0")
                T.copy(X[rank, 0], mine)
                T.allreduce(mine)
                T.copy(mine, Y[rank, 0])
                T.copy(X[rank, 0], mine)
                T.allreduce(mine, op="max")
                T.copy(mine, M[rank, 0])

    x = values(1, units, 16, dtype=dtype)
    args = [x, blank(units, 16, dtype=dtype), blank(units, 16, dtype=dtype)]
    tilescale.emulate(program, args)
    for rank in range(units):
        assert_rounded(args[1][rank], wide(x).sum(0))
        assert_rounded(args[2][rank], wide(x).max(0).values)


@pytest.mark.parametrize("name", ["reduce_scatter", "all_gather", "all_to_all", "broadcast"])
def test_collectives_between_warps(name):
    shapes = {"reduce_scatter": (12, 4), "all_gather": (4, 12), "all_to_all": (12, 12), "broadcast": (12, 12)}
    n, m = shapes[name]

    @T.prim_func
    def program(X: T.Tensor((3, n), "float32"), Y: T.Tensor((3, m), "float32")):
        with T.Kernel(1, threads=96):
            with T.Scale("warp") as (w, _):
                a = T.alloc((n,), "float32", level="l0")
                b = T.alloc((m,), "float32", level="l0")
                T.copy(X[w, 0], a)
                if name == "broadcast":
                    T.broadcast(a, root=2)
                    T.copy(a, b)
                else:
                    getattr(T, name)(a, b)
                T.copy(b, Y[w, 0])

    x = values(1, 3, n)
    args = [x, blank(3, m)]
    tilescale.emulate(program, args)
    expected = {
        "reduce_scatter": lambda: wide(x).sum(0).reshape(3, 4),
        "all_gather": lambda: wide(x).reshape(1, 12).expand(3, 12),
        "all_to_all": lambda: wide(x).reshape(3, 3, 4).transpose(0, 1).reshape(3, 12),
        "broadcast": lambda: wide(x)[2].expand(3, 12),
    }[name]()
    assert_rounded(args[1], expected)


def test_split_k_product_over_warpgroups():
    """The white paper's inner level: halves of the K tile, partial sums in replicas, one all-reduce."""
    m, n, k, steps = 32, 16, 64, 3

    @T.prim_func
    def program(
        A: T.Tensor((m, k * steps), "float16"), B: T.Tensor((k * steps, n), "float16"), C: T.Tensor((m, n), "float32")
    ):
        with T.Kernel(1, threads=256):
            a = T.alloc((m, k), "float16", level="l1")
            b = T.alloc((k, n), "float16", level="l1")
            c = T.alloc((m, n), "float32", level="l0")
            with T.Scale("warpgroup"):
                T.clear(T.view(c, layout=T.Replica))
            for step in T.Pipelined(steps, num_stages=2):
                T.copy(A[0, step * k], a)
                T.copy(B[step * k, 0], b)
                with T.Scale("warpgroup"):
                    T.gemm(T.view(a, layout=T.FullCol), T.view(b, layout=T.FullRow), T.view(c, layout=T.Replica))
            with T.Scale("warpgroup"):
                T.allreduce(T.view(c, layout=T.Replica))
            T.copy(c, C)

    a, b = values(1, m, k * steps, dtype="float16"), values(2, k * steps, n, dtype="float16")
    args = [a, b, blank(m, n)]
    tilescale.emulate(program, args)
    torch.testing.assert_close(args[2].double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)


def test_thread_groups_of_all_devices_exchange_with_their_namesakes():
    """A device-level collective inside a warpgroup: warpgroup w of every device, w by w."""

    @T.prim_func
    def program(X: T.Tensor((2, 8), "float32"), Y: T.Tensor((2, 8), "float32")):
        with T.Kernel(device=3, block=1, threads=256):
            with T.Scale("warpgroup") as (wg, _):
                mine = T.alloc((8,), "float32", level="l0")
                T.copy(X[wg, 0], mine)
                with T.Scale("device"):
                    T.allreduce(mine)
                T.copy(mine, Y[wg, 0])

    sources = [values(r, 2, 8) for r in range(3)]
    args = [[x.clone(), blank(2, 8)] for x in sources]
    tilescale.emulate(program, args)
    for _, y in args:
        assert_rounded(y, OPS["sum"]([wide(x) for x in sources]))


# -- threads -----------------------------------------------------------------------------------------------------------


def test_threads_with_private_values_and_collectives():
    """32 threads as units of their own: a tile operation among them makes each a coroutine."""

    @T.prim_func
    def program(Y: T.Tensor((32, 2), "int32")):
        with T.Kernel(1, threads=32):
            with T.Scale("thread") as (lane, lanes):
                mine = T.alloc((1,), "int32", level="l0")
                mine[0] = lane * lane
                T.allreduce(mine)
                Y[lane, 0] = mine[0]
                Y[lane, 1] = lanes

    args = [ints(32, 2)]
    tilescale.emulate(program, args)
    assert_same(args[0], torch.tensor([[sum(i * i for i in range(32)), 32]] * 32))


def test_a_variable_of_its_own_for_every_thread_and_warpgroup():
    @T.prim_func
    def program(Y: T.Tensor((256,), "int32")):
        with T.Kernel(1, threads=256):
            tx = T.get_thread_binding()
            kept = T.alloc_var("int32")
            with T.Scale("warpgroup") as (wg, _):
                kept = wg * 1000
                T.barrier()
                if tx % 2 == 0:
                    kept = kept + tx
                Y[tx] = kept

    args = [ints(256)]
    tilescale.emulate(program, args)
    t = torch.arange(256)
    assert_same(args[0], t // 128 * 1000 + torch.where(t % 2 == 0, t, 0))
