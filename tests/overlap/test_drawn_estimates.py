# SPDX-License-Identifier: MIT
"""Estimates of drawn GEMMs with a collective, compared with their simulation: in order, by a queue and by tiles."""

from __future__ import annotations

import os
from functools import cache
from random import Random
from typing import Any

import numpy as np

import tilescale
import tilescale.language as T
from tests.overlap.support import H200, overlapped
from tilescale.passes.overlap.estimate import WORTH

DRAWS = int(os.environ.get("RANDOM_PROGRAMS", "24"))
IN_ORDER = "in order"
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


Times = dict[str, tuple[float, float]]
"""Estimated and simulated microseconds of each strategy."""


@cache
def drawn_times() -> list[Times]:
    """Times of the drawn programs in order, and by each carrier that can overlap them."""
    return [times(*drawn(Random(seed))) for seed in range(DRAWS)]


def times(func: Any, carriers: tuple[str, ...]) -> Times:
    found, in_order = Times(), simulated(func)
    for carrier in carriers:
        changed, schedule = overlapped(func, carrier=carrier)
        (move,) = schedule.moves
        assert move.in_order_s is not None
        found[IN_ORDER] = move.in_order_s * 1e6, in_order
        if move.overlapped:
            assert move.overlapped_s is not None
            found[carrier] = move.overlapped_s * 1e6, simulated(changed)
    return found


def test_estimates_are_near_the_simulation() -> None:
    """In the mean within 5 %: of the time in order at most 7 % each."""
    off: dict[str, list[float]] = {}
    for found in drawn_times():
        for strategy, (estimate, simulation) in found.items():
            off.setdefault(strategy, []).append(estimate / simulation - 1)
    errors = {way: np.abs(found) for way, found in off.items()}
    assert errors.keys() == {IN_ORDER, "queue", "tiles"} and max(errors[IN_ORDER]) < 0.07
    assert all(found.mean() < 0.05 for found in errors.values()), errors


def test_choices_take_at_most_2_percent_longer_than_the_fastest() -> None:
    """95 % of them: the carrier of least estimate, if that saves what an overlap has to save."""
    regrets = []
    for found in drawn_times():
        fastest = min(found, key=lambda way: found[way][0] * ((1 - WORTH) if way == IN_ORDER else 1))
        regrets.append(found[fastest][1] / min(simulation for _, simulation in found.values()) - 1)
    assert np.mean(np.array(regrets) <= 0.02) >= 0.95, regrets
