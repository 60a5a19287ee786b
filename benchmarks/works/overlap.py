# SPDX-License-Identifier: MIT
"""All-gather + GEMM and GEMM + reduce-scatter: TileScale's programs, the parts one after the other, and PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import programs
import torch
import torch.distributed as dist
import trials
from programs import Tiling
from trials import Case, checked, ours

import tilescale
from tilescale.tuning.libraries import fused_group, load_kernels
from tilescale.tuning.race import Contender, Heat, Runner

CHUNK_ROWS = 512
"""Rows of a chunk, at most."""
BLOCKS, SENDERS = 132, 8
"""Blocks of a grid that is resident on an H100 or H200, and number of sending blocks: raced with 4 to 16."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """All shapes, M x N x K: N of each GPU for the all-gather, K of each GPU for the reduce-scatter."""
    if gpus == 1:
        return
    for shape in [(1024, 1792, 1024)] if quick else [(4096, 3584, 8192), (8192, 3584, 8192)]:
        yield _heat("ag_gemm", shape, AllGather(*shape).contenders())
    for shape in [(1024, 2048, 512)] if quick else [(8192, 8192, 3584), (4096, 8192, 3584)]:
        yield _heat("gemm_rs", shape, ReduceScatter(*shape).contenders())


def _heat(work: str, shape: tuple[int, int, int], contenders: list[Contender]) -> Heat:
    m, n, k = shape
    gpus, flops = tilescale.init().size, 2 * m * n * k
    return Heat(work, shape, "bfloat16", gpus, "eager", "cublas alone", contenders, flops)


class AllGather:
    """C = A B^T: rows of A are split over the GPUs, each has columns of C."""

    def __init__(self, m: int, n: int, k: int):
        self.size, self.m, self.n, self.k = tilescale.init().size, m, n, k
        self.rows = m // self.size

    def contenders(self) -> list[Contender]:
        shape = self.size, self.m, self.n, self.k
        tiling = Tiling(n=max((n for n in (256, 224) if self.n % n == 0), key=self._rate))
        turns, chunk = replace(tiling, stages=3), min(CHUNK_ROWS, self.rows)  # stages next to a tile of the result
        apart = lambda: programs.ag_gemm_queue(*shape, tiling, chunk, product=programs.multiply_by_warpgroups)  # noqa: E731
        return [
            Contender("cublas alone", lambda: self.libraries(gathers=False)),
            Contender("nccl+cublas", lambda: self.libraries(gathers=True)),
            Contender("symm_mem", self.symm_mem),
            ours("tilescale", lambda: programs.ag_gemm_queue(*shape, turns, chunk, BLOCKS), self.in_place),
            ours("tilescale, a block a tile", lambda: programs.ag_gemm_queue(*shape, tiling, chunk), self.in_place),
            ours("tilescale, warpgroups apart", apart, self.in_place),
            ours("tilescale senders", lambda: programs.ag_gemm_senders(*shape, tiling, chunk, SENDERS), self.in_place),
            ours("tilescale phases", lambda: programs.ag_gemm_phases(*shape, tiling), self.phases),
        ]

    def _rate(self, wide: int) -> float:
        """Fraction of the best rate with tiles of a width: the last wave of blocks is not full, and small tiles load
        more for each product (721 of 745 TFLOP/s with 128 x 224 on an H200).
        """
        waves = (self.m // Tiling.m) * (self.n // wide) / BLOCKS
        return waves / math.ceil(waves) * (1.0 if wide == 256 else 0.97)

    def draw(self, seed: int) -> Case:
        """This rank's rows of A, its B, the whole of A."""
        a, b = trials.randoms(seed, torch.bfloat16, (self.rows, self.k), (self.n, self.k))
        whole = torch.empty(self.m, self.k, dtype=a.dtype, device=a.device)
        dist.all_gather_into_tensor(whole, a)
        want, magnitudes = trials.product(whole, b)
        return Case((a, b, whole), want, trials.product_bound(self.k, want, magnitudes))

    def libraries(self, gathers: bool) -> Runner:
        """cuBLAS, after NCCL or on previously gathered rows."""
        a, b = trials.nothing(self.rows, self.k), trials.nothing(self.n, self.k)
        whole, c = trials.nothing(self.m, self.k), trials.nothing(self.m, self.n)

        def load(shard: torch.Tensor, weights: torch.Tensor, all_shards: torch.Tensor) -> None:
            trials.into(a, b)(shard, weights)
            whole.fill_(torch.nan) if gathers else whole.copy_(all_shards)

        def call() -> torch.Tensor:
            if gathers:
                dist.all_gather_into_tensor(whole, a)
            return self.ending(torch.mm(whole, b.T, out=c))

        return checked(self.draw, load, call, [c])

    def ending(self, c: torch.Tensor) -> torch.Tensor:
        """Epilogue of the GEMM: none."""
        return c

    def symm_mem(self) -> Runner:
        """PyTorch's fused operator."""
        import torch.distributed._symmetric_memory as symm

        group, b = fused_group(), trials.nothing(self.n, self.k)
        a = symm.empty(self.rows, self.k, dtype=torch.bfloat16, device=trials.device())
        symm.rendezvous(a, dist.group.WORLD)
        load_kernels(a, b.T)

        def call() -> torch.Tensor:
            return torch.ops.symm_mem.fused_all_gather_matmul(a, [b.T], gather_dim=0, group_name=group)[1][0]

        return checked(self.draw, lambda shard, weights, _: trials.into(a, b)(shard, weights), call)

    def in_place(self, kernel: Any) -> Runner:
        """A program with the local rows in the gathered tensor."""
        a = trials.symmetric(self.size, self.rows, self.k)
        return self._own(kernel, a, a[tilescale.init().rank])

    def phases(self, kernel: Any) -> Runner:
        """A program with a workspace for the gathered tensor."""
        a = trials.nothing(1, self.rows, self.k)
        return self._own(kernel, a, a[0])

    def _own(self, kernel: Any, a: torch.Tensor, mine: torch.Tensor) -> Runner:
        b, c = trials.nothing(self.n, self.k), trials.nothing(self.size, self.rows, self.n)

        def load(shard: torch.Tensor, weights: torch.Tensor, _: torch.Tensor) -> None:
            a.fill_(torch.nan)  # peers' rows arrive during the call
            trials.into(mine, b)(shard, weights)

        return checked(self.draw, load, trials.returning(c, kernel, a, b, c), [c], kernel.synchronize)


class ReduceScatter:
    """C = A B^T: the inner dimension is split over the GPUs, each ends with rows of C."""

    def __init__(self, m: int, n: int, k: int):
        self.size, self.m, self.n, self.k = tilescale.init().size, m, n, k
        self.rows = m // self.size

    def contenders(self) -> list[Contender]:
        shape, chunk = (self.size, self.m, self.n, self.k), min(CHUNK_ROWS, self.rows)
        turns = Tiling(stages=3)  # number of stages next to a tile of the result
        return [
            Contender("cublas alone", self.alone),
            Contender("nccl+cublas", self.libraries),
            Contender("symm_mem", self.symm_mem),
            ours("tilescale", lambda: programs.gemm_rs_queue(*shape, turns, chunk, BLOCKS), self.own),
            ours("tilescale, a block a tile", lambda: programs.gemm_rs_queue(*shape, Tiling(), chunk), self.own),
            ours("tilescale direct", lambda: programs.gemm_rs_direct(*shape, turns, BLOCKS), self.own),
        ]

    def draw(self, seed: int) -> Case:
        """This rank's columns of A and of B^T."""
        a, b = trials.randoms(seed, torch.bfloat16, (self.m, self.k), (self.n, self.k))
        part, magnitudes = trials.product(a, b)
        rounded = part.abs()  # each part, before all are added up
        for x in (part, rounded, magnitudes):
            dist.all_reduce(x)
        mine = slice(tilescale.init().rank * self.rows, (tilescale.init().rank + 1) * self.rows)
        want = part[mine]
        bound = trials.product_bound(self.k * self.size, want.abs() + rounded[mine], magnitudes[mine])
        return Case((a, b), want, bound)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers of A and B."""
        return trials.nothing(self.m, self.k), trials.nothing(self.n, self.k)

    def alone(self) -> Runner:
        """GEMM of this rank alone: an incomplete result, for comparison."""
        a, b = self.operands()
        partial = trials.nothing(self.m, self.n)
        trials.into(a, b)(*self.draw(0).inputs)
        return Runner(lambda: torch.mm(a, b.T, out=partial))

    def libraries(self) -> Runner:
        """cuBLAS, then NCCL."""
        a, b = self.operands()
        partial, c = trials.nothing(self.m, self.n), trials.nothing(self.rows, self.n)

        def call() -> torch.Tensor:
            torch.mm(a, b.T, out=partial)
            dist.reduce_scatter_tensor(c, partial)
            return c

        return checked(self.draw, trials.into(a, b), call, [c, partial])

    def symm_mem(self) -> Runner:
        """PyTorch's fused operator."""
        (a, b), group = self.operands(), fused_group()
        load_kernels(a[: self.rows], b.T)
        scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter
        call = lambda: scatter(a, b.T, "sum", scatter_dim=0, group_name=group)  # noqa: E731
        return checked(self.draw, trials.into(a, b), call)

    def own(self, kernel: Any) -> Runner:
        (a, b), c = self.operands(), trials.nothing(self.rows, self.n)
        call: Callable[[], torch.Tensor] = trials.returning(c, kernel, a.view(self.size, self.rows, self.k), b, c)
        return checked(self.draw, trials.into(a, b), call, [c], kernel.synchronize)
