# SPDX-License-Identifier: MIT
"""Copies to peers, signals, barriers and collectives, at every level where they make sense."""

from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tilescale.collectives import TILES, names

INT = torch.int32


def ints(*shape: int, fill: int = 0) -> torch.Tensor:
    return torch.full(shape, fill, dtype=INT)


# A ring at each level: every unit writes its rank to the next one's tile and shows what it got.


@pytest.mark.parametrize(("level", "threads"), [("warp", 128), ("warpgroup", 384)])
@pytest.mark.parametrize("direction", ["put", "get"])
def test_ring_of_thread_groups(level: str, threads: int, direction: str):
    put = direction == "put"

    @T.prim_func
    def f(Out: T.Tensor((8,), "int32")):
        with T.Kernel(1, threads=threads):
            with T.Scale(level) as rank, size:
                mine = T.alloc((4,), "int32")
                theirs = T.alloc((4,), "int32")
                T.fill(mine, rank + 1)
                T.barrier()
                if put:
                    T.copy(mine, theirs, dst=(rank + 1) % size)
                else:
                    T.copy(mine, theirs, src=(rank + size - 1) % size)
                T.barrier()
                Out[rank] = theirs[3]

    out, units = ints(8), threads // (32 if level == "warp" else 128)
    tilescale.emulate(f, [out])
    assert out[:units].tolist() == [units, *range(1, units)]


@pytest.mark.parametrize("direction", ["put", "get"])
def test_ring_of_blocks_in_a_cluster(direction: str):
    put = direction == "put"

    @T.prim_func
    def f(Out: T.Tensor((8,), "int32")):
        with T.Kernel(cta_cluster=4, block=8, threads=32) as bx:
            mine = T.alloc((4,), "int32")
            theirs = T.alloc((4,), "int32")
            with T.Scale("block") as rank, size:
                T.fill(mine, bx)
                T.barrier()
                if put:
                    T.copy(mine, theirs, dst=(rank + 1) % size, impl="dsmem")
                else:
                    T.copy(mine, theirs, src=(rank + size - 1) % size)
                T.barrier()
                Out[bx] = theirs[3]

    out = ints(8)
    tilescale.emulate(f, [out])
    assert out.tolist() == [3, 0, 1, 2, 7, 4, 5, 6]


@pytest.mark.parametrize("direction", ["put", "get"])
@pytest.mark.parametrize("impl", [None, "tma", "lsu", "copy_engine"])
def test_ring_of_devices_from_a_block(direction: str, impl: str | None):
    put = direction == "put"

    @T.prim_func
    def f(In: T.Tensor((4, 8), "int32"), Out: T.Tensor((4, 8), "int32")):
        with T.Kernel(device=4, block=4, threads=32) as bx:
            tile = T.alloc((1, 8), "int32")
            with T.Scale("device") as rank, size:
                if put:
                    with T.Scale("block"):
                        T.copy(In[bx, 0], tile)
                        with T.Scale("device"):
                            T.copy(tile, Out[bx, 0], dst=(rank + 1) % size, impl=impl)
                else:
                    with T.Scale("block"), T.Scale("device"):
                        T.copy(In[bx, 0], tile, src=(rank + size - 1) % size, impl=impl)
                        T.copy(tile, Out[bx, 0])
                T.barrier()

    args = [[ints(4, 8, fill=rank), ints(4, 8)] for rank in range(4)]
    tilescale.emulate(f, args)
    assert [out[:, 7].tolist() for _, out in args] == [[3] * 4, [0] * 4, [1] * 4, [2] * 4]


def test_whole_tensors_between_devices():
    @T.prim_func
    def f(In: T.Tensor((4, 8), "int32"), Out: T.Tensor((4, 8), "int32")):
        with T.Kernel(device=4, block=1, threads=32):
            with T.Scale("device") as rank, size:
                T.copy(In, Out, dst=(rank + 1) % size)
                T.barrier()

    args = [[ints(4, 8, fill=rank), ints(4, 8)] for rank in range(4)]
    tilescale.emulate(f, args)
    assert [out[3, 7].item() for _, out in args] == [3, 0, 1, 2]


@pytest.mark.parametrize("level", ["device", "node"])
def test_peers_are_those_of_the_level(level: str):
    with tilescale.use_machine("h200-sxm-8x4"):

        @T.prim_func
        def f(In: T.Tensor((4,), "int32"), Out: T.Tensor((4,), "int32")):
            with T.Kernel(node=2, device=2, block=1, threads=32):
                with T.Scale("device"):
                    with T.Scale(level) as rank, size:
                        T.copy(In, Out, dst=(rank + 1) % size)
                        T.barrier()

    args = [[ints(4, fill=unit), ints(4)] for unit in range(4)]
    tilescale.emulate(f, args, machine="h200-sxm-8x4")
    assert [out[0].item() for _, out in args] == ([1, 0, 3, 2] if level == "device" else [2, 3, 0, 1])


# -- signals -----------------------------------------------------------------------------------------------------------


def test_put_with_signal_between_devices():
    @T.prim_func
    def f(In: T.Tensor((4, 8), "int32"), Out: T.Tensor((4, 8), "int32"), flags: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            tile = T.alloc((1, 8), "int32")
            with T.Scale("block"), T.Scale("device") as rank, size:
                T.copy(In[bx, 0], tile)
                T.copy(tile, Out[bx, 0], dst=(rank + 1) % size, signal=flags[bx], value=3)
                T.wait(flags[bx], ">=", 3)
                Out[bx, 0] = Out[bx, 0] + 100

    args = [[ints(4, 8, fill=rank + 1), ints(4, 8), ints(4)] for rank in range(2)]
    tilescale.emulate(f, args)
    assert [out[0].tolist() for _, out, _ in args] == [[102] + [2] * 7, [101] + [1] * 7]
    assert args[0][2].tolist() == [3] * 4


@pytest.mark.parametrize("op", ["add", "set"])
def test_signals_add_and_set(op: str):
    @T.prim_func
    def f(flags: T.Tensor((2,), "uint32")):
        with T.Kernel(device=3, block=1, threads=32):
            with T.Scale("device") as rank, size:
                T.signal(flags[0], 5, op=op, dst=(rank + 1) % size)
                T.wait(flags[0], "==", 5)
                T.barrier()
                T.signal(flags[0], 5, op, dst=(rank + 2) % size)
                T.wait(flags[0], ">", 9) if op == "add" else T.wait(flags[0], ">", 4)
                T.signal(flags[1])

    args = [[torch.zeros(2, dtype=torch.uint32)] for _ in range(3)]
    tilescale.emulate(f, args)
    assert [a[0].tolist() for a in args] == [[10 if op == "add" else 5, 1]] * 3


def test_signals_between_blocks_and_between_warps():
    @T.prim_func
    def f(Out: T.Tensor((4,), "int32"), flags: T.Tensor((8,), "int32")):
        with T.Kernel(4, threads=64) as bx:
            if bx > 0:
                T.wait(flags[bx], "==", 1)
            with T.Scale("warp") as w, ws:
                if w == 1:
                    T.wait(flags[4 + bx], "!=", 0)
                    Out[bx] = Out[bx] * 2
                else:
                    Out[bx] = Out[(bx + 3) % 4] + 1
                    T.signal(flags[4 + bx])
            if bx < 3:
                T.signal(flags[bx + 1])

    out, flags = ints(4), ints(8)
    tilescale.emulate(f, [out, flags])
    assert out.tolist() == [2, 6, 14, 30]


# -- collectives -------------------------------------------------------------------------------------------------------


def collective(level: str, statements: Any, mine: list[torch.Tensor], out: tuple[int, ...]) -> list[torch.Tensor]:
    """Runs `statements(src, dst)` on four units of a level, each with its own `mine`; returns every unit's dst."""
    shape = tuple(mine[0].shape)
    place = {
        "warp": dict(block=1, threads=128),
        "warpgroup": dict(block=1, threads=512),
        "block": dict(cta_cluster=4, block=4, threads=32),
        "device": dict(device=4, block=1, threads=32),
    }[level]

    @T.prim_func
    def f(In: T.Tensor((4, *shape), "float32"), Out: T.Tensor((4, *out), "float32")):
        with T.Kernel(**place):
            with T.Scale("block"), T.Scale(level) as rank, size:
                src = T.alloc(shape, "float32")
                dst = T.alloc(out, "float32")
                T.copy(In[rank, :, :], src)
                T.clear(dst)
                statements(src, dst)
                T.copy(dst, Out[rank, :, :])

    units = 4 if level == "device" else 1
    args = [[torch.stack(mine), torch.zeros(4, *out)] for _ in range(units)]
    tilescale.emulate(f, args)
    return [args[rank % units][1][rank] for rank in range(4)]


LEVELS = pytest.mark.parametrize("level", ["warp", "warpgroup", "block", "device"])
MINE = [torch.randn(8, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]


@LEVELS
@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
def test_allreduce(level: str, op: str):
    @T.macro
    def statements(src, dst):
        T.copy(src, dst)
        T.allreduce(dst, op=op)

    stack = torch.stack(MINE)
    wanted = {"sum": stack.sum(0), "max": stack.amax(0), "min": stack.amin(0), "prod": stack.prod(0)}[op]
    for got in collective(level, statements, MINE, (8, 4)):
        torch.testing.assert_close(got, wanted)


@LEVELS
def test_reduce_scatter(level: str):
    @T.macro
    def statements(src, dst):
        T.reduce_scatter(src, dst)

    whole = torch.stack(MINE).sum(0)
    for rank, got in enumerate(collective(level, statements, MINE, (2, 4))):
        torch.testing.assert_close(got, whole[2 * rank : 2 * rank + 2])


@LEVELS
def test_reduce_scatter_along_another_dimension(level: str):
    @T.macro
    def statements(src, dst):
        T.reduce_scatter(src, dst, op="max", dim=-1)

    whole = torch.stack(MINE).amax(0)
    for rank, got in enumerate(collective(level, statements, MINE, (8, 1))):
        torch.testing.assert_close(got, whole[:, rank : rank + 1])


@LEVELS
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_all_gather(level: str, dim: int):
    @T.macro
    def statements(src, dst):
        T.all_gather(src, dst, dim=dim)

    shape = (32, 4) if dim == 0 else (8, 16)
    for got in collective(level, statements, MINE, shape):
        torch.testing.assert_close(got, torch.cat(MINE, dim))


@LEVELS
@pytest.mark.parametrize("dim", [0, 1])
def test_all_to_all(level: str, dim: int):
    @T.macro
    def statements(src, dst):
        T.all_to_all(src, dst, dim=dim)

    for rank, got in enumerate(collective(level, statements, MINE, (8, 4))):
        torch.testing.assert_close(got, torch.cat([m.chunk(4, dim)[rank] for m in MINE], dim))


@LEVELS
@pytest.mark.parametrize("root", [0, 3])
def test_broadcast(level: str, root: int):
    @T.macro
    def statements(src, dst):
        T.copy(src, dst)
        T.broadcast(dst, root)

    for got in collective(level, statements, MINE, (8, 4)):
        torch.testing.assert_close(got, MINE[root])


@LEVELS
def test_allreduce_of_several_tiles_with_a_function(level: str):
    """The larger value wins and brings its companion along."""

    def winner(a, b):
        (x, i), (y, j) = a, b
        return T.max(x, y), T.if_then_else(x > y, i, j)

    @T.macro
    def statements(src, dst):
        keys = T.alloc((8, 4), "float32")
        T.copy(src, keys)
        T.copy(src, dst)
        for i, j in T.Parallel(8, 4):
            dst[i, j] = src[i, j] * 2
        T.allreduce(keys, dst, fn=winner)

    for got in collective(level, statements, MINE, (8, 4)):
        torch.testing.assert_close(got, torch.stack(MINE).amax(0) * 2)


def test_allreduce_of_one_tile_with_a_function():
    @T.macro
    def statements(src, dst):
        T.copy(src, dst)
        T.allreduce(dst, fn=lambda a, b: a + 2 * b)

    for got in collective("device", statements, MINE, (8, 4)):
        torch.testing.assert_close(got, MINE[0] + 2 * (MINE[1] + MINE[2] + MINE[3]))


def test_whole_tensors_in_a_device_phase():
    @T.prim_func
    def f(
        X: T.Tensor((8, 4), "float32"),
        Part: T.Tensor((2, 4), "float32"),
        All: T.Tensor((8, 4), "float32"),
        Turned: T.Tensor((8, 4), "float32"),
        Root: T.Tensor((8, 4), "float32"),
    ):
        with T.Kernel(device=4, block=1, threads=32):
            with T.Scale("device"):
                T.reduce_scatter(X, Part)
                T.all_gather(Part, All)
                T.all_to_all(X, Turned)
                T.broadcast(Root, root=2)
                T.allreduce(X, op="max")

    args = [[m.clone(), torch.zeros(2, 4), torch.zeros(8, 4), torch.zeros(8, 4), m.clone()] for m in MINE]
    tilescale.emulate(f, args)
    for rank, (x, part, whole, turned, root) in enumerate(args):
        torch.testing.assert_close(x, torch.stack(MINE).amax(0))
        torch.testing.assert_close(whole, torch.stack(MINE).sum(0))
        torch.testing.assert_close(part, whole[2 * rank : 2 * rank + 2])
        torch.testing.assert_close(turned, torch.cat([m[2 * rank : 2 * rank + 2] for m in MINE]))
        torch.testing.assert_close(root, MINE[2])


def test_a_collective_under_a_condition_that_all_units_share():
    """At device level a condition on the block index is the same on every device."""

    @T.prim_func
    def f(A: T.Tensor((4,), "float32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            tile = T.alloc((1,), "float32")
            T.copy(A[bx], tile)
            with T.Scale("block"), T.Scale("device"):
                if bx == 2:
                    T.allreduce(tile)
            T.copy(tile, A[bx])

    args = [[torch.arange(4.0)] for _ in range(2)]
    tilescale.emulate(f, args)
    assert args[1][0].tolist() == [0, 1, 4, 3]


def test_a_collective_of_blocks_under_a_condition_on_their_cluster():
    @T.prim_func
    def f(A: T.Tensor((4, 4), "float32")):
        with T.Kernel(cta_cluster=2, block=(4, 4), threads=32) as (bx, by):
            tile = T.alloc((1,), "float32")
            T.copy(A[by, bx], tile)
            with T.Scale("block"):
                cluster = bx // 2
                if cluster == 1:
                    if by > 1:
                        T.allreduce(tile)
            T.copy(tile, A[by, bx])

    a = torch.arange(16.0).reshape(4, 4)
    tilescale.emulate(f, [a])
    wanted = torch.arange(16.0).reshape(4, 4)
    wanted[2:, 2:] = wanted[2:, 2:].sum(1, keepdim=True)
    assert a.tolist() == wanted.tolist()


@pytest.mark.parametrize("op", names("allreduce", TILES))
def test_implementations_give_the_same_result(op: str):
    @T.macro
    def statements(src, dst):
        T.copy(src, dst)
        T.allreduce(dst, impl=op)

    for got in collective("device", statements, MINE, (8, 4)):
        torch.testing.assert_close(got, torch.stack(MINE).sum(0))
