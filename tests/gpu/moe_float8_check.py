# SPDX-License-Identifier: MIT
"""A layer of float8 experts on GPUs: `torchrun --nproc-per-node 2 tests/gpu/moe_float8_check.py`, see `ops_check.py`.

Results are compared with those in float64 of the same quantization; ranks out of step, workspaces full of NaN.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.ops_support import main, random, routings, runs, say  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK, SIZE, everyones  # noqa: E402
from tests.ops import float8_experts  # noqa: E402
from tests.ops.float8_experts import ON_GPUS, random_expert, wanted  # noqa: E402
from tilescale import ops  # noqa: E402

SMALL, LARGE = (256, 128, 4, 2), (7168, 2048, 8, 8)
"""Features, inner, experts of a rank, choices."""

SHAPES = [(1, *SMALL), (33, *SMALL), (700, *SMALL), (16, *LARGE), (1000, *LARGE)]


near = functools.partial(float8_experts.near, bounds=ON_GPUS)


class Layer:
    """Random tokens and experts, and what the layer is to make of them."""

    def __init__(self, tokens: int, features: int, inner: int, local: int, choices: int):
        self.x, self.local = random(tokens, features).mul_(10), local
        experts = [random_expert(features, inner, device=DEVICE) for _ in range(local)]
        self.gate_up, self.down, *self.scales = (torch.stack(each) for each in zip(*experts, strict=True))
        self.weights = torch.rand(tokens, choices, device=DEVICE)
        self.chosen = torch.rand(tokens, local * SIZE, device=DEVICE).topk(choices).indices

    def call(self, **options: object) -> torch.Tensor:
        return ops.moe_layer(
            self.x, (self.chosen, self.weights), self.gate_up, self.down, scales=tuple(self.scales), **options
        )

    def wanted(self) -> torch.Tensor:
        every = [everyones(t).flatten(0, 1) for t in (self.gate_up, self.down, *self.scales)]
        return wanted(self.x, self.chosen, self.weights, list(zip(*every, strict=True)))


def check_compilation(_: slice) -> None:
    """All kernels at once, on all CPU cores."""
    ops.warm_up(lambda: [Layer(1, *kind).call() for kind in (SMALL, LARGE)])
    say("PASS compilation")


def check_forward(only: slice) -> None:
    """Eager, repeated, in a graph; the same bits each time."""
    for shape in SHAPES[only]:
        layer, title = Layer(*shape), f"layer of float8 experts {shape}"
        want = layer.wanted()
        runs(title, layer.call, functools.partial(near, title, want=want))
        first = layer.call()
        error = (first.double() - want).norm() / want.norm()
        say(f"    off by {float(error):.2g} of the norm in float64")
        if not all(torch.equal(first, layer.call()) for _ in range(12)):
            raise ValueError(f"{title}: other bits each time")


def check_routings(_: slice) -> None:
    """All to one expert, none to a rank, ties, none at all, the same expert twice."""
    tokens, (_, _, local, choices) = 300, SMALL
    for name, chosen in routings(tokens, local, choices).items():
        layer = Layer(tokens, *SMALL)
        layer.chosen = chosen()
        runs(f"float8 experts, {name}", layer.call, functools.partial(near, name, want=layer.wanted()))


def check_numbers_of_tokens(_: slice) -> None:
    """None on one rank, and others everywhere."""
    for tokens in (3 * RANK, 40 * (SIZE - 1 - RANK) + 1):
        layer = Layer(tokens, *SMALL)
        call = functools.partial(layer.call, most=40 * SIZE)
        runs(f"float8 experts, {tokens} tokens", call, functools.partial(near, "tokens", want=layer.wanted()))


if __name__ == "__main__":
    torch.manual_seed(RANK)
    main({name: function for name, function in globals().items() if name.startswith("check_")})
