# SPDX-License-Identifier: MIT
"""Estimates of drawn GEMMs with a collective, compared with their simulation: in order, by a queue and by tiles."""

from __future__ import annotations

import os
from random import Random
from typing import Any

import numpy as np

import tilescale
import tilescale.language as T
from tests.overlap.support import H200, overlapped

DRAWS = int(os.environ.get("RANDOM_PROGRAMS", "12"))
MOST_TILES = 500
"""Tiles of all devices, at most: a simulation takes a second."""


def gather(devices: int, M: int, N: int, K: int, tm: int, tn: int, stages: int) -> Any:
    @T.prim_func
    def program(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "bfloat16")):
        with T.Kernel(device=devices, block=(N // devices // tn, M // tm), threads=256) as (bx, by):
            whole = T.alloc((M, K), "bfloat16", level="l2")
            with T.Scale("device"):
                B_dev, C_dev = T.view(B, layout=T.FullCol), T.view(C, layout=T.FullCol)
                T.all_gather(T.view(A, layout=T.FullRow), whole)
            with T.Scale("block"):
                a = T.alloc((tm, 64), "bfloat16", level="l1")
                b = T.alloc((64, tn), "bfloat16", level="l1")
                c = T.alloc((tm, tn), "float32", level="l0")
                T.clear(c)
                for k in T.Pipelined(K // 64, num_stages=stages):
                    T.copy(whole[by * tm, k * 64], a)
                    T.copy(B_dev[k * 64, bx * tn], b)
                    T.gemm(a, b, c)
                T.copy(c, C_dev[by * tm, bx * tn])

    return program


def reduction(devices: int, M: int, N: int, K: int, tm: int, tn: int, stages: int, scatters: bool) -> Any:
    @T.prim_func
    def program(A: T.Tensor((M, K), "bfloat16"), B: T.Tensor((K, N), "bfloat16"), C: T.Tensor((M, N), "bfloat16")):
        with T.Kernel(device=devices, block=(N // tn, M // tm), threads=256) as (bx, by):
            partial = T.alloc((M, N), "bfloat16", level="l2")
            with T.Scale("device"):
                A_dev, B_dev = T.view(A, layout=T.FullCol), T.view(B, layout=T.FullRow)
            with T.Scale("block"):
                a = T.alloc((tm, 64), "bfloat16", level="l1")
                b = T.alloc((64, tn), "bfloat16", level="l1")
                c = T.alloc((tm, tn), "float32", level="l0")
                T.clear(c)
                for k in T.Pipelined(K // devices // 64, num_stages=stages):
                    T.copy(A_dev[by * tm, k * 64], a)
                    T.copy(B_dev[k * 64, bx * tn], b)
                    T.gemm(a, b, c)
                if scatters:
                    T.copy(c, partial[by * tm, bx * tn])
                else:
                    T.copy(c, C[by * tm, bx * tn])
            with T.Scale("device"):
                if scatters:
                    T.reduce_scatter(partial, T.view(C, layout=T.FullRow))
                else:
                    T.allreduce(C)

    return program


def drawn(random: Random) -> tuple[Any, tuple[str, ...]]:
    """A program, and its carriers."""
    kind, devices = random.choice(["gather", "scatter", "reduce"]), random.choice([2, 2, 4])
    tm, tn, stages = random.choice([(64, 128, 4), (128, 128, 3), (128, 128, 4), (128, 256, 3)])
    M, K = devices * tm * random.randint(1, 1536 // tm), 64 * random.randint(16, 64)
    N = devices * tn * random.randint(2, 2048 // tn) if kind == "gather" else 512 * random.randint(2, 10)
    if M // tm * (N // tn) * (1 if kind == "gather" else devices) > MOST_TILES:
        return drawn(random)
    if kind == "gather":
        return gather(devices, M, N, K, tm, tn, stages), ("queue",)
    program = reduction(devices, M, N, K * devices, tm, tn, stages, kind == "scatter")
    return program, ("queue", "tiles")


def simulated(program: Any) -> float:
    return tilescale.emulate(program, data=False, machine=H200, progress=False).time_us


def test_estimates_are_near_the_simulation() -> None:
    """In the mean within 5 %: of the time in order at most 10 % each."""
    off: dict[str, list[float]] = {}
    for seed in range(DRAWS):
        func, carriers = drawn(Random(seed))
        in_order = simulated(func)
        for carrier in carriers:
            changed, schedule = overlapped(func, carrier=carrier)
            (move,) = schedule.moves
            assert move.in_order_s is not None
            off.setdefault("in order", []).append(move.in_order_s * 1e6 / in_order - 1)
            if move.overlapped:
                assert move.overlapped_s is not None
                off.setdefault(carrier, []).append(move.overlapped_s * 1e6 / simulated(changed) - 1)
    errors = {way: np.abs(found) for way, found in off.items()}
    assert errors.keys() == {"in order", "queue", "tiles"} and max(errors["in order"]) < 0.1
    assert all(found.mean() < 0.05 for found in errors.values()), errors
