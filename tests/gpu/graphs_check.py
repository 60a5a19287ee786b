# SPDX-License-Identifier: MIT
"""The caller's graphs of forward and backward: `torchrun --nproc-per-node 2 tests/gpu/graphs_check.py [names]`.

Each operator is called eagerly on the default stream, more often than calls are recorded. Then its forward and backward
are captured, as PyTorch does it, on a stream for the graph, and replayed with other inputs; results and gradients are
compared with float64. A node of autograd that outlives its call would still belong to the default stream, for which a
capture cannot wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.autograd_nodes import no_graph_is_kept  # noqa: E402
from tests.gpu.ops_support import late, leaf, main, near, poison, random, say  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK, SIZE, everyones  # noqa: E402
from tilescale import ops  # noqa: E402

CALLS, REPLAYS = 14, 3

SIZES = [(64, 512, 256), (2048, 2048, 1024)]
"""Rows of a rank, K, N: sent after the GEMM, and while it multiplies."""

EXPERTS, CHOICES = 4, 2
"""Experts of a rank, and a token's choices."""


@dataclass
class Case:
    """An operator: its leaves, its result, and all ranks' results, (ranks, ...), of all ranks' leaves, (ranks, ...)."""

    title: str
    leaves: list[torch.Tensor]
    call: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]

    def __post_init__(self) -> None:
        self.grad = torch.zeros_like(self.call(*(x.detach() for x in self.leaves)))

    def step(self) -> torch.Tensor:
        """Forward and backward; the result."""
        for x in self.leaves:
            x.grad = None
        y = self.call(*self.leaves)
        y.backward(self.grad)
        return y.detach()

    def draw(self) -> None:
        """Other inputs, at the same addresses."""
        with torch.no_grad():
            for x in (*self.leaves, self.grad):
                x.copy_(random(*x.shape))

    def compare(self, y: torch.Tensor, when: str) -> None:
        """Raises ValueError if the result, or a gradient, is not the reference's."""
        whole = [leaf(everyones(x.detach()).double()) for x in self.leaves]
        want = self.reference(*whole)
        near(f"{self.title}, {when}: result", y, want[RANK].detach())
        gradients = torch.autograd.grad(want, whole, everyones(self.grad).double())
        for number, (x, one) in enumerate(zip(self.leaves, gradients, strict=True)):
            near(f"{self.title}, {when}: gradient {number}", x.grad, one[RANK])


def matmul_reduce_scatter() -> Iterator[Case]:
    for rows, k, n in SIZES:
        yield Case(
            f"matmul_reduce_scatter {rows}x{n}x{k}",
            [leaf(random(SIZE * rows, k)), leaf(random(k, n))],
            ops.matmul_reduce_scatter,
            lambda a, b: torch.stack((a @ b).sum(0).chunk(SIZE)),
        )


def all_gather_matmul() -> Iterator[Case]:
    for rows, k, n in SIZES:
        yield Case(
            f"all_gather_matmul {rows}x{n}x{k}",
            [leaf(random(rows, k)), leaf(random(k, n))],
            ops.all_gather_matmul,
            lambda a, b: a.flatten(0, 1) @ b,
        )


def all_reduce() -> Iterator[Case]:
    for rows, k, _ in SIZES:
        x = leaf(random(rows, k))
        yield Case(f"all_reduce {rows}x{k}", [x], ops.all_reduce, lambda x: x.sum(0).expand(x.shape))


def linear() -> Iterator[Case]:
    """Pairs of layers, tokens of one or several sequences split over the ranks outside of each."""
    for batch, (rows, k, n) in product([(), (3,)], SIZES):
        first, last = (nn.Linear(*sizes, bias=False, device=DEVICE) for sizes in ((k, SIZE * n), (SIZE * n, k)))
        up = ops.ColumnParallelLinear.shard(first.bfloat16())
        down = ops.RowParallelLinear.shard(last.bfloat16())
        yield Case(
            f"linear layers {'x'.join(map(str, (*batch, rows, n, k)))}",
            [leaf(random(*batch, rows, k)), up.weight, down.weight],
            lambda x, *_, up=up, down=down: down(up(x)),
            lambda x, up, down: torch.stack(_pair(torch.cat(list(x), -2), up, down).chunk(SIZE, -2)),
        )


def _pair(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """All tokens, of the weights of all ranks."""
    return torch.stack([x @ first.t() @ last.t() for first, last in zip(up, down, strict=True)]).sum(0)


def moe_layer() -> Iterator[Case]:
    tokens, features, inner = 200, 256, 128
    chosen = torch.rand(tokens, EXPERTS * SIZE, device=DEVICE).topk(CHOICES).indices
    everyone = everyones(chosen)

    def reference(x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for expert, (first, last) in enumerate(zip(gate_up.flatten(0, 1), down.flatten(0, 1), strict=True)):
            gate, up = (x @ first.t()).chunk(2, -1)
            share = (weights * (everyone == expert)).sum(-1, keepdim=True)
            y = y + nn.functional.silu(gate) * up @ last.t() * share
        return y

    yield Case(
        "layer of experts",
        [
            leaf(random(tokens, features)),
            leaf(random(tokens, CHOICES, dtype=torch.float32)),
            leaf(random(EXPERTS, 2 * inner, features)),
            leaf(random(EXPERTS, features, inner)),
        ],
        lambda x, weights, gate_up, down: ops.moe_layer(x, (chosen, weights), gate_up, down),
        reference,
    )


CASES = matmul_reduce_scatter, all_gather_matmul, all_reduce, linear, moe_layer


def compilation(_: slice) -> None:
    """All kernels at once, on all CPU cores."""
    ops.warm_up(lambda: [case.step() for cases in CASES for case in cases()])
    say("PASS compilation")


def captured(cases: Callable[[], Iterator[Case]], only: slice) -> None:
    for case in list(cases())[only]:
        for turn in range(CALLS):
            case.draw()
            late(turn)
            with no_graph_is_kept(case.leaves):
                y = case.step()
        case.compare(y, "eager")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = case.step()
        for turn in range(REPLAYS):
            case.draw()
            for made in (y, *(x.grad for x in case.leaves)):
                made.fill_(torch.nan)
            poison()
            late(turn)
            graph.replay()
            case.compare(y, f"replay {turn}")
        say(f"PASS {case.title}")


if __name__ == "__main__":
    main({"compilation": compilation} | {cases.__name__: partial(captured, cases) for cases in CASES})
