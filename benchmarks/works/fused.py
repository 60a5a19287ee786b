# SPDX-License-Identifier: MIT
"""Operators for PyTorch: GEMMs with a gather, a scatter or a sum, compared with libraries and PyTorch's fused
operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import overlap
import torch
import torch.distributed as dist
import trials
from trials import Case, checked

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

LARGE, SMALL, FEWEST = (8192, 4096, 2048), (1024, 256, 128, 16), 1
"""Rows of all GPUs together, one of each where they are gathered.

A small GEMM takes less time than its launch on the host, so it is raced in a graph.
"""

SYMM_MEM_ROWS = 1024
"""Rows at which PyTorch's fused operators take part: with more they did not end (PyTorch 2.11, no multicast)."""

SHOTS = "one", "two"
"""Kernels of PyTorch's sums: each rank adds up all, or a part."""

Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """All shapes, M x N x K: N of each GPU for the all-gather, K of each GPU for the others."""
    if gpus == 1:
        return
    wide, narrow = (1792, 1024) if quick else (8192, 3584)
    works = ("ag_gemm", Gathered, narrow, wide), ("gemm_rs", Scattered, wide, narrow), ("gemm_ar", Summed, wide, narrow)
    for m in (1024, 128) if quick else (*LARGE, *SMALL):
        for name, work, n, k in works:
            entries = work(m, n, k).contenders()
            yield contest(name, (m, n, k), gpus, "eager" if m in LARGE else "graph", entries)
    for m, (name, work, n, k) in ((gpus * FEWEST, works[0]), (FEWEST, works[2])):
        yield contest(name, (m, n, k), gpus, "graph", work(m, n, k).contenders())
    for name, work, n, k in works[:2]:  # last, as they may not end here either
        made = work(SYMM_MEM_ROWS, n, k)
        entries = [*made.contenders(), Contender("symm_mem", made.symm_mem)]
        yield contest(name, (SYMM_MEM_ROWS, n, k), gpus, "eager", entries)


def contest(
    name: str, shape: tuple[int, int, int], gpus: int, mode: str, entries: list[Contender], dtype: str = "bfloat16"
) -> Heat:
    """A GEMM M x N x K compared with cuBLAS alone."""
    m, n, k = shape
    return Heat(name, shape, dtype, gpus, mode, "cublas alone", entries, 2 * m * n * k)


def symmetric(*shape: int) -> torch.Tensor:
    """A tensor in PyTorch's symmetric memory."""
    import torch.distributed._symmetric_memory as symm

    x = symm.empty(*shape, dtype=torch.bfloat16, device=trials.device())
    symm.rendezvous(x, dist.group.WORLD)
    return x


def _if_small(work: Any, *entries: Contender) -> list[Contender]:
    """Contenders that can gain where little is sent."""
    return list(entries) if work.m <= SMALL[0] else []


def _ours(work: Any) -> Contender:
    """The operator. Small GEMMs are PyTorch's, which compiles none of them for long."""
    return Contender("tilescale", work.operator, (lambda: work.operator().call()) if work.m > SMALL[1] else None)


def _operator(call: Call, a: torch.Tensor, b: torch.Tensor, draw: trials.Draw) -> Runner:
    """An operator on tensors at any address: `b` is transposed, as the weight of a torch.nn.Linear."""

    return checked(draw, _loading(a, b), lambda: call(a, b.t()))


def _loading(a: torch.Tensor, b: torch.Tensor) -> Callable[..., None]:
    """A `load` of both operands; it ignores the rest of a case."""
    return lambda *given: trials.into(a, b)(*given[:2])


class Gathered(overlap.AllGather):
    """C = A B^T: rows of A are split over the GPUs, each has columns of C."""

    def contenders(self) -> list[Contender]:
        return [
            Contender("cublas alone", lambda: self.libraries(gathers=False)),
            Contender("nccl+cublas", lambda: self.libraries(gathers=True)),
            *_if_small(self, Contender("symm_mem+cublas", self.by_symm_mem)),
            _ours(self),
        ]

    def by_symm_mem(self) -> Runner:
        """A gather by copy engine through PyTorch's symmetric memory, then cuBLAS."""
        a, b, c = symmetric(self.rows, self.k), trials.nothing(self.n, self.k), trials.nothing(self.m, self.n)
        gather, group = torch.ops.symm_mem._low_contention_all_gather, dist.group.WORLD.group_name

        def call() -> torch.Tensor:
            return torch.mm(torch.ops._c10d_functional.wait_tensor(gather(a, group)), b.T, out=c)

        return checked(self.draw, _loading(a, b), call, [c])

    def operator(self) -> Runner:
        from tilescale import ops

        a, b = trials.nothing(self.rows, self.k), trials.nothing(self.n, self.k)
        return _operator(ops.all_gather_matmul, a, b, self.draw)


class Gated(Gathered):
    """silu(A G^T) * (A U^T): G and U are the halves of B."""

    def draw(self, seed: int) -> Case:
        """Gate of a GEMM's result."""
        case = super().draw(seed)
        (gate, up), (of_gate, of_up) = case.want.chunk(2, 1), case.bound.chunk(2, 1)
        want, rise = self.ending(case.want), 1.1 * of_gate  # the slope of silu is at most 1.1
        bound = rise * (up.abs() + of_up) + torch.nn.functional.silu(gate).abs() * of_up + 2.0**-7 * want.abs()
        return Case(case.inputs, want, bound)

    def ending(self, c: torch.Tensor) -> torch.Tensor:
        """Apply the epilogue to the GEMM's result."""
        gate, up = c.chunk(2, 1)
        return torch.nn.functional.silu(gate) * up

    def operator(self) -> Runner:
        from tilescale import ops

        def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return ops.all_gather_matmul(a, b.chunk(2, 1), activation="silu", gated=True)

        return _operator(call, trials.nothing(self.rows, self.k), trials.nothing(self.n, self.k), self.draw)


class Scattered(overlap.ReduceScatter):
    """C = A B^T: the inner dimension is split over the GPUs, each ends with rows of C."""

    def contenders(self) -> list[Contender]:
        return [
            Contender("cublas alone", self.alone),
            Contender("nccl+cublas", self.libraries),
            _ours(self),
        ]

    def operator(self) -> Runner:
        from tilescale import ops

        return _operator(ops.matmul_reduce_scatter, *self.operands(), self.draw)


class Summed(overlap.ReduceScatter):
    """C = A B^T: the inner dimension is split over the GPUs, each ends with all of C."""

    def contenders(self) -> list[Contender]:
        return [
            Contender("cublas alone", self.alone),
            Contender("nccl+cublas", self.libraries),
            *_if_small(self, *(Contender(f"symm_mem+cublas, {n}-shot", partial(self.by_symm_mem, n)) for n in SHOTS)),
            _ours(self),
        ]

    def by_symm_mem(self, shots: str) -> Runner:
        """cuBLAS, then PyTorch's sum on symmetric memory."""
        (a, b), c = self.operands(), symmetric(self.m, self.n)
        group = dist.group.WORLD.group_name
        kernel = {"one": torch.ops.symm_mem.one_shot_all_reduce, "two": torch.ops.symm_mem.two_shot_all_reduce_}[shots]

        def call() -> torch.Tensor:
            torch.mm(a, b.T, out=c)
            return kernel(c, "sum", group)

        return checked(self.draw, trials.into(a, b), call, [c])

    def draw(self, seed: int) -> Case:
        """This rank's columns of A and of B^T."""
        a, b = trials.randoms(seed, torch.bfloat16, (self.m, self.k), (self.n, self.k))
        want, magnitudes = trials.product(a, b)
        rounded = want.abs()  # each part, before all are added up
        for x in (want, rounded, magnitudes):
            dist.all_reduce(x)
        size = tilescale.init().size
        return Case((a, b), want, trials.product_bound(self.k * size, 2 * want.abs() + rounded, magnitudes))

    def libraries(self) -> Runner:
        """cuBLAS, then NCCL."""
        (a, b), c = self.operands(), trials.nothing(self.m, self.n)

        def call() -> torch.Tensor:
            torch.mm(a, b.T, out=c)
            dist.all_reduce(c)
            return c

        return checked(self.draw, trials.into(a, b), call, [c])

    def operator(self) -> Runner:
        from tilescale import ops

        return _operator(ops.matmul_all_reduce, *self.operands(), self.draw)
