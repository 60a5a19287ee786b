# SPDX-License-Identifier: MIT
"""Values read before a wait, signal or barrier are those used after it, also where TileLang splits a branch."""

import re

import pytest

import tilescale.language as T
from tests.cuda.support import bodies, source


def text(func):
    return bodies(source(func))


def test_a_collective_under_a_condition_uses_one_half_of_its_workspace():
    """Index that is read once: the barrier between sending and taking changes the counter."""

    @T.prim_func
    def program(A: T.Tensor((4, 128), "float64")):
        with T.Kernel(device=2, block=4, threads=128) as bx:
            with T.Scale("block"):
                tile = T.alloc((128,), "float64")
                T.copy(A[bx, 0], tile)
                if bx == 2:
                    with T.Scale("device"):
                        T.allreduce(tile)
                T.copy(tile, A[bx, 0])

    body = text(program)
    reads = [line for line in body.splitlines() if "barrier_epochs[" in line and "tilescale::barrier" not in line]
    assert [line.split("=")[0].strip() for line in reads] == ["int parity"]
    assert body.index("int parity") < body.index("tilescale::barrier(") < body.rindex("exchange0[")


@pytest.mark.parametrize("change", ["wait", "signal", "add"])
def test_a_value_that_was_read_in_a_branch_stays(change):
    @T.prim_func
    def program(F: T.Tensor((4,), "int32"), Y: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=4, threads=32) as bx:
            with T.Scale("block"), T.Scale("device"):
                if bx > 1:
                    before = F[bx]
                    if change == "wait":
                        T.wait(F[bx], ">=", 7)
                    elif change == "signal":
                        T.signal(F[bx])
                    else:
                        T.atomic_add(F[bx], 1)
                    Y[bx] = before

    body = text(program)
    assert re.search(r"int before = F\[", body) and re.search(r"Y\[.*\] = before;", body)


def test_a_condition_in_memory_is_read_once():
    @T.prim_func
    def program(S: T.Tensor((1,), "int32"), F: T.Tensor((4,), "int32"), Y: T.Tensor((4,), "int32")):
        with T.Kernel(device=2, block=4, threads=64) as bx:
            with T.Scale("block"), T.Scale("device") as (rank, _):
                if S[0] == 0:
                    T.signal(F[bx], dst=1 - rank)
                    T.wait(F[bx], ">=", 1)
                    Y[bx] = 1

    assert text(program).count("S[0]") == 1


@pytest.mark.parametrize("units", [2, 3, 4])
def test_the_extent_of_shards_is_passed(units):
    n = T.dynamic("n")

    @T.prim_func
    def program(X: T.Tensor((n, 8), "float32")):
        with T.Kernel(device=units, block=T.ceildiv(n // units, 4), threads=32) as b:
            with T.Scale("device"):
                mine = T.view(X, layout=T.FullRow)
            with T.Scale("block"):
                for i, j in T.Parallel(4, 8):
                    mine[b * 4 + i, j] = n

    assert re.search(r"program_0_kernel\(.*\bint n\b", text(program))
