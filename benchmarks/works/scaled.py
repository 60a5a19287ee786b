# SPDX-License-Identifier: MIT
"""Operators of float8 matrices with scales, compared with cuBLAS alone (`torch._scaled_mm`), and with NCCL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import trials
from fused import contest
from trials import Case, checked

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

FLOAT8 = torch.float8_e4m3fn


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """M x N x K: N of each GPU for the all-gather, K of each GPU for the reduce-scatter."""
    if gpus == 1:
        return
    wide, narrow = (1792, 1024) if quick else (8192, 3584)
    for m in (1024,) if quick else (8192, 4096):
        for name, work, n, k in ("ag_gemm", Gathered, narrow, wide), ("gemm_rs", Scattered, wide, narrow):
            yield contest(name, (m, n, k), gpus, "eager", work(m, n, k).contenders(), "float8_e4m3fn")


class Product(ABC):
    """GEMM of float8 matrices; each row of A has a scale, and each row of B."""

    def __init__(self, m: int, n: int, k: int):
        self.size, self.m, self.n, self.k = tilescale.init().size, m, n, k
        self.rows = m // self.size

    def contenders(self) -> list[Contender]:
        return [
            Contender("cublas alone", self.alone),
            Contender("nccl+cublas", self.libraries),
            Contender("tilescale", self.operator, lambda: self.operator().call()),
        ]

    def operands(self, rows: int) -> list[torch.Tensor]:
        """Buffers of A, of B, and of their scales."""
        a, b = (trials.nothing(n, self.k).to(FLOAT8) for n in (rows, self.n))
        return [a, b, trials.nothing(rows, 1, dtype=torch.float32), trials.nothing(1, self.n, dtype=torch.float32)]

    def randoms(self, seed: int, rows: int) -> list[torch.Tensor]:
        """Values of the buffers, none of which is a power of two."""
        a, b = trials.randoms(seed, FLOAT8, (rows, self.k), (self.n, self.k))
        scales = trials.randoms(seed + 1, torch.float32, (rows, 1), (1, self.n))
        return [a, b, *(1 + scale.abs() for scale in scales)]

    def alone(self) -> Runner:
        """GEMM of this rank alone: an incomplete result, for comparison."""
        given = self.operands(self.m)
        trials.into(*given)(*self.randoms(0, self.m))
        return Runner(lambda: multiplied(*given))

    @abstractmethod
    def libraries(self) -> Runner:
        """NCCL and cuBLAS, one after the other."""

    @abstractmethod
    def operator(self) -> Runner:
        """Ours."""


def multiplied(a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor) -> torch.Tensor:
    """A B^T by cuBLAS, with its fastest accumulation."""
    return torch._scaled_mm(a, b.t(), of_a, of_b, out_dtype=torch.bfloat16, use_fast_accum=True)


def reference(a: torch.Tensor, b: torch.Tensor, of_a: torch.Tensor, of_b: torch.Tensor) -> list[torch.Tensor]:
    """A B^T in float32, and the root of the sum of the squares of its terms.

    Tensor cores keep some 14 bits of a sum of float8 products (DeepSeek-V3 technical report, arXiv:2412.19437, section
    3.3.2), and drop what is below: by thousands of terms, a few percent of the usual size of a sum.
    """
    a, b = a.float() * of_a, b.float() * of_b.t()
    return [a @ b.T, (a.square() @ b.square().T).sqrt()]


def bound(want: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    """Error bound of a result."""
    return 2.0**-7 * want.abs() + 2.0**-3 * spread


class Gathered(Product):
    """GEMM after a gather: rows of A are split over the GPUs, each has columns of C."""

    def draw(self, seed: int) -> Case:
        """This rank's rows of A, its B, and scales of both."""
        given = self.randoms(seed, self.rows)
        whole = [torch.empty(self.m, x.shape[1], dtype=x.dtype, device=x.device) for x in (given[0], given[2])]
        for all_of, own in zip(whole, (given[0], given[2]), strict=True):
            dist.all_gather_into_tensor(all_of.view(torch.uint8), own.view(torch.uint8))
        want, spread = reference(whole[0], given[1], whole[1], given[3])
        return Case(tuple(given), want, bound(want, spread))

    def libraries(self) -> Runner:
        """NCCL gathers rows and scales."""
        given, whole = self.operands(self.rows), self.operands(self.m)
        pairs = [(whole[i].view(torch.uint8), given[i].view(torch.uint8)) for i in (0, 2)]

        def call() -> torch.Tensor:
            for all_of, own in pairs:
                dist.all_gather_into_tensor(all_of, own)
            return multiplied(whole[0], given[1], whole[2], given[3])

        return checked(self.draw, trials.into(*given), call)

    def operator(self) -> Runner:
        from tilescale import ops

        a, b, *scales = given = self.operands(self.rows)
        call: Callable[[], Any] = lambda: ops.all_gather_matmul(a, b.t(), scales=tuple(scales))  # noqa: E731
        return checked(self.draw, trials.into(*given), call)


class Scattered(Product):
    """GEMM with a reduce-scatter: the inner dimension is split over the GPUs, each ends with rows of C."""

    def draw(self, seed: int) -> Case:
        """This rank's columns of A and of B^T, and scales of both."""
        given = self.randoms(seed, self.m)
        want, spread = reference(*given)
        spread.square_()
        for x in (want, spread):
            dist.all_reduce(x)
        mine = slice(tilescale.init().rank * self.rows, (tilescale.init().rank + 1) * self.rows)
        return Case(tuple(given), want[mine], bound(want[mine], spread[mine].sqrt()))

    def libraries(self) -> Runner:
        """Sum the results by NCCL."""
        given, c = self.operands(self.m), trials.nothing(self.rows, self.n)

        def call() -> torch.Tensor:
            dist.reduce_scatter_tensor(c, multiplied(*given))
            return c

        return checked(self.draw, trials.into(*given), call, [c])

    def operator(self) -> Runner:
        from tilescale import ops

        a, b, *scales = given = self.operands(self.m)
        call: Callable[[], Any] = lambda: ops.matmul_reduce_scatter(a, b.t(), scales=tuple(scales))  # noqa: E731
        return checked(self.draw, trials.into(*given), call)
