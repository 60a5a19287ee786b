# SPDX-License-Identifier: MIT
"""Pipelined loops of unknown length on machines without bulk copies: which of them load how far ahead."""

import re
from typing import Any

import pytest

import tilescale.language as T
from tests.cuda.support import lowered
from tilelang_core import compile as stock
from tilescale.backends.cuda.target import target_for
from tilescale.hda import Machine

A100 = "a100-sxm-8"


def product(stages: int, apart: bool = False, known: bool = False) -> Any:
    """A GEMM over `n` tiles; `apart` multiplies each tile of B once more."""

    @T.prim_func
    def product(
        A: T.Tensor((64, 512), "float16"),
        B: T.Tensor((512, 64), "float16"),
        n: T.int32,
        C: T.Tensor((64, 64), "float32"),
    ):
        with T.Kernel(device=2, block=1, threads=128):
            a, b = (T.alloc((64, 64), "float16", level="l1") for _ in range(2))
            c = T.alloc((64, 64), "float32", level="l0")
            with T.Scale("block"):
                T.clear(c)
                for k in T.Pipelined(8 if known else n, num_stages=stages):
                    T.copy(A[0, k * 64], a)
                    T.copy(B[k * 64, 0], b)
                    T.gemm(a, b, c)
                    if apart:
                        T.gemm(b, b, c)
                T.copy(c, C)

    return product


@pytest.mark.parametrize(
    ("how", "machine", "stages"),
    [
        ({"stages": 2}, A100, 2),
        ({"stages": 3}, A100, 1),
        ({"stages": 2, "apart": True}, A100, 1),
        ({"stages": 3, "known": True}, A100, 3),
        ({"stages": 3}, "h200-sxm-8", 3),
    ],
    ids=str,
)
def test_steps_that_are_loaded_ahead(how: dict[str, Any], machine: str, stages: int):
    (grid,) = lowered(product(**how), machine).lowered.grids
    assert re.findall(r'"num_stages": (?:T.int32\()?(\d)', grid.kernel.func.script()) == [str(stages)]
    assert "cp_async" in stock.cuda_source(grid.kernel.func, target_for(Machine.load(machine))) or machine != A100


def test_stock_has_no_text_for_others():
    target = target_for(Machine.load(A100))
    (grid,) = lowered(product(stages=3), "h200-sxm-8").lowered.grids
    with pytest.raises(TypeError, match=r"Downcast from tirx\.Sub"):  # fails once fixed upstream
        stock.cuda_source(grid.kernel.func, target)
