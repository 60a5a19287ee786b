# SPDX-License-Identifier: MIT
"""Grids that begin while the one in front of them ends: only those that touch nothing of it."""

from collections.abc import Callable
from typing import Any

import pytest

import tilescale.language as T
from tests.cuda.support import KERNEL, lowered, source

TRIGGER, WAIT = "cudaTriggerProgrammaticLaunchCompletion();", "cudaGridDependencySynchronize();"
NOTE = "a grid begins while the one in front of it ends"


def rows(*shards: Callable[[Any, Any, Any], Any], size: int = 4, between: bool = False) -> Any:
    """A grid for each of `shards`, which writes that row: a function of the device, how many there are, and a turn."""

    @T.prim_func
    def made(X: T.Tensor((64,), "float32"), C: T.Tensor((size, size, 64), "float32"), F: T.Tensor((size,), "int32")):
        with T.Kernel(device=size, block=size - 1, threads=64) as turn:
            for shard in shards:
                with T.Scale("block"), T.Scale("device") as (rank, n):
                    for i in T.Parallel(64):
                        C[shard(rank, n, turn), 0, i] = X[i]
                with T.Scale("device") as (rank, n):
                    if between:
                        T.signal(F[rank], dst=(rank + 1) % n)

    return made


def own(rank: Any, n: Any, turn: Any) -> Any:
    return rank


def others(rank: Any, n: Any, turn: Any) -> Any:
    return (rank + n - 1 - turn) % n


def one_too_many(rank: Any, n: Any, turn: Any) -> Any:
    return (rank + n - turn) % n


def marks(func: Any, **options: Any) -> list[tuple[bool, bool]]:
    """Of each kernel whether it lets the next one begin, and whether it waits for the one in front."""
    texts = [text for text in KERNEL.findall(source(func, **options)) if "C" in text]
    return [(TRIGGER in text, WAIT in text) for text in texts]


@pytest.mark.parametrize("size", [2, 4, 7])
def test_grids_of_different_shards_overlap(size: int):
    func = rows(own, others, size=size)
    assert marks(func) == [(True, False), (False, True)]
    assert any(note.startswith(NOTE) for note in lowered(func).notes)
    first, second = KERNEL.findall(source(func))
    assert first.index(TRIGGER) < first.index("C[") and second.rindex("C[") < second.index(WAIT)


@pytest.mark.parametrize("second", [own, one_too_many])
def test_grids_that_may_meet_in_a_row_do_not(second: Any):
    assert marks(rows(own, second)) == [(False, False)] * 2


def test_none_begins_before_one_that_it_depends_on():
    """The third grid depends on the first one, which may run as long as the second does."""
    assert marks(rows(own, others, own)) == [(True, False), (False, True), (False, False)]
    assert marks(rows(own, lambda rank, n, turn: (rank + 1) % n, lambda rank, n, turn: (rank + 2) % n)) == [
        (True, False), (True, True), (False, True)
    ]  # fmt: skip


def test_nothing_may_stand_between_them():
    assert not any(mark for pair in marks(rows(own, others, between=True)) for mark in pair)


def test_a_machine_without_it_takes_them_in_order():
    assert marks(rows(own, others), machine="a100-sxm-8") == [(False, False)] * 2
