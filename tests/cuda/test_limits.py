# SPDX-License-Identifier: MIT
"""What a number of threads makes impossible is told on every back end, with the line."""

from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.support import lowered
from tilescale.errors import ShapeError


def product(m: int, n: int, threads: int, scale: str = "block", policy: Any = None) -> Any:
    """A product of one block, or of each of its warpgroups."""
    kept = {} if policy is None else {"policy": policy}

    @T.prim_func
    def run(A: T.Tensor((m, 32), "float16"), B: T.Tensor((32, n), "float16"), C: T.Tensor((2, m, n), "float32")):
        with T.Kernel(device=1, block=1, threads=threads):
            with T.Scale("block"):
                a = T.alloc((m, 32), "float16", level="l1")
                b = T.alloc((32, n), "float16", level="l1")
                T.copy(A, a)
                T.copy(B, b)
                with T.Scale(scale):
                    c = T.alloc((m, n), "float32", level="l0")
                    T.clear(c)
                    T.gemm(a, b, c, **kept)  # the product
                    T.copy(c, C[T.rank("warpgroup") if scale == "warpgroup" else 0, 0, 0])

    return run


def tensors(m: int, n: int) -> list[torch.Tensor]:
    return [torch.ones(m, 32, dtype=torch.float16), torch.ones(32, n, dtype=torch.float16), torch.empty(2, m, n)]


@pytest.mark.parametrize(
    ("m", "n", "threads", "scale", "found"),
    [
        (16, 16, 128, "block", "warps cannot share it out, 4 here"),
        (24, 32, 32, "block", "a multiple of 16 rows"),
        (64, 20, 32, "block", "of 8 columns"),
        (64, 64, 48, "block", "48 threads are no whole number of warps"),
        (16, 16, 256, "warpgroup", "warps cannot share it out, 4 here"),
    ],
)
def test_a_product_that_warps_cannot_share_out(m: int, n: int, threads: int, scale: str, found: str):
    func = product(m, n, threads, scale)
    for run in (lambda: tilescale.emulate(func, tensors(m, n)), lambda: lowered(func)):
        with pytest.raises(ShapeError) as error:
            run()
        assert found in error.value.message
        assert "# the product" in str(error.value)
        assert error.value.hint


def test_the_emulator_of_another_machine_takes_it():
    values = tensors(16, 16)
    tilescale.emulate(product(16, 16, 128), values, machine="mi300x-8")
    assert values[2][0].unique().tolist() == [32]


@pytest.mark.parametrize(
    ("m", "n", "threads", "scale"),
    [(64, 64, 256, "block"), (32, 16, 32, "block"), (16, 32, 128, "block"), (64, 32, 256, "warpgroup")],
)
def test_a_product_that_warps_share_out(m: int, n: int, threads: int, scale: str):
    values = tensors(m, n)
    tilescale.emulate(product(m, n, threads, scale), values)
    assert values[2][0].unique().tolist() == [32]
    assert lowered(product(m, n, threads, scale)).source({})
