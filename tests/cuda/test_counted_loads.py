# SPDX-License-Identifier: MIT
"""Bulk loads of peers' memory outside of pipelined loops: each waits for the phase that it completes."""

import re

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.support import bodies, ptxas, source

ROWS, STEPS = 16, 6


@T.macro
def taken(X, Z, tile, step, peer):
    T.copy(X[step, 0, 0], tile, src=peer, impl="tma")
    for i, j in T.Parallel(ROWS, ROWS):
        Z[step, i, j] = tile[j, i]


@T.macro
def in_a_branch(N, X, Z, tile, peer):
    for step in T.serial(STEPS):
        if N[step] > 0:
            taken(X, Z, tile, step, peer)


@T.macro
def in_some_iterations(N, X, Z, tile, peer):
    for step in T.serial(STEPS):
        if step % 2 == 1:
            taken(X, Z, tile, step, peer)


@T.macro
def in_nested_loops(N, X, Z, tile, peer):
    for outer in T.serial(2):
        for inner in T.serial(3):
            taken(X, Z, tile, outer * 3 + inner, peer)


@T.macro
def in_a_while(N, X, Z, tile, peer):
    step = T.alloc_var("int32")
    step = 0
    while step < N[1]:
        taken(X, Z, tile, step, peer)
        step = step + 1


@pytest.mark.parametrize("loads", [in_a_branch, in_some_iterations, in_nested_loops, in_a_while])
def test_a_load_waits_for_the_phase_of_its_own_number(loads):
    shape = STEPS, ROWS, ROWS

    @T.prim_func
    def run(N: T.Tensor((STEPS,), "int32"), X: T.Tensor(shape, "float32"), Z: T.Tensor(shape, "float32")):
        with T.Kernel(device=2, block=1, threads=128), T.Scale("block"):
            tile = T.alloc((ROWS, ROWS), "float32", level="l1")
            with T.Scale("device") as (rank, _):
                loads(N, X, Z, tile, 1 - rank)

    numbers = torch.tensor([0, 4, 0, 1, 2, 0], dtype=torch.int32)
    per_device = [[numbers.clone(), torch.rand(shape), torch.zeros(shape)] for _ in range(2)]
    tilescale.emulate(run, per_device)
    assert torch.equal(per_device[0][2][3], per_device[1][1][3].T)

    text = source(run)
    (count,) = re.findall(r"_mbarrier\[0\]\.wait\(\((\w+) & 1\)\);", bodies(text))
    begin, behind = bodies(text).split(".wait(", 1)
    assert re.findall(rf"\b{count} = ([^;]+);", begin)[-1] == "0"
    assert re.findall(rf"\b{count} = ([^;]+);", behind) == [f"({count} + 1)"]
    ptxas(text)
