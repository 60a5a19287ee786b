# SPDX-License-Identifier: MIT
"""Programs of a layer of experts, emulated with all checks, and its router compared with PyTorch's operations."""

from __future__ import annotations

import pytest
import torch

import tilescale
from tests.ops.test_experts import close, layout
from tilescale import ops
from tilescale.errors import ArgumentError
from tilescale.ops import expert_programs


@pytest.mark.parametrize(
    ("counts", "inner", "features", "keeps"), [([5, 0, 130], 48, 40, True), ([128], 128, 64, False)], ids=str
)
def test_gated_experts_and_their_gradients(counts: list[int], inner: int, features: int, keeps: bool):
    """On two devices, which have the same rows."""
    rows, owners, room = layout(counts)
    x, far = (torch.full((room, features), torch.nan).bfloat16() for _ in range(2))
    gate_up, down = torch.randn(len(counts), 2 * inner, features), torch.randn(len(counts), features, inner)
    gate_up, down = (features**-0.5 * gate_up).bfloat16(), down.bfloat16()
    weights, is_row = torch.rand(room), torch.zeros(room, dtype=torch.bool)
    for part in rows:
        is_row[part] = True
        x[part], far[part] = (torch.randn(part.stop - part.start, features).bfloat16() for _ in range(2))
    empty = [torch.full((room, n), torch.nan).bfloat16() for n in (2 * inner, inner)]
    hidden = empty[0] if keeps else torch.zeros(1, 1).bfloat16()
    given = [x, gate_up, owners, hidden, empty[1]]
    per_device = [[t.clone() for t in given] for _ in range(2)]
    tilescale.emulate(expert_programs.gated_program(2, inner, features, "bfloat16", keeps), per_device)

    expert = owners.repeat_interleave(128)[is_row].long()
    pre = torch.einsum("rk,rnk->rn", x[is_row].float(), gate_up[expert].float())
    gate, up = pre.chunk(2, -1)
    act = torch.nn.functional.silu(gate) * up
    for _, _, _, kept, made in per_device:
        close(made[is_row], act)
        if keeps:
            close(kept[is_row], pre)
    if not keeps:
        return

    kept, tiles = per_device[0][3], inner // expert_programs.columns_of(inner)
    results = [
        torch.full_like(kept, torch.nan),
        torch.full_like(empty[1], torch.nan),
        torch.full((tiles, room), torch.nan),
    ]
    per_device = [[t.clone() for t in (far, down, owners, weights, kept, *results)] for _ in range(2)]
    tilescale.emulate(expert_programs.gated_gradient_program(2, inner, features, "bfloat16"), per_device)
    leaf = kept[is_row].double().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    act = torch.nn.functional.silu(gate) * up
    grad = torch.einsum("rk,rkn->rn", far[is_row].double(), down[expert].double())
    share = weights[is_row, None].double()
    (of_leaf,) = torch.autograd.grad(act, leaf, grad * share)
    for *_, of_hidden, active, of_weights in per_device:
        close(of_hidden[is_row], of_leaf.float())
        close(active[is_row], (act.detach() * share).float())
        close(of_weights.sum(0)[is_row], (grad * act.detach()).sum(1).float())


def test_a_router_chooses_among_the_best_groups():
    """A bias changes the chosen experts, not the weights; groups are then compared by their best two."""
    logits = torch.tensor([[4.0, -9, 3, 3, 2, 2, -9, -9]])
    router = ops.Router(2, "sigmoid", groups=4, top_groups=1, scale=2.0)
    assert router.choose(logits)[0].tolist() == [[0, 1]], "the best expert's group"
    chosen, weights = router.choose(logits, torch.zeros(8))
    assert sorted(chosen[0].tolist()) == [2, 3], "the group of the best two"
    torch.testing.assert_close(weights, torch.tensor([[1.0, 1.0]]))
    bias = torch.tensor([0.0, 0, 0, 0, 0, 0, 5, 5])
    assert sorted(router.choose(logits, bias)[0][0].tolist()) == [6, 7]


def test_a_router_without_normalization_keeps_the_probabilities():
    logits = torch.randn(5, 6)
    chosen, weights = ops.Router(3, normalize=False).choose(logits)
    want = logits.softmax(-1).topk(3)
    assert torch.equal(chosen, want.indices) and torch.equal(weights, want.values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ops.Router(0), "choices is 0"),
        (lambda: ops.Router(2, "relu"), "scoring is 'relu'"),
        (lambda: ops.Router(2, groups=2, top_groups=3), "top_groups is 3, groups is 2"),
        (lambda: ops.Router(3, groups=4, top_groups=1).choose(torch.zeros(1, 8)), "of 4 groups 1 are chosen"),
        (lambda: ops.Router(1).choose(torch.zeros(1, 8).int()), "logits is torch.int32"),
    ],
)
def test_mistakes_of_routers_are_named(make, message: str):
    with pytest.raises(ArgumentError, match=message):
        make()
