# SPDX-License-Identifier: MIT
"""A layer of experts in a job of several ranks. Every `check_` function runs on every rank, one after the other."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import tilescale
from tests.ops.float8_experts import (
    EMULATED,
    GRADIENTS,
    ON_THE_WIRE,
    quantized_squares,
    random_expert,
    trained,
    wanted,
)
from tests.ops.float8_experts import near as float64_near
from tilescale import ops
from tilescale.errors import ArgumentError

WORLD = tilescale.init()
RANK, SIZE = WORLD.rank, WORLD.size
LOCAL, FEATURES, INNER = 2, 24, 48


def everyones(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """The random tensors of all ranks, which every rank can make."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(SIZE)]


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal except for roundings to bfloat16."""
    error, want = (got.double() - want.double()).norm(), want.double()
    assert got.shape == want.shape and error <= 0.012 * want.norm() + 1e-6, (error, want.norm())


class Layer:
    """Random tokens, a number for each rank, and experts."""

    def __init__(self, chosen: list[torch.Tensor]):
        choices = chosen[0].shape[1]
        self.chosen, most = chosen, max(map(len, chosen))
        self.x, self.grad = everyones(most, FEATURES), everyones(most, FEATURES, seed=1)
        self.share = [share.abs() for share in everyones(most, choices, seed=2, dtype=torch.float32)]
        self.x, self.grad, self.share = (self.cut(each) for each in (self.x, self.grad, self.share))
        # As layers are initialized: for larger numbers the exponential amplifies the rounding of its argument.
        self.gate_up = [w * FEATURES**-0.5 for w in everyones(LOCAL, 2 * INNER, FEATURES, seed=3)]
        self.down = [w * INNER**-0.5 for w in everyones(LOCAL, FEATURES, INNER, seed=4)]

    def cut(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x[: len(chosen)] for x, chosen in zip(tensors, self.chosen, strict=True)]

    def leaves(self) -> list[torch.Tensor]:
        given = self.x, self.share, self.gate_up, self.down
        return [each[RANK].clone().requires_grad_() for each in given]

    def call(self, leaves: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
        """The result, and the gradients of the leaves."""
        x, share, gate_up, down = leaves
        y = ops.moe_layer(x, (self.chosen[RANK], share), gate_up, down, **options)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.grad[RANK])]

    def wanted(self, dropped: Any = ()) -> list[torch.Tensor]:
        """The same by all experts for all tokens in float64, without the (rank, token, choice) that are dropped."""
        x, share = ([t.double().requires_grad_() for t in each] for each in (self.x, self.share))
        gate_up, down = (torch.cat(each).double().requires_grad_() for each in (self.gate_up, self.down))
        results = []
        for rank in range(SIZE):
            rows = [x[rank][:0].sum(0)] * len(x[rank])
            for token, experts in enumerate(self.chosen[rank].tolist()):
                for c, expert in enumerate(experts):
                    if 0 <= expert < SIZE * LOCAL and (rank, token, c) not in dropped:
                        gate, up = (gate_up[expert] @ x[rank][token]).chunk(2)
                        made = down[expert] @ (torch.nn.functional.silu(gate) * up)
                        rows[token] = rows[token] + share[rank][token, c] * made
            results.append(torch.stack(rows) if rows else x[rank][:0])
        loss = sum((y * g.double()).sum() for y, g in zip(results, self.grad, strict=True))
        given = [x[RANK], share[RANK], gate_up, down]
        grads = torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)
        mine = slice(RANK * LOCAL, (RANK + 1) * LOCAL)
        return [results[RANK].detach(), *grads[:2], *(g[mine] for g in grads[2:])]


def compare(layer: Layer, **options: Any) -> None:
    for got, want in zip(layer.call(layer.leaves(), **options), layer.wanted(), strict=True):
        near(got, want)


def random_choices(tokens: int, choices: int) -> list[torch.Tensor]:
    return [s.topk(choices).indices for s in everyones(tokens, SIZE * LOCAL, seed=5, dtype=torch.float32)]


def check_results_and_gradients():
    layer = Layer(random_choices(7, 3))
    compare(layer)
    first, second = (layer.call(layer.leaves()) for _ in range(2))
    assert all(map(torch.equal, first, second)), "the same bits each time"


def check_adversarial_routings():
    """All to the last expert, none to the last rank, one twice and one of no expert."""
    compare(Layer([torch.full((5, 2), SIZE * LOCAL - 1)] * SIZE))
    compare(Layer([torch.arange(LOCAL).expand(5, LOCAL)] * SIZE))
    compare(Layer([torch.tensor([[0, 0], [-1, SIZE * LOCAL], [1, 99]])] * SIZE))


def check_ranks_have_different_numbers_of_tokens():
    counts = [0, *range(1, SIZE)]
    compare(Layer([c[:n] for c, n in zip(random_choices(SIZE, 2), counts, strict=True)]), most=SIZE)
    empty = torch.zeros(0, FEATURES).bfloat16()
    gate_up, down = (each[RANK] for each in (Layer(random_choices(1, 1)).gate_up, Layer(random_choices(1, 1)).down))
    got = ops.moe_layer(empty, (torch.zeros(0, 2).long(), torch.zeros(0, 2)), gate_up, down)
    assert got.shape == empty.shape


def check_what_has_no_room_is_dropped_and_told():
    """Expert 0 takes the only tile, so expert 1 of each rank has none."""
    layer = Layer(random_choices(6, 2))
    lost = [[tuple(c) for c in (chosen % LOCAL == 1).nonzero().tolist()] for chosen in layer.chosen]
    x, share, gate_up, down = layer.leaves()
    y, dropped = ops.moe_layer(x, (layer.chosen[RANK], share), gate_up, down, room=128)
    grads = torch.autograd.grad(y, [x, share, gate_up, down], layer.grad[RANK])
    want = layer.wanted({(rank, *place) for rank, places in enumerate(lost) for place in places})
    for got, one in zip((y.detach(), *grads), want, strict=True):
        near(got, one)
    here = sum(int((chosen == RANK * LOCAL + 1).sum()) for chosen in layer.chosen)
    assert dropped.tolist() == [0, here]


def check_replicas_share_the_tokens_of_an_expert():
    """The first expert is on all ranks, the others on one each."""
    layer = Layer([torch.zeros(6, 1).long(), *[torch.full((6, 1), 1)] * (SIZE - 1)])
    layer.gate_up = [torch.cat([layer.gate_up[0][:1], part[1:]]) for part in layer.gate_up]
    layer.down = [torch.cat([layer.down[0][:1], part[1:]]) for part in layer.down]
    replicas = torch.full((SIZE + 1, SIZE), -1)
    replicas[0], replicas[1:, 0] = torch.arange(SIZE) * LOCAL, torch.arange(SIZE) * LOCAL + 1
    x, share, gate_up, down = layer.leaves()
    y = ops.moe_layer(x, (layer.chosen[RANK], share), gate_up, down, replicas=replicas)
    near(y.detach(), layer.wanted()[0])
    (of_gate_up,) = torch.autograd.grad(y, gate_up, layer.grad[RANK])
    assert bool(of_gate_up[0].any()), "this rank's copy has some of them"


def check_logits_have_gradients_and_a_shared_expert():
    layer, router = Layer(random_choices(5, 2)), ops.Router(2, "sigmoid", scale=2.5)
    logits = everyones(5, SIZE * LOCAL, seed=5, dtype=torch.float32)  # the same as what is chosen by
    shared = everyones(32, FEATURES, seed=6)[0], everyones(FEATURES, 16, seed=7)[0]
    weights = [router.choose(part)[1] for part in logits]
    layer.share = weights
    given = logits[RANK].clone().requires_grad_()
    x, _, gate_up, down = layer.leaves()
    y = ops.moe_layer(x, given, gate_up, down, router=router, shared=shared)
    gate, up = (layer.x[RANK].double() @ shared[0].double().t()).chunk(2, -1)
    added = (torch.nn.functional.silu(gate) * up) @ shared[1].double().t()
    want, _, of_share, *_ = layer.wanted()
    near(y.detach(), want + added)
    leaf = logits[RANK].clone().requires_grad_()
    (of_logits,) = torch.autograd.grad(router.choose(leaf)[1], leaf, of_share.float())
    near(torch.autograd.grad(y, given, layer.grad[RANK])[0], of_logits)


def check_float8_experts():
    """With squares of scales, and one for each expert; ranks with different numbers of tokens."""
    generator = torch.Generator().manual_seed(8)
    experts = [random_expert(256, 128, generator=generator) for _ in range(SIZE * LOCAL)]
    gate_up, down, *scales = (torch.stack(each[RANK * LOCAL :][:LOCAL]) for each in zip(*experts, strict=True))
    chosen = [c[:n] for c, n in zip(random_choices(SIZE + 2, 2), range(2, 2 + SIZE), strict=True)]
    x, weights = everyones(SIZE + 2, 256)[RANK][: RANK + 2], torch.rand(RANK + 2, 2)
    given = x, (chosen[RANK], weights), gate_up, down
    y = ops.moe_layer(*given, scales=tuple(scales), most=SIZE + 2)
    float64_near("float8 experts", y, wanted(x, chosen[RANK], weights, experts))

    numbers = [torch.rand(SIZE * LOCAL, generator=generator) * n**-0.5 for n in (256, 128)]
    y, dropped = ops.moe_layer(
        *given, scales=tuple(n[RANK * LOCAL :][:LOCAL] for n in numbers), most=SIZE + 2, room=LOCAL * 128
    )
    whole = [
        (up, down, *(n[i].expand(of.shape) for n, of in zip(numbers, of_both, strict=True)))
        for i, (up, down, *of_both) in enumerate(experts)
    ]
    float64_near("scales of experts", y, wanted(x, chosen[RANK], weights, whole))
    assert not dropped.any()


def check_training_in_float8():
    """Adversarial routings, and ranks with different numbers of tokens, also with sums that travel as float8."""
    generator = torch.Generator().manual_seed(9)
    experts = [
        [(torch.randn(shape, generator=generator) * shape[1] ** -0.5).bfloat16() for shape in ((256, 256), (256, 128))]
        for _ in range(SIZE * LOCAL)
    ]
    used = [tuple(map(quantized_squares, each)) for each in experts]
    recipe = ops.Float8("blockwise", torch.bfloat16)
    for wire, bounds, routes in (
        (None, EMULATED, [c[:n] for c, n in zip(random_choices(SIZE + 2, 2), range(2, 2 + SIZE), strict=True)]),
        (None, EMULATED, [torch.full((5, 2), SIZE * LOCAL - 1)] * SIZE),
        ("float8_e4m3fn", ON_THE_WIRE, [torch.tensor([[0, 0], [-1, SIZE * LOCAL], [1, 99]])] * SIZE),
    ):
        x, grad = everyones(SIZE + 5, 256), everyones(SIZE + 5, 256, seed=1)
        x, grad = ([t[: len(c)] for t, c in zip(each, routes, strict=True)] for each in (x, grad))
        share = [torch.rand(c.shape, generator=generator) for c in routes]
        mine = zip(*experts[RANK * LOCAL :][:LOCAL], strict=True)
        leaves = [t.clone().requires_grad_() for t in (x[RANK], share[RANK], *map(torch.stack, mine))]
        y = ops.moe_layer(
            leaves[0], (routes[RANK], leaves[1]), *leaves[2:], float8=recipe, wire=wire, most=max(map(len, routes))
        )
        got = [y.detach(), *torch.autograd.grad(y, leaves, grad[RANK])]
        plain = [[t.double().requires_grad_() for t in each] for each in (x, share)]
        weights = [tuple(t.double().requires_grad_() for t in each) for each in experts]
        made = [trained(*given, weights, used) for given in zip(plain[0], routes, plain[1], strict=True)]
        loss = sum((a * b.double()).sum() for a, b in zip(made, grad, strict=True))
        of_both = [[each[i] for each in weights[RANK * LOCAL :][:LOCAL]] for i in range(2)]
        given = [plain[0][RANK], plain[1][RANK], *of_both[0], *of_both[1]]
        want = torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)
        want = [made[RANK].detach(), *want[:2], torch.stack(want[2 : 2 + LOCAL]), torch.stack(want[2 + LOCAL :])]
        names = "y", "of x", "of weights", "of gate_up", "of down"
        for name, one, other, most in zip(names, got, want, [bounds, *[GRADIENTS] * 4], strict=True):
            float64_near(name, one, other, most)


def check_errors_are_everyones():
    layer = Layer(random_choices(5, 2))
    x, share, gate_up, down = (t.detach() for t in layer.leaves())
    for given, options, message in (
        ((x.float(), (layer.chosen[RANK], share), gate_up, down), {}, "x is torch.float32"),
        ((x, (layer.chosen[RANK], share), down, gate_up), {}, "x has shape"),
        ((x, (layer.chosen[RANK], share), gate_up[:, :48], down[..., :24]), {}, "inner of 16"),
        ((x, share, gate_up, down), {}, "router is NoneType"),
        ((x, (layer.chosen[RANK][:3], share[:3]), gate_up, down), {}, "choice has 3 tokens, x has 5"),
        ((x, (layer.chosen[RANK], share), gate_up, down), {"most": 4}, "most is 4"),
        ((x, (layer.chosen[RANK], share), gate_up, down), {"room": 0}, "room is 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            ops.moe_layer(*given, **options)


if __name__ == "__main__":
    torch.manual_seed(RANK)
    warnings.filterwarnings("error", message=".*not a symmetric tensor")
    for name, function in list(globals().items()):
        if name.startswith("check_"):
            function()
            if RANK == 0:
                print(f"passed {name}", flush=True)
