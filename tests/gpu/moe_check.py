# SPDX-License-Identifier: MIT
"""A layer of experts on GPUs: `torchrun --nproc-per-node 2 tests/gpu/moe_check.py`, arguments as for `ops_check.py`.

Fresh random inputs, ranks out of step, workspaces and memory that results get full of NaN; results and gradients are
compared with those of all experts in float32.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.ops_support import LATE_CYCLES, main, poison, random, runs, say  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK, SIZE, everyones, total  # noqa: E402
from tilescale import ops  # noqa: E402

SHAPES = [
    # tokens, features, inner, experts of a rank, choices
    (1, 64, 64, 1, 1),
    (7, 512, 192, 2, 2),
    (16, 2048, 768, 32, 8),
    (1000, 1024, 512, 4, 4),
    (512, 2048, 768, 32, 8),
]

ERROR, LARGEST = 0.012, 0.06
"""Error bounds relative to a result's norm, and to its largest element: roundings to bfloat16."""


def near(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Raises ValueError if a result is further from the reference than roundings explain."""
    error, want = got.float() - want.float(), want.float()
    if got.shape != want.shape or not bool(error.norm() <= ERROR * want.norm() + 1e-6):
        raise ValueError(f"{what}: {float(error.norm()):.3g} of a norm of {float(want.norm()):.3g}")
    if not bool((error.abs() <= LARGEST * want.abs().max() + 1e-6).all()):
        raise ValueError(f"{what}: off by {float(error.abs().max()):.3g}, the largest is {float(want.abs().max()):.3g}")


def spoil() -> None:
    """NaN where PyTorch allocates next, and in the workspaces."""
    torch.cuda.synchronize()
    small = [torch.full((n,), torch.nan, device=DEVICE) for n in (64, 1024, 16384, 131072) for _ in range(8)]
    large = torch.full((1 << 28,), torch.nan, device=DEVICE)
    del small, large
    poison()


def late(turn: int) -> None:
    if turn % SIZE == RANK:
        torch.cuda._sleep(LATE_CYCLES)


class Layer:
    """Random tokens and experts, and what the layer is to make of them."""

    def __init__(self, tokens: int, features: int, inner: int, local: int, choices: int):
        self.x = random(tokens, features).mul_(10)
        self.gate_up = random(local, 2 * inner, features).mul_(10 * features**-0.5)
        self.down = random(local, features, inner).mul_(10 * inner**-0.5)
        self.weights = torch.rand(tokens, choices, device=DEVICE)
        self.chosen = torch.rand(tokens, local * SIZE, device=DEVICE).topk(choices).indices
        self.grad = random(tokens, features)

    def leaves(self) -> list[torch.Tensor]:
        return [t.clone().requires_grad_() for t in (self.x, self.weights, self.gate_up, self.down)]

    def call(self, leaves: list[torch.Tensor], **options: object) -> torch.Tensor:
        x, weights, gate_up, down = leaves
        return ops.moe_layer(x, (self.chosen, weights), gate_up, down, **options)

    def wanted(self) -> list[torch.Tensor]:
        """The result, and the gradients of x, weights, gate_up and down: each token by its experts, in float32."""
        x, weights = (t.float().requires_grad_() for t in (self.x, self.weights))
        experts = [everyones(t).flatten(0, 1).float().requires_grad_() for t in (self.gate_up, self.down)]
        y = torch.zeros_like(x)
        for number, (gate_up, down) in enumerate(zip(*experts, strict=True)):
            where = (self.chosen == number).nonzero(as_tuple=True)
            gate, up = (x[where[0]] @ gate_up.t()).chunk(2, -1)
            made = (torch.nn.functional.silu(gate) * up) @ down.t()
            y = y.index_add(0, where[0], made * weights[where][:, None])
        of_x, of_weights, *of_experts = torch.autograd.grad(y, [x, weights, *experts], self.grad.float())
        local = len(self.gate_up)
        return [y.detach(), of_x, of_weights, *(total(g)[RANK * local :][:local] for g in of_experts)]


NAMES = "y", "of x", "of weights", "of gate_up", "of down"


def check_forward(only: slice) -> None:
    """Eager, repeated, in a graph."""
    for shape in SHAPES[only]:
        layer, title = Layer(*shape), f"layer of experts {shape}"
        call = functools.partial(layer.call, [t.detach() for t in layer.leaves()])
        runs(title, call, functools.partial(near, title, want=layer.wanted()[0]))
        first = call()
        if not all(torch.equal(first, call()) for _ in range(12)):
            raise ValueError(f"{title}: other bits each time")


def check_backward(only: slice) -> None:
    """As often as calls are recorded, and in a graph."""
    for shape in SHAPES[only]:
        layer = Layer(*shape)
        want, leaves = layer.wanted(), layer.leaves()

        def call(layer: Layer = layer, leaves: list[torch.Tensor] = leaves) -> list[torch.Tensor]:
            y = layer.call(leaves)
            return [y.detach(), *torch.autograd.grad(y, leaves, layer.grad)]

        for turn in range(10):
            spoil()
            late(turn)
            for name, got, one in zip(NAMES, call(), want, strict=True):
                near(f"{name} of {shape} in call {turn}", got, one)
        runs(
            f"gradients of experts {shape}",
            call,
            lambda made, want=want: [near(n, g, w) for n, g, w in zip(NAMES, made, want, strict=True)],
        )


def check_routings(_: slice) -> None:
    """All to one expert, none to a rank, ties, none at all, the same expert twice."""
    tokens, local, choices = 300, 4, 2
    routes: dict[str, Callable[[], torch.Tensor]] = {
        "all to one": lambda: torch.full((tokens, choices), local * SIZE - 1, device=DEVICE),
        "none to the last rank": lambda: torch.rand(tokens, local, device=DEVICE).topk(choices).indices,
        "ties": lambda: torch.zeros(tokens, local * SIZE, device=DEVICE).topk(choices).indices,
        "nobody": lambda: torch.full((tokens, choices), -1, device=DEVICE),
        "some": lambda: torch.randint(-2, local * SIZE + 2, (tokens, choices), device=DEVICE),
    }
    for name, chosen in routes.items():
        layer = Layer(tokens, 256, 128, local, choices)
        layer.chosen = chosen()
        want, leaves = layer.wanted(), layer.leaves()
        for turn in range(3):
            spoil()
            late(turn)
            y = layer.call(leaves)
            made = [y.detach(), *torch.autograd.grad(y, leaves, layer.grad)]
            for what, got, one in zip(NAMES, made, want, strict=True):
                near(f"{what}, {name}", got, one)
        say(f"PASS routing: {name}")


def check_numbers_of_tokens(_: slice) -> None:
    """None on one rank, and others everywhere."""
    for tokens in (3 * RANK, 40 * (SIZE - 1 - RANK) + 1):
        layer = Layer(tokens, 256, 128, 2, 2)
        leaves = layer.leaves()
        for turn in range(3):
            spoil()
            late(turn)
            y = layer.call(leaves, most=40 * SIZE)
            made = [y.detach(), *torch.autograd.grad(y, leaves, layer.grad)]
            for what, got, one in zip(NAMES, made, layer.wanted(), strict=True):
                near(f"{what}, {tokens} tokens", got, one)
    say("PASS numbers of tokens")


def check_room(_: slice) -> None:
    """Dropped tokens are reported; the others are unchanged."""
    layer = Layer(400, 256, 128, 2, 2)
    leaves = [t.detach() for t in layer.leaves()]
    whole, kept = layer.call(leaves), layer.call(leaves, room=100000)
    if not torch.equal(whole, kept[0]) or int(kept[1].sum()):
        raise ValueError("room for all drops some")
    _, dropped = layer.call(leaves, room=256)
    here = [int((everyones(layer.chosen) == 2 * RANK + e).sum()) for e in range(2)]
    first = -(-here[0] // 128) * 128
    if dropped.tolist() != [max(here[0] - 256, 0), here[1] - max(min(256 - first, here[1]), 0)]:
        raise ValueError(f"dropped is {dropped.tolist()} of {here}")
    say("PASS room")


def check_routers(_: slice) -> None:
    """From logits, with gradients; float16; a shared expert."""
    layer = Layer(200, 256, 128, 8, 4)
    logits, bias = torch.randn(200, 8 * SIZE, device=DEVICE), torch.randn(8 * SIZE, device=DEVICE)
    for router in (ops.Router(4), ops.Router(4, "sigmoid", groups=4, top_groups=2, scale=2.5)):
        given = logits.clone().requires_grad_()
        layer.chosen, weights = router.choose(given, bias)
        layer.weights = weights.detach()
        want = layer.wanted()
        (of_logits,) = torch.autograd.grad(weights, given, want[2])
        mine = logits.clone().requires_grad_()
        x, _, gate_up, down = layer.leaves()
        y = ops.moe_layer(x, mine, gate_up, down, router=router, bias=bias)
        near("y from logits", y.detach(), want[0])
        near("of logits", torch.autograd.grad(y, mine, layer.grad)[0], of_logits)
    say("PASS routers")


if __name__ == "__main__":
    main({name: function for name, function in globals().items() if name.startswith("check_")})
