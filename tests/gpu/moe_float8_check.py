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

from tests.gpu.ops_support import leaf, main, random, routings, runs, say  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK, SIZE, everyones, total  # noqa: E402
from tests.ops import float8_experts  # noqa: E402
from tests.ops.float8_experts import (  # noqa: E402
    GRADIENTS,
    ON_GPUS,
    ON_THE_WIRE,
    quantized_squares,
    random_expert,
    trained,
    wanted,
)
from tilescale import ops  # noqa: E402

SMALL, LARGE = (256, 128, 4, 2), (7168, 2048, 8, 8)
"""Features, inner, experts of a rank, choices."""

SHAPES = [(1, *SMALL), (33, *SMALL), (700, *SMALL), (16, *LARGE), (1000, *LARGE)]


near = functools.partial(float8_experts.near, bounds=ON_GPUS)
ON_BOTH = tuple(sum(each) for each in zip(ON_GPUS, ON_THE_WIRE, strict=True))
"""Bounds of activations in float8 on tensor cores, and of sums that travel so."""

WIRE, RECIPE = "float8_e4m3fn", ops.Float8("blockwise", torch.bfloat16)


class Layer:
    """Random tokens and experts, and what the layer is to make of them."""

    def __init__(self, tokens: int, features: int, inner: int, local: int, choices: int, by_rows: bool = False):
        self.x, self.local = random(tokens, features).mul_(10), local
        experts = [random_expert(features, inner, by_rows=by_rows, device=DEVICE) for _ in range(local)]
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

    def run() -> None:
        for kind in (SMALL, LARGE):
            Layer(1, *kind).call()
            Layer(1, *kind, by_rows=True).call(wire=WIRE)
        for wire in (None, WIRE):
            TrainedLayer(torch.zeros(1, 2, dtype=torch.int64, device=DEVICE), *SMALL[:3]).call(wire=wire)

    ops.warm_up(run)
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


def check_sums_in_float8(only: slice) -> None:
    """Sums that travel as float8, weights with scales of rows; the same bits each time."""
    for shape in SHAPES[only]:
        layer, title = Layer(*shape, by_rows=True), f"float8 sums {shape}"
        want, call = layer.wanted(), functools.partial(layer.call, wire=WIRE)
        runs(title, call, functools.partial(near, title, want=want, bounds=ON_BOTH))
        first = call()
        say(f"    off by {float((first.double() - want).norm() / want.norm()):.2g} of the norm in float64")
        if not all(torch.equal(first, call()) for _ in range(12)):
            raise ValueError(f"{title}: other bits each time")
    tokens, (_, _, local, choices) = 300, SMALL
    for name, chosen in routings(tokens, local, choices).items():
        layer = Layer(tokens, *SMALL)
        layer.chosen = chosen()
        want = functools.partial(near, name, want=layer.wanted(), bounds=ON_BOTH)
        runs(f"float8 sums, {name}", functools.partial(layer.call, wire=WIRE), want)


class TrainedLayer:
    """Random tokens and bfloat16 experts that are quantized in each call, and what they are to become in float64."""

    def __init__(self, chosen: torch.Tensor, features: int, inner: int, local: int):
        self.chosen, self.local = chosen, local
        self.x, self.grad = random(len(chosen), features).mul_(10), random(len(chosen), features)
        self.weights = torch.rand(chosen.shape, device=DEVICE)
        shapes = (local, 2 * inner, features), (local, features, inner)
        self.experts = [random(*shape).mul_(10 * shape[2] ** -0.5) for shape in shapes]
        self.leaves = [leaf(t) for t in (self.x, self.weights, *self.experts)]

    def call(self, **options: object) -> list[torch.Tensor]:
        """The result, and the gradients of tokens, weights and experts."""
        x, weights, *experts = self.leaves
        y = ops.moe_layer(x, (self.chosen, weights), *experts, float8=RECIPE, **options)
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.grad)]

    def wanted(self) -> list[torch.Tensor]:
        x, weights = (t.double().requires_grad_() for t in (self.x, self.weights))
        every = [leaf(everyones(t).flatten(0, 1).double()) for t in self.experts]
        used = list(zip(*([quantized_squares(w) for w in each.detach()] for each in every), strict=True))
        y = trained(x, self.chosen, weights, list(zip(*every, strict=True)), used)
        given = [x, weights, *every]
        of_x, of_weights, *of_experts = torch.autograd.grad(y, given, self.grad.double(), materialize_grads=True)
        return [y.detach(), of_x, of_weights, *(total(g)[RANK * self.local :][: self.local] for g in of_experts)]

    def check(self, title: str, bounds: tuple[float, float] = ON_GPUS, **options: object) -> None:
        names, want = ("y", "of x", "of weights", "of gate_up", "of down"), self.wanted()

        def near_all(made: list[torch.Tensor]) -> None:
            for name, got, one in zip(names, made, want, strict=True):
                near(f"{title}: {name}", got, one, bounds=bounds if name == "y" else GRADIENTS)

        runs(title, functools.partial(self.call, **options), near_all)


def check_training(only: slice) -> None:
    """Results and gradients with adversarial routings, many tokens, and different numbers of them."""
    features, inner, local, choices = SMALL
    for name, chosen in routings(300, local, choices).items():
        TrainedLayer(chosen(), features, inner, local).check(f"training in float8, {name}")
    for tokens, (features, inner, local, choices), options in (
        (500, (2048, 768, 16, 8), {}),
        (3 * RANK, SMALL, {"most": 3 * SIZE}),
        (500, SMALL, {"wire": WIRE}),
    ):
        chosen = torch.rand(tokens, local * SIZE, device=DEVICE).topk(choices).indices
        bounds = ON_BOTH if "wire" in options else ON_GPUS
        TrainedLayer(chosen, features, inner, local).check(f"training of {tokens}", bounds, **options)


def check_gradients_through_float8_weights(_: slice) -> None:
    """Of tokens and their weights; weights with scales of squares and of rows."""
    for by_rows in (False, True):
        layer = Layer(200, *SMALL, by_rows=by_rows)
        every = [everyones(t).flatten(0, 1) for t in (layer.gate_up, layer.down, *layer.scales)]
        plain = [(float8_experts.whole(a, c), float8_experts.whole(b, d)) for a, b, c, d in zip(*every, strict=True)]
        x, weights = (t.double().requires_grad_() for t in (layer.x, layer.weights))
        grad = random(*layer.x.shape)
        want = torch.autograd.grad(trained(x, layer.chosen, weights, plain, plain), [x, weights], grad.double())

        leaves = leaf(layer.x), leaf(layer.weights)

        def call(layer: Layer = layer, grad: torch.Tensor = grad, leaves: tuple = leaves) -> tuple[torch.Tensor, ...]:
            experts = layer.gate_up, layer.down
            y = ops.moe_layer(leaves[0], (layer.chosen, leaves[1]), *experts, scales=tuple(layer.scales))
            return torch.autograd.grad(y, leaves, grad)

        runs(
            f"gradients through float8 weights, rows {by_rows}",
            call,
            lambda made, want=want: [
                near("gradient", *each, bounds=GRADIENTS) for each in zip(made, want, strict=True)
            ],
        )


if __name__ == "__main__":
    torch.manual_seed(RANK)
    main({name: function for name, function in globals().items() if name.startswith("check_")})
