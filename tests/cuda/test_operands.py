# SPDX-License-Identifier: MIT
"""Values, flag indices and peers that a program reads from memory: right on the emulator, and CUDA takes them too."""

import re

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.support import source

RANKS = 3


def in_device_memory():
    """Signal a number from each device's table to each peer, at the flag that a list names."""

    @T.prim_func
    def f(
        flags: T.Tensor((RANKS,), "int32"),
        count: T.Tensor((RANKS, RANKS), "int32"),
        place: T.Tensor((RANKS,), "int32"),
        out: T.Tensor((RANKS,), "int32"),
    ):
        with T.Kernel(device=RANKS, block=1, threads=64):
            with T.Scale("block"), T.Scale("device") as (rank, size):
                for p in T.serial(size):
                    T.signal(flags[place[rank]], count[rank, p], dst=p)
                for p in T.serial(size):
                    T.wait(flags[place[p]], ">=", count[p, rank])
                    out[p] = flags[place[p]]

    return f


def in_shared_memory():
    """The same from a tile."""

    @T.prim_func
    def f(
        flags: T.Tensor((RANKS,), "int32"),
        count: T.Tensor((RANKS, RANKS), "int32"),
        place: T.Tensor((RANKS,), "int32"),
        out: T.Tensor((RANKS,), "int32"),
    ):
        with T.Kernel(device=RANKS, block=1, threads=64):
            with T.Scale("block"), T.Scale("device") as (rank, size):
                table, places = T.alloc((RANKS, RANKS), "int32"), T.alloc((RANKS,), "int32")
                T.copy(count, table)
                T.copy(place, places)
                for p in T.serial(size):
                    T.signal(flags[places[rank]], table[rank, p], dst=p)
                for p in T.serial(size):
                    T.wait(flags[places[p]], ">=", table[p, rank])
                    out[p] = flags[places[p]]

    return f


@pytest.mark.parametrize("make", [in_device_memory, in_shared_memory])
def test_a_table_says_what_is_told_where(make):
    func = make()
    count = torch.arange(1, RANKS * RANKS + 1, dtype=torch.int32).reshape(RANKS, RANKS)
    place = torch.tensor([2, 0, 1], dtype=torch.int32)
    args = [[torch.zeros(RANKS, dtype=torch.int32), count, place, torch.zeros_like(place)] for _ in range(RANKS)]
    tilescale.emulate(func, args)
    for rank, (_, _, _, out) in enumerate(args):
        torch.testing.assert_close(out, count[:, rank], rtol=0, atol=0)
    assert source(func)


def shuffled(read):
    """Put each device's tile to the peer that a list names; `read` is the statement that reads the list."""

    @T.prim_func
    def f(X: T.Tensor((64,), "float32"), Y: T.Tensor((64,), "float32"), to: T.Tensor((RANKS,), "int32")):
        with T.Kernel(device=RANKS, block=1, threads=64):
            arrived = T.alloc_flags((1,), "int32")
            with T.Scale("block"), T.Scale("device") as (rank, size):
                read(X, Y, to, arrived, rank)
                T.wait(arrived[0], ">=", 1)
                for i in T.Parallel(64):
                    Y[i] = Y[i] + 1.0

    return f


@T.macro
def at_once(X, Y, to, arrived, rank):
    T.copy(X, Y, dst=to[rank], signal=arrived[0])


@T.macro
def in_two_steps(X, Y, to, arrived, rank):
    T.copy(X, Y, dst=to[rank])
    T.signal(arrived[0], 1, dst=to[rank])


@T.macro
def by_an_array(X, Y, to, arrived, rank):
    who = T.alloc_local((RANKS,), "int32")
    for i in T.serial(RANKS):
        who[i] = to[i]
    T.copy(X, Y, dst=who[rank])
    T.signal(arrived[0], 1, dst=who[rank])


@pytest.mark.parametrize("read", [at_once, in_two_steps, by_an_array], ids=["at_once", "in_two_steps", "by_an_array"])
def test_a_list_says_who_gets_a_tile(read):
    func, to = shuffled(read), torch.tensor([1, 2, 0], dtype=torch.int32)
    args = [[torch.full((64,), float(rank)), torch.zeros(64), to] for rank in range(RANKS)]
    tilescale.emulate(func, args)
    for rank, peer in enumerate(to):
        torch.testing.assert_close(args[peer][1], torch.full((64,), rank + 1.0), rtol=0, atol=0)
    text = source(func)
    signal = re.search(r".*tilescale::signal<.*", text)
    assert signal and "to[" not in signal[0] and "who[" not in signal[0]


def test_a_wait_of_a_pipelined_loop_reads_its_value_in_the_same_role():
    @T.prim_func
    def f(
        X: T.Tensor((256, 64), "float16"),
        Y: T.Tensor((64, 64), "float32"),
        flags: T.Tensor((4,), "int32"),
        awaited: T.Tensor((4,), "int32"),
    ):
        with T.Kernel(device=1, block=1, threads=128):
            with T.Scale("block"), T.Scale("device"):
                tile, total = T.alloc((64, 64), "float16"), T.alloc_fragment((64, 64), "float32")
                T.clear(total)
                for k in T.Pipelined(4, num_stages=2):
                    T.wait(flags[k], ">=", awaited[k])
                    T.copy(X[k * 64, 0], tile)
                    for i, j in T.Parallel(64, 64):
                        total[i, j] += tile[i, j]
                T.copy(total, Y)

    x, awaited = torch.randn(256, 64).half(), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    y = torch.zeros(64, 64)
    tilescale.emulate(f, [[x, y, awaited + 1, awaited]])
    torch.testing.assert_close(y, x.reshape(4, 64, 64).float().sum(0))
    assert source(f)
