# SPDX-License-Identifier: MIT
"""A layer of experts split over the ranks: by PyTorch, by separate operators, by NCCL with grouped GEMMs, by one
operator.

Every rank has its tokens, the experts that they chose, and their weights; contenders are compared with all experts in
float32 on each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import expert_grids
import torch
import torch.distributed as dist
import trials
from trials import Case, checked

import tilescale
from tilescale import ops
from tilescale.ops import grouped_gemm
from tilescale.ops.gemm_tiles import at_once
from tilescale.ops.group import team_of
from tilescale.ops.kernels import kernel
from tilescale.ops.layout import dtype_of
from tilescale.ops.moe_tables import ALIGN
from tilescale.tuning.race import Contender, Heat, Runner

FEATURES, INNER, EXPERTS, CHOICES = 2048, 768, 64, 8
TOKENS = (16, 64, 128, 512, 4096)

BOUND = 2.0**-4
"""Error bound of elements, relative to the largest: three roundings to bfloat16, and sums of them."""


def heats(quick: bool, gpus: int) -> Iterator[Heat]:
    """Tokens of a rank x features x inner x experts."""
    if gpus == 1:
        return
    for tokens in (16, 512) if quick else TOKENS:
        for trains in (False, True):
            for mode in ("eager", "graph", *(["host"] if tokens == TOKENS[0] else [])):
                left_out = (HOST_KNOWS if mode == "graph" else set()) | (NO_BACKWARD if trains else set())
                layers = {name: layer for name, layer in LAYERS.items() if name not in left_out}
                yield heat(tokens, trains, mode, layers, gpus)


def heat(tokens: int, trains: bool, mode: str, layers: dict[str, Layer], gpus: int, dtype: str = "bfloat16") -> Heat:
    """A race of several layers with the same work; the first one is the baseline."""
    work, kind = Work(tokens, trains), "forward and backward" if trains else "forward"
    entries = [Contender(name, functools.partial(work.runner, layer)) for name, layer in layers.items()]
    flops = (3 if trains else 1) * tokens * CHOICES * 6 * FEATURES * INNER
    shape = tokens, FEATURES, INNER, EXPERTS
    return Heat(f"experts {kind}", shape, dtype, gpus, mode, next(iter(layers)), entries, flops=flops)


Layer = Callable[..., torch.Tensor]
"""Function of tokens, their experts and weights, and this rank's gate_up and down."""


def ours(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    return ops.moe_layer(x, (chosen, weights), up, down, **options)


def separate(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    routing = ops.moe_route(chosen, EXPERTS, weights)
    gate, up = ops.grouped_matmul(ops.moe_dispatch(x, routing), gate_up.mT, routing).chunk(2, -1)
    y = ops.grouped_matmul(torch.nn.functional.silu(gate) * up, down.mT, routing)
    return ops.moe_combine(y, routing, routing.weights)


def torchs(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """PyTorch's all-to-all with sizes that the host knows, and grouped_mm."""

    def experts(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ends = counts.cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(rows, gate_up.mT, offs=ends).chunk(2, -1)
        return torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.mT, offs=ends)

    return _exchanged(x, chosen, weights, experts)


def mixed(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """PyTorch's all-to-all, and our GEMMs; forward only."""

    def experts(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        tiles = (counts + ALIGN - 1) // ALIGN
        room = int(tiles.sum()) * ALIGN
        owners = torch.arange(len(counts), device=x.device).repeat_interleave(tiles).to(torch.int32)
        begins = (tiles.cumsum(0) - tiles) * ALIGN - (counts.cumsum(0) - counts)
        place = torch.arange(len(rows), device=x.device) + begins.repeat_interleave(counts)
        given, active, y = (rows.new_empty(max(room, ALIGN), n) for n in (FEATURES, INNER, FEATURES))
        given[place] = rows
        team, dtype = team_of(""), dtype_of(x)
        made = kernel(expert_grids.gated_program, team, INNER, FEATURES, dtype, False, at_once())
        used = tiles.sum(0, keepdim=True, dtype=torch.int32)
        made(given, gate_up, owners, used, rows.new_empty(1, 1), active)
        kernel(grouped_gemm.program, team, FEATURES, INNER, dtype, True, at_once())(active, down, owners, used, y)
        return y[place]

    return _exchanged(x, chosen, weights, experts)


def _exchanged(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Exchange rows with their experts by NCCL; `experts` takes rows by expert, and the number of rows of each."""
    size = dist.get_world_size()
    local = EXPERTS // size
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
    come = torch.empty_like(counts)
    dist.all_to_all_single(come, counts)
    given, taken = counts.view(size, local).sum(1).tolist(), come.view(size, local).sum(1).tolist()
    token = order // CHOICES
    arrived = _all_to_all(x[token], taken, given)
    # Rows come by rank, then by expert; GEMMs want them by expert.
    expert = torch.arange(local, device=x.device).repeat(size).repeat_interleave(come)
    by_expert = expert.argsort(stable=True)
    y = experts(arrived[by_expert], come.view(size, local).sum(0))
    back = _all_to_all(y[by_expert.argsort()], given, taken)
    share = weights.flatten()[order][:, None].to(back.dtype)
    return torch.zeros_like(x).index_add(0, token, back * share)


def _all_to_all(x: torch.Tensor, taken: list[int], given: list[int]) -> torch.Tensor:
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    return all_to_all_single_autograd(x, taken, given, dist.group.WORLD)


LAYERS: dict[str, Layer] = {
    "torch": torchs,
    "operators": separate,
    "nccl, tilescale's GEMMs": mixed,
    "tilescale": ours,
}

HOST_KNOWS = {"torch", "nccl, tilescale's GEMMs"}
"""Contenders in which the host waits for sizes: CUDA graphs cannot capture them."""

NO_BACKWARD = {"nccl, tilescale's GEMMs"}


@dataclass(frozen=True)
class Work:
    """Forward, or forward and backward, of a number of tokens a rank."""

    tokens: int
    trains: bool

    def experts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's gate_up and down, the same each time."""
        local = EXPERTS // tilescale.init().size
        gate_up, down = trials.randoms(7, torch.bfloat16, (local, 2 * INNER, FEATURES), (local, FEATURES, INNER))
        return gate_up.mul_(10 * FEATURES**-0.5), down.mul_(10 * INNER**-0.5)

    def draw(self, seed: int) -> Case:
        """Tokens, their experts and weights, and a gradient; and the result, or the gradient of the tokens."""
        x, grad = trials.randoms(seed, torch.bfloat16, *[(self.tokens, FEATURES)] * 2)
        (scores,) = trials.randoms(seed + 100, torch.float32, (self.tokens, EXPERTS))
        weights, chosen = scores.mul(10).softmax(-1).topk(CHOICES)
        x.mul_(10)
        want = self.wanted(x, chosen, weights, grad)
        return Case((x, chosen, weights, grad), want, BOUND * want.abs().max().expand(want.shape))

    def wanted(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Apply each token's experts in float32."""
        given = x.float().requires_grad_()
        y = torch.zeros_like(given)
        for rank, (gate_ups, downs) in enumerate(zip(*(_of_all(part) for part in self.experts()), strict=True)):
            for number, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True)):
                where = (chosen == rank * len(gate_ups) + number).nonzero(as_tuple=True)
                gate, up = (given[where[0]] @ gate_up.float().t()).chunk(2, -1)
                made = (torch.nn.functional.silu(gate) * up) @ down.float().t()
                y = y.index_add(0, where[0], made * weights[where][:, None])
        return torch.autograd.grad(y, given, grad.float())[0] if self.trains else y.detach()

    def runner(self, layer: Layer) -> Runner:
        """A contender, on its inputs."""
        x, grad = (trials.nothing(self.tokens, FEATURES) for _ in range(2))
        chosen = torch.zeros(self.tokens, CHOICES, dtype=torch.int64, device=x.device)
        weights = torch.zeros(self.tokens, CHOICES, device=x.device)
        experts = [part.requires_grad_(self.trains) for part in self.experts()]
        leaves = [x.requires_grad_(self.trains), weights.requires_grad_(self.trains), *experts]

        def call() -> torch.Tensor:
            y = layer(x, chosen, weights, *experts)
            return torch.autograd.grad(y, leaves, grad)[0] if self.trains else y

        def load(*given: torch.Tensor) -> None:
            for place, one in zip((x, chosen, weights, grad), given, strict=True):
                place.data.copy_(one)

        return checked(self.draw, load, call)


def _of_all(x: torch.Tensor) -> list[torch.Tensor]:
    every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(every, x)
    return every
