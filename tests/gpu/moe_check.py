# SPDX-License-Identifier: MIT
"""A layer of experts on GPUs: `torchrun --nproc-per-node 2 tests/gpu/moe_check.py`, arguments as for `ops_check.py`.

Fresh random inputs, ranks out of step, workspaces and memory that results get full of NaN; results and gradients are
compared with those of all experts in float32. Numbers of tokens are drawn from a seed, which is printed; `--seed=N`
repeats them. All kernels are compiled at once beforehand.
"""

from __future__ import annotations

import functools
import random as numbers
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.gpu.ops_support import late, leaf, main, near, poison, random, routings, runs, say  # noqa: E402
from tests.gpu.ranks import DEVICE, RANK, SIZE, WORLD, everyones, total  # noqa: E402
from tilescale import ops  # noqa: E402

SMALL = 256, 128, 4, 2
"""Features, inner, experts of a rank, choices."""

KINDS = [SMALL, (2048, 768, 32, 8)]
MOST = 1000
"""Tokens of a rank, at most."""

GIVEN = [word for word in sys.argv if word.startswith("--seed=")]
SEED = int(GIVEN[0].partition("=")[2]) if GIVEN else WORLD.all_gather(time.time_ns() % 10**6)[0]


def shapes() -> list[tuple[int, ...]]:
    """One token, a few, and many, of every kind: tokens, features, inner, experts of a rank, choices."""
    drawn = numbers.Random(SEED)
    return [(tokens, *kind) for kind in KINDS for tokens in (1, drawn.randint(2, 128), drawn.randint(129, MOST))]


def spoil() -> None:
    """NaN where PyTorch allocates next, and in the workspaces."""
    torch.cuda.synchronize()
    small = [torch.full((n,), torch.nan, device=DEVICE) for n in (64, 1024, 16384, 131072) for _ in range(8)]
    large = torch.full((1 << 28,), torch.nan, device=DEVICE)
    del small, large
    poison()


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
        return [leaf(t) for t in (self.x, self.weights, self.gate_up, self.down)]

    def call(self, leaves: list[torch.Tensor], **options: object) -> torch.Tensor:
        x, weights, gate_up, down = leaves
        return ops.moe_layer(x, (self.chosen, weights), gate_up, down, **options)

    def wanted(self) -> list[torch.Tensor]:
        """The result, and the gradients of x, weights, gate_up and down: each token by its experts, in float32."""
        x, weights = (leaf(t.float()) for t in (self.x, self.weights))
        experts = [leaf(everyones(t).flatten(0, 1).float()) for t in (self.gate_up, self.down)]
        y, squares = torch.zeros_like(x), 0.0
        for number, (gate_up, down) in enumerate(zip(*experts, strict=True)):
            where = (self.chosen == number).nonzero(as_tuple=True)
            gate, up = (x[where[0]] @ gate_up.t()).chunk(2, -1)
            made = (torch.nn.functional.silu(gate) * up) @ down.t()
            y = y.index_add(0, where[0], made * weights[where][:, None])
            squares += float((made.detach() * self.grad[where[0]]).square().sum())
        of_x, of_weights, *of_experts = torch.autograd.grad(y, [x, weights, *experts], self.grad.float())
        local, self.uncancelled = len(self.gate_up), squares**0.5
        return [y.detach(), of_x, of_weights, *(total(g)[RANK * local :][:local] for g in of_experts)]

    def compare(self, what: str, made: list[torch.Tensor], want: list[torch.Tensor]) -> None:
        """Raises ValueError. A weight's gradient is one sum, which a single token may have close to zero."""
        for name, got, one in zip(NAMES, made, want, strict=True):
            near(f"{name} {what}", got, one, self.uncancelled if name == "of weights" else 0.0)


NAMES = "y", "of x", "of weights", "of gate_up", "of down"


def check_compilation(_: slice) -> None:
    """All kernels at once, on all CPU cores."""

    def run() -> None:
        for shape in shapes():
            layer = Layer(*shape)
            leaves = layer.leaves()
            layer.call([t.detach() for t in leaves])
            torch.autograd.grad(layer.call(leaves), leaves, layer.grad)

    ops.warm_up(run)
    say(f"PASS compilation, seed {SEED}")


def check_forward(only: slice) -> None:
    """Eager, repeated, in a graph."""
    for shape in shapes()[only]:
        layer, title = Layer(*shape), f"layer of experts {shape}"
        call = functools.partial(layer.call, [t.detach() for t in layer.leaves()])
        runs(title, call, functools.partial(near, title, want=layer.wanted()[0]))
        first = call()
        if not all(torch.equal(first, call()) for _ in range(12)):
            raise ValueError(f"{title}: other bits each time")


def check_backward(only: slice) -> None:
    """As often as calls are recorded, and in a graph."""
    for shape in shapes()[only]:
        layer = Layer(*shape)
        want, leaves = layer.wanted(), layer.leaves()

        def call(layer: Layer = layer, leaves: list[torch.Tensor] = leaves) -> list[torch.Tensor]:
            y = layer.call(leaves)
            return [y.detach(), *torch.autograd.grad(y, leaves, layer.grad)]

        for turn in range(10):
            spoil()
            late(turn)
            layer.compare(f"of {shape} in call {turn}", call(), want)
        title = f"gradients of experts {shape}"
        runs(title, call, functools.partial(layer.compare, title, want=want))


def check_routings(_: slice) -> None:
    """All to one expert, none to a rank, ties, none at all, the same expert twice."""
    tokens, (_, _, local, choices) = 300, SMALL
    for name, chosen in routings(tokens, local, choices).items():
        layer = Layer(tokens, *SMALL)
        layer.chosen = chosen()
        want, leaves = layer.wanted(), layer.leaves()
        for turn in range(3):
            spoil()
            late(turn)
            y = layer.call(leaves)
            made = [y.detach(), *torch.autograd.grad(y, leaves, layer.grad)]
            layer.compare(name, made, want)
        say(f"PASS routing: {name}")


def check_numbers_of_tokens(_: slice) -> None:
    """None on one rank, and others everywhere."""
    for tokens in (3 * RANK, 40 * (SIZE - 1 - RANK) + 1):
        layer = Layer(tokens, *SMALL)
        leaves = layer.leaves()
        for turn in range(3):
            spoil()
            late(turn)
            y = layer.call(leaves, most=40 * SIZE)
            made = [y.detach(), *torch.autograd.grad(y, leaves, layer.grad)]
            layer.compare(f"of {tokens} tokens", made, layer.wanted())
    say("PASS numbers of tokens")


def check_room(_: slice) -> None:
    """Dropped tokens are reported; the others are unchanged."""
    layer = Layer(400, *SMALL)
    leaves = [t.detach() for t in layer.leaves()]
    whole, kept = layer.call(leaves), layer.call(leaves, room=100000)
    if not torch.equal(whole, kept[0]) or int(kept[1].sum()):
        raise ValueError("room for all drops some")
    _, dropped = layer.call(leaves, room=256)
    local, first, want = SMALL[2], 0, list[int]()
    for expert in range(local):
        here = int((everyones(layer.chosen) == local * RANK + expert).sum())
        want.append(here - max(min(256 - first, here), 0))
        first += -(-here // 128) * 128
    if dropped.tolist() != want:
        raise ValueError(f"dropped is {dropped.tolist()}, not {want}")
    say("PASS room")


def check_routers(_: slice) -> None:
    """From logits, with gradients; float16; a shared expert."""
    layer, experts = Layer(200, *SMALL), SMALL[2] * SIZE
    logits, bias = torch.randn(200, experts, device=DEVICE), torch.randn(experts, device=DEVICE)
    for router in (ops.Router(2), ops.Router(2, "sigmoid", groups=4, top_groups=2, scale=2.5)):
        given = leaf(logits)
        layer.chosen, weights = router.choose(given, bias)
        layer.weights = weights.detach()
        want = layer.wanted()
        (of_logits,) = torch.autograd.grad(weights, given, want[2])
        mine = leaf(logits)
        x, _, gate_up, down = layer.leaves()
        y = ops.moe_layer(x, mine, gate_up, down, router=router, bias=bias)
        near("y from logits", y.detach(), want[0])
        near("of logits", torch.autograd.grad(y, mine, layer.grad)[0], of_logits)
    say("PASS routers")


if __name__ == "__main__":
    sys.argv[1:] = [word for word in sys.argv[1:] if word not in GIVEN]
    torch.manual_seed(SEED + RANK)
    main({name: function for name, function in globals().items() if name.startswith("check_")})
