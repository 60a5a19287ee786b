# SPDX-License-Identifier: MIT
"""Loads into a ring of tiles by a warp beyond a program's threads."""

import re
from typing import Any

import pytest

import tilescale
import tilescale.language as T
from tests.cuda.support import bodies
from tilescale.hda import Machine

STAGES, TILES, ROWS, COLUMNS, THREADS = 2, 6, 64, 64, 128


@T.macro
def load(X: Any, ring: Any, full: Any, number: Any) -> None:
    """Load a tile into its stage."""
    T.tma_copy(X[number * ROWS : number * ROWS + ROWS, :], ring[number % STAGES, :, :], barrier=full[number % STAGES])
    if T.shuffle_elect(THREADS):
        T.barrier_arrive(full[number % STAGES])


def summing(writes: bool = False, late: bool = False, waits: bool = False, both: bool = False) -> Any:
    """The sum of tiles through a ring, added to itself by all devices.

    Args:
        writes: whether the program writes the tensor that it loads.
        late: whether the program goes on behind the load into a stage.
        waits: whether the program waits for a peer.
        both: whether it waits for several stages in each iteration.
    """

    @T.prim_func
    def program(
        X: T.Tensor((TILES * ROWS, COLUMNS), "float32"),
        Y: T.Tensor((ROWS, COLUMNS), "float32"),
        flag: T.Tensor((1,), "int32"),
    ):
        with T.Kernel(device=2, block=1, threads=THREADS) as block, T.Scale("block"):
            ring = T.alloc_shared((STAGES, ROWS, COLUMNS), "float32")
            full = T.alloc_barrier([1] * STAGES)
            total = T.alloc((ROWS, COLUMNS), "float32", level="l0")
            T.clear(total)
            if waits:
                T.wait(flag[0], ">=", 1)
            for number in T.serial(STAGES):
                load(X, ring, full, number)
            for number in T.serial(TILES):
                T.mbarrier_wait_parity(full[number % STAGES], number // STAGES % 2)
                if both:
                    T.mbarrier_wait_parity(full[(number + 1) % STAGES], (number + 1) // STAGES % 2)
                for i, j in T.Parallel(ROWS, COLUMNS):
                    total[i, j] += ring[number % STAGES, i, j]
                if number + STAGES < TILES:
                    load(X, ring, full, number + STAGES)
                if late:
                    for i, j in T.Parallel(ROWS, COLUMNS):
                        total[i, j] += block
            with T.Scale("device"):
                T.allreduce(total)
            T.copy(total, (X if writes else Y)[0, 0])

    return program


def text_of(func: Any) -> str:
    return bodies(str(tilescale.compile(func, machine=Machine.load("h200-sxm-8")).source))


@pytest.mark.parametrize("late", [False, True])
def test_another_warp_loads_what_the_ring_has_room_for(late: bool):
    loads, rest = re.split(r"\} else \{", text_of(summing(late=late)), maxsplit=1)
    assert loads.count("tl::tma_load(") == 2 and "tl::tma_load(" not in rest
    assert loads.index("full_empty[") < loads.rindex("tl::tma_load("), "a stage is free before it is filled again"
    waits, arrives = rest.index("full["), rest.index("full_empty[")
    assert waits < arrives and "sync" not in rest[waits:arrives], "threads do not synchronize for a load"


@pytest.mark.parametrize("changes", [{"writes": True}, {"waits": True}, {"both": True}])
def test_loads_whose_order_matters_stay(changes: dict[str, bool]):
    assert "full_empty" not in text_of(summing(**changes))
