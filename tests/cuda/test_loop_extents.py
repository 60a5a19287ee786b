# SPDX-License-Identifier: MIT
"""The extent of a loop is that at its beginning, also where its body changes it."""

import re
from typing import Any

import pytest
import tilelang
import torch
from tilelang.backend.target import determine_target

import tilescale
import tilescale.language as T
from tests.cuda.support import source
from tilelang_core.compile import cuda_source

TARGET = determine_target({"kind": "cuda", "arch": "sm_90a"}, return_object=True)


@T.prim_func
def variable(X: T.Tensor((8,), "int32"), Z: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=1):
        n = T.alloc_var("int32")
        n = X[0]
        for k in T.serial(n):
            n = n - 1
            Z[k] = n


@T.prim_func
def memory(X: T.Tensor((8,), "int32"), Z: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=1):
        for k in T.serial(X[0]):
            if k % 2 == 0:
                X[0] = X[0] - 1
            Z[k] = X[0]


@T.prim_func
def unchanged(X: T.Tensor((8,), "int32"), Z: T.Tensor((8,), "int32")):
    with T.Kernel(1, threads=1):
        n = T.alloc_var("int32")
        n = X[0]
        for k in T.serial(n):
            Z[k] = n
        n = 0
        Z[0] = n


def loop(text: str) -> str:
    return text[text.rindex("for (") :].partition("\n")[0]


@pytest.mark.parametrize(("func", "values"), [(variable, [5, 4, 3, 2, 1, 0]), (memory, [5, 5, 4, 4, 3, 3])])
def test_a_loop_whose_body_changes_its_extent_runs_as_often_as_on_the_emulator(func: Any, values: list[int]):
    x, z = torch.full((8,), 6, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    tilescale.emulate(func, [x, z])
    assert z.tolist() == [*values, 0, 0]
    text = cuda_source(func, TARGET)
    assert re.search(r"int extent = (n|X\[0\]);\n +for \(int k = 0; k < extent; \+\+k\)", text)


def test_other_loops_stay_as_they_are():
    assert "k < n;" in loop(cuda_source(unchanged, TARGET))


def test_a_program_with_levels_has_such_extents_too():
    @T.prim_func
    def leveled(X: T.Tensor((8,), "int32"), Z: T.Tensor((8,), "int32")):
        with T.Kernel(device=2, block=1, threads=32), T.Scale("block"):
            for k in T.serial(X[0]):
                X[0] = X[0] - 1
                Z[k] = k

    assert "k < extent;" in loop(source(leveled))


def test_stock_still_evaluates_it_in_each_iteration():
    """When this fails, `tilelang_core/loop_extents.py` can be removed."""
    with TARGET:
        assert "k < n;" in loop(tilelang.lower(variable, target=TARGET).kernel_source)
