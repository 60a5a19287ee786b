# SPDX-License-Identifier: MIT
"""Operators that move rows: tokens to experts and back or to heads, sums with residual and norm; compared with NCCL."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
import trials
from trials import Case, checked

import tilescale
from tilescale.tuning.race import Contender, Heat, Runner

EXPERTS, CHOICES = 256, 8


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Tokens of each GPU times features, or heads times their size."""
    if gpus == 1:
        return
    for tokens, features in [(256, 1024)] if quick else [(4096, 7168), (128, 7168)]:
        experts = Experts(tokens, features)
        moved = 2 * experts.sent(tilescale.init().rank) * features * 2
        yield _heat("experts", experts, gpus, moved)
    for rows, features in [(256, 1024)] if quick else [(16, 8192), (512, 8192), (8192, 8192)]:
        yield _heat("all_reduce_rms_norm", Normed(rows, features), gpus, 0)
    for tokens in (256,) if quick else (512, 4096, 16384):
        heads = Heads(tokens, 32, 128)
        yield _heat("all_to_all", heads, gpus, tokens * 32 * 128 * 2 * (gpus - 1) / gpus)


def _heat(name: str, work: Experts | Normed | Heads, gpus: int, moved: float) -> Heat:
    entries = [Contender("nccl", work.library), Contender("tilescale", work.operator)]
    return Heat(name, work.shape, "bfloat16", gpus, "graph", "nccl", entries, bytes=moved)


class Experts:
    """Exchange of tokens with eight random experts of 256, which return the same values; weighted sums.

    NCCL moves as many rows in equal parts, there and back, without the time to permute and sum them.
    """

    def __init__(self, tokens: int, features: int):
        self.shape = self.rows, self.features = tokens, features

    def chosen(self, rank: int) -> torch.Tensor:
        """Experts of a rank's tokens, the same in each case: routes are made before."""
        scores = torch.rand(self.rows, EXPERTS, generator=torch.Generator().manual_seed(rank))
        return scores.topk(CHOICES).indices

    def sent(self, rank: int) -> int:
        """Rows that a rank sends to others."""
        size = tilescale.init().size
        owners = self.chosen(rank) // (EXPERTS // size)
        return sum(int((owners == r).any(1).sum()) for r in range(size) if r != rank)

    def draw(self, seed: int) -> Case:
        """Tokens, and the sum of their copies."""
        (x,) = trials.randoms(seed, torch.bfloat16, (self.rows, self.features))
        want = x.float() * CHOICES
        return Case((x,), want, 2.0**-6 * want.abs() + 1e-6)

    def operator(self) -> Runner:
        """Dispatch and combine by TileScale."""
        from tilescale import ops

        x, chosen = trials.nothing(*self.shape), self.chosen(tilescale.init().rank)
        routing = ops.moe_route(chosen.to(x.device), EXPERTS)
        return checked(self.draw, trials.into(x), lambda: ops.moe_combine(ops.moe_dispatch(x, routing), routing))

    def library(self) -> Runner:
        """All-to-all of as many rows by NCCL."""
        size = tilescale.init().size
        each = -(-max(map(self.sent, range(size))) // (size - 1))
        given, back = (trials.nothing(size * each, self.features) for _ in range(2))

        def call() -> torch.Tensor:
            dist.all_to_all_single(back, given)
            dist.all_to_all_single(given, back)
            return given

        return Runner(call, lambda seed: None)


class Normed:
    """Sum of all GPUs' rows, plus a residual, normalised."""

    def __init__(self, rows: int, features: int):
        self.shape = self.rows, self.features = rows, features

    def draw(self, seed: int) -> Case:
        """This rank's part; the residual and the weight are zeros and ones."""
        (x,) = trials.randoms(seed, torch.bfloat16, (self.rows, self.features))
        y = x.float()
        dist.all_reduce(y)
        want = y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + 1e-6)
        return Case((x,), want, 2.0**-6 * want.abs() + 2.0**-6)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Buffers for a part, the weight, and the residual."""
        x = trials.nothing(self.rows, self.features)
        return x, torch.ones_like(x[0]), torch.zeros_like(x)

    def operator(self) -> Runner:
        from tilescale import ops

        x, weight, residual = self.operands()
        return checked(self.draw, trials.into(x), lambda: ops.all_reduce_rms_norm(x, weight, residual)[0])

    def library(self) -> Runner:
        """NCCL, then PyTorch's norm."""
        (x, weight, residual), y = self.operands(), trials.nothing(self.rows, self.features)

        def call() -> torch.Tensor:
            y.copy_(x)
            dist.all_reduce(y)
            return torch.nn.functional.rms_norm(y.add_(residual), (self.features,), weight, 1e-6)

        return checked(self.draw, trials.into(x), call, [y])


class Heads:
    """From all heads of local tokens to local heads of all tokens, as Ulysses attention begins."""

    def __init__(self, tokens: int, heads: int, dim: int):
        self.shape = tokens, heads, dim

    def draw(self, seed: int) -> Case:
        """This rank's tokens, and the expected result, by a gather."""
        world = tilescale.init()
        (x,) = trials.randoms(seed, torch.bfloat16, (1, *self.shape))
        every = torch.empty(world.size, *self.shape, dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(every, x)
        want = every.chunk(world.size, 2)[world.rank].flatten(0, 1)[None].float()
        return Case((x,), want, torch.zeros_like(want))

    def operator(self) -> Runner:
        from tilescale import ops

        x = trials.nothing(1, *self.shape)
        return checked(self.draw, trials.into(x), lambda: ops.all_to_all(x, 2, 1))

    def library(self) -> Runner:
        """Pack the heads of each owner, then NCCL; tokens come in their order."""
        tokens, heads, dim = self.shape
        size, x = tilescale.init().size, trials.nothing(1, *self.shape)
        got = trials.nothing(size, tokens, heads // size, dim)

        def call() -> torch.Tensor:
            parts = x.view(tokens, size, heads // size, dim).transpose(0, 1).contiguous()
            dist.all_to_all_single(got, parts)
            return got.view(1, size * tokens, heads // size, dim)

        return checked(self.draw, trials.into(x), call, [got])
