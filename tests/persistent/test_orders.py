# SPDX-License-Identifier: MIT
"""Order of tasks in one launch: no wait is missing, and no task waits much longer than it has to."""

from typing import Any

import numpy as np
import pytest
import torch

import tilescale
import tilescale.language as T
from tests.persistent.test_tasks import ran
from tilelang_core import ir
from tilescale.hda import Machine
from tilescale.passes.persistent.counters import Counter, counters_of
from tilescale.passes.persistent.placement import Placement
from tilescale.passes.persistent.rewrite import persistent
from tilescale.program.tile_boxes import Boxes

ROWS = 72
Tensor = T.Tensor((ROWS, 32), "float32")


@T.prim_func
def mirrored(X: Tensor, Y: Tensor, Z: Tensor):
    with T.Kernel(9, threads=64) as row:
        for i, j in T.Parallel(8, 32):
            X[row * 8 + i, j] = 1
            Y[row * 8 + i, j] = 2
    with T.Kernel(9, threads=64) as row:
        for i, j in T.Parallel(8, 32):
            Z[row * 8 + i, j] = X[row * 8 + i, j] + Y[(8 - row) * 8 + i, j]


@T.prim_func
def mirrored_behind_another_phase(X: Tensor, Y: Tensor, Z: Tensor):
    with T.Kernel(9, threads=64) as row:
        for i, j in T.Parallel(8, 32):
            X[row * 8 + i, j] = 1
    with T.Kernel(9, threads=64) as row:
        for i, j in T.Parallel(8, 32):
            Y[row * 8 + i, j] = X[row * 8 + i, j] + 1
    with T.Kernel(9, threads=64) as row:
        for i, j in T.Parallel(8, 32):
            Z[row * 8 + i, j] = Y[row * 8 + i, j] + X[(8 - row) * 8 + i, j]


@T.prim_func
def between_two_tiles(X: Tensor, Y: Tensor, Z: Tensor):
    with T.Kernel(9, threads=64) as row:
        for i, j in T.Parallel(8, 32):
            X[row * 8 + i, j] = 1
            Y[row * 8 + i, j] = 2
            Z[row * 8 + i, j] = 3
    with T.Kernel(8, threads=64) as row:
        for i, j in T.Parallel(8, 32):
            Z[row * 8 + 4 + i, j] = X[row * 8 + 4 + i, j]


@T.prim_func
def of_another_shape(X: Tensor, Y: Tensor, Z: Tensor):
    with T.Kernel(9, threads=64) as row:
        for i, j in T.Parallel(8, 32):
            X[row * 8 + i, j] = 1
    with T.Kernel(9, threads=64) as row:
        flat = T.reshape(X, (32, ROWS))
        for i, j in T.Parallel(8, 32):
            Z[row * 8 + i, j] = flat[j, row * 8 + i]


@pytest.mark.parametrize("func", [mirrored, mirrored_behind_another_phase, between_two_tiles, of_another_shape])
def test_tasks_wait_for_all_that_they_access(func: Any, small: Machine):
    def ran(program: Any) -> list[torch.Tensor]:
        given = [torch.zeros(ROWS, 32) for _ in range(3)]
        tilescale.emulate(program, given, machine=small, time=False, check="all")
        return given

    fused, _ = persistent(func, small)
    assert all(one.equal(other) for one, other in zip(ran(fused), ran(func), strict=True))


@pytest.mark.parametrize(("blocks", "first", "count"), [(5, 3, 7), (5, 0, 3), (4, 1, 8), (6, 5, 13)])
def test_blocks_share_the_tasks_of_a_phase(blocks: int, first: int, count: int):
    placement = Placement(blocks, first, count)
    tasks = [[t for turn in range(count) if (t := placement.task(b, turn)) < count] for b in range(blocks)]
    assert sorted(sum(tasks, [])) == list(range(count))
    assert placement.executed().tolist() == list(map(len, tasks))


def test_elements_of_an_iteration_are_apart_from_those_of_others(small: Machine):
    @T.prim_func
    def layers(X: T.Tensor((64, 32), "float32"), K: T.Tensor((3, 64, 32), "float32"), Y: T.Tensor((64, 32), "float32")):
        for layer in T.serial(3):
            with T.Kernel(8, threads=64) as row:
                for i, j in T.Parallel(8, 32):
                    Y[row * 8 + i, j] = X[row * 8 + i, j] + K[layer, (7 - row) * 8 + i, j]
            with T.Kernel(8, threads=64) as row:
                for i, j in T.Parallel(8, 32):
                    K[layer, row * 8 + i, j] = Y[row * 8 + i, j]
                    X[row * 8 + i, j] = Y[row * 8 + i, j] * 2

    fused, tasks = persistent(layers, small)
    needs = {(n.earlier, n.later, n.previous): {root.name for root in n.roots} for n in tasks.needs}
    assert all("K" not in names for (_, _, previous), names in needs.items() if previous)
    assert needs.keys() == {(0, 1, False), (1, 0, True)}
    shapes = [(3, 64, 32), (64, 32)]
    got, want = (ran(func, shapes, 1, small, check="all") for func in (fused, layers))
    assert all(one.equal(other) for one, other in zip(got, want, strict=True))


# -- chunks ------------------------------------------------------------------------------------------------------------


def rows(*bounds: tuple[int, int], extent: int = 96) -> Boxes:
    """Boxes of tasks along the only dimension of a tensor."""
    first, last = (np.array([side]) for side in zip(*bounds, strict=True))
    anything = ir.IntImm("int32", 0)
    return Boxes((extent,), (anything,), (anything,), first, last)


def tiles(size: int, begin: int = 0) -> Boxes:
    return rows(*((at, at + size) for at in range(begin, 96 - size + 1, size)))


@pytest.mark.parametrize(
    ("earlier", "later", "chunk"),
    [
        (tiles(8), tiles(32), 32),
        (tiles(32), tiles(8), 32),
        (tiles(12), tiles(8), 8),
        (tiles(8), tiles(12, 4), 16),
        (tiles(8, 4), tiles(12), 12),
        (tiles(8, 4), tiles(12, 4), 96),
    ],
    ids=["larger", "smaller", "not a multiple", "not aligned", "the earlier not aligned", "none aligned"],
)
def test_a_task_waits_for_one_or_two_chunks(earlier: Boxes, later: Boxes, chunk: int):
    counter = counters_of("X", earlier, later, blocks=earlier.first.shape[1])
    assert counter.chunk == (chunk,)
    assert counter.touched(later).sum(axis=1).max() <= 2


@pytest.mark.parametrize(("later", "chunk"), [(rows((0, 80), (8, 96)), 96), (rows((0, 48), (48, 96)), 48)])
def test_tasks_that_need_most_of_a_phase_wait_for_all_of_it(later: Boxes, chunk: int):
    counter = counters_of("X", tiles(8), later, blocks=12)
    assert (counter.chunk, counter.blocks) == ((chunk,), None)


@pytest.mark.parametrize(("steps", "simple"), [(7, True), (8, False)])
def test_a_wait_computes_few_different_numbers_of_arrivals(steps: int, simple: bool):
    """A task for each of the first elements, two for the next one, and so on."""
    boxes = rows(*((at, at + 1) for at in range(steps + 1) for _ in range(1 + at % 2)), extent=steps + 1)
    assert np.count_nonzero(np.diff(Counter("X", boxes, (1,)).arrivals)) == steps
    assert Counter("X", boxes, (1,)).is_simple == simple


@pytest.mark.parametrize(("extent", "simple"), [(1 << 14, True), ((1 << 14) + 1, False)])
def test_the_number_of_counters_is_limited(extent: int, simple: bool):
    assert Counter("X", rows((0, extent), extent=extent), (1,)).is_simple == simple
