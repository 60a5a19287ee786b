# SPDX-License-Identifier: MIT
"""The shapes of kraken's five benchmarks: NCCL, kraken's Triton kernels where Python finds them, and our operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import exchanges
import fused
import torch
import torch.distributed as dist
import trials
import whole_tensors
from trials import Case, checked

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

FEATURES, INNER, COLUMNS = 5120, (4096, 8192, 16384), 6656
ROWS = tuple(1 << n for n in range(10))
"""Shapes of sums with a bias."""

HEADS, LENGTH, SIZE = 8, 65536, 128
"""Shapes of keys and values; the length is that of all ranks."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """All works, in bfloat16. Eager, as kraken times its own; sums in graphs, too."""
    if gpus == 1:
        return
    for mode in ("eager", "graph"):
        for elements in (1 << n for n in ((12, 16) if quick else range(12, 21))):
            yield _with_kraken(whole_tensors.Work("allreduce", 2 * elements).heat(gpus, mode, False), Sum(elements))
        for rows in ROWS[::5] if quick else ROWS:
            for name, work in (("allreduce_bias", Biased(rows)), ("allreduce_bias_rms_norm", Normed(rows, FEATURES))):
                entries = [Contender("nccl", work.library), Contender("tilescale", work.operator)]
                heat = Heat(name, (rows, FEATURES), "bfloat16", gpus, mode, "nccl", entries)
                yield _with_kraken(heat, work)
    for rows in (128,) if quick else (128, 256, 512, 1024):
        for k in INNER[:1] if quick else INNER:
            gathered, scattered = Gathered(rows * gpus, COLUMNS, k), Scattered(rows, COLUMNS, k)
            for name, product in (("ag_gemm", gathered), ("gemm_rs", scattered)):
                shape = product.m, COLUMNS, k
                yield _with_kraken(fused.contest(name, shape, gpus, "eager", product.contenders()), product)
    keys = Keys((4096 if quick else LENGTH) // gpus)
    entries = [Contender("nccl", keys.library), Contender("tilescale", keys.operator)]
    yield Heat("gather_keys", keys.shape, "bfloat16", gpus, "eager", "nccl", entries)


def _with_kraken(heat: Heat, work: Any) -> Heat:
    heat.contenders.insert(-1, Contender("kraken", work.kraken))
    return heat


class Sum(whole_tensors.Work):
    """Sum of a number of elements of all ranks."""

    def __init__(self, elements: int):
        super().__init__("allreduce", 2 * elements)

    def kraken(self) -> Runner:
        """kraken's kernel, of a tensor in PyTorch's symmetric memory."""
        from kraken.comm import one_shot_all_reduce

        x = fused.symmetric(self.elements)
        return checked(self.draw, x.copy_, lambda: one_shot_all_reduce(x))


class Biased:
    """Sum of all ranks' rows, plus a bias that all have."""

    def __init__(self, rows: int):
        self.shape = rows, FEATURES

    def draw(self, seed: int) -> Case:
        (x,) = trials.randoms(seed, torch.bfloat16, self.shape)
        sums = torch.stack([x.float(), x.float().abs()])
        dist.all_reduce(sums)
        return Case((x,), sums[0] + 1, 2.0**-7 * (sums[1] + 1))

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers for a part, and the bias."""
        x = trials.nothing(*self.shape)
        return x, torch.ones_like(x)

    def library(self) -> Runner:
        """NCCL, then a sum by PyTorch."""
        (x, bias), y = self.operands(), trials.nothing(*self.shape)

        def call() -> torch.Tensor:
            dist.all_reduce(y.copy_(x))
            return y.add_(bias)

        return checked(self.draw, trials.into(x), call)

    def operator(self) -> Runner:
        """The operator, then a sum by PyTorch."""
        from tilescale import ops

        x, bias = self.operands()
        return checked(self.draw, trials.into(x), lambda: ops.all_reduce(x).add_(bias))

    def kraken(self) -> Runner:
        """kraken's kernel, which adds the bias."""
        from kraken.fused import one_shot_all_reduce_bias as function

        (x, bias), y, room = self.operands(), trials.nothing(*self.shape), fused.symmetric(*self.shape)
        return checked(self.draw, trials.into(x), trials.returning(y, function, room, x, bias, y), [y])


class Normed(exchanges.Normed):
    """The same, normalised; the operator takes the bias as the residual."""

    def kraken(self) -> Runner:
        from kraken.fused import one_shot_all_reduce_bias_rms_norm as function

        (x, weight, bias), y, room = self.operands(), trials.nothing(*self.shape), fused.symmetric(*self.shape)
        return checked(self.draw, trials.into(x), trials.returning(y, function, room, x, bias, weight, y), [y])


class Gathered(fused.Gathered):
    """GEMM of the rows of all ranks and this rank's columns."""

    def kraken(self) -> Runner:
        """kraken's kernel on a shard in PyTorch's symmetric memory."""
        from kraken.fused import all_gather_matmul

        a, b = fused.symmetric(self.rows, self.k), trials.nothing(self.n, self.k)
        return fused._operator(lambda x, weight: all_gather_matmul(x, weight)[1], a, b, self.draw)


class Scattered(fused.Scattered):
    """Columns times rows of all ranks."""

    def kraken(self) -> Runner:
        """kraken's kernel, of a matrix in PyTorch's symmetric memory."""
        from kraken.fused import gemm_reduce_scatter

        a, b = fused.symmetric(self.m, self.k), trials.nothing(self.n, self.k)
        return fused._operator(gemm_reduce_scatter, a, b, self.draw)


class Keys:
    """Keys and values of a sequence over the ranks, gathered: the baseline of kraken's masked gather."""

    def __init__(self, length: int):
        self.shape = 2, HEADS, length, SIZE

    def draw(self, seed: int) -> Case:
        """This rank's part of both, and the whole."""
        (x,) = trials.randoms(seed, torch.bfloat16, self.shape)
        want = torch.empty(tilescale.init().size, *x.shape, dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(want, x)
        return Case((x,), want.float(), torch.zeros_like(want, dtype=torch.float32))

    def library(self) -> Runner:
        x, y = trials.nothing(*self.shape), trials.nothing(tilescale.init().size, *self.shape)
        return self._of(x, trials.returning(y, lambda: dist.all_gather_into_tensor(y, x)))

    def operator(self) -> Runner:
        from tilescale import ops

        x = trials.nothing(*self.shape)
        return self._of(x, lambda: ops.all_gather(x))

    def _of(self, x: torch.Tensor, call: Callable[[], torch.Tensor]) -> Runner:
        return checked(self.draw, trials.into(x), call)
