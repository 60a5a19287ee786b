# SPDX-License-Identifier: MIT
"""Programs of a layer of experts, emulated with all checks, and its router compared with PyTorch's operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilescale
from tests.ops.expert_grids import gradient_program, works
from tests.ops.test_experts import close, layout, used_tiles
from tilescale import ops
from tilescale.errors import ArgumentError
from tilescale.ops import expert_programs, moe_tables, row_exchange


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
    given = [x, gate_up, owners, used_tiles(counts), hidden, empty[1]]
    per_device = [[t.clone() for t in given] for _ in range(2)]
    tilescale.emulate(works.gated_program(2, inner, features, "bfloat16", keeps, blocks=3), per_device)

    expert = owners.repeat_interleave(128)[is_row].long()
    pre = torch.einsum("rk,rnk->rn", x[is_row].float(), gate_up[expert].float())
    gate, up = pre.chunk(2, -1)
    act = torch.nn.functional.silu(gate) * up
    for *_, kept, made in per_device:
        close(made[is_row], act)
        if keeps:
            close(kept[is_row], pre)
    if not keeps:
        return

    kept, tiles = per_device[0][4], inner // expert_programs.columns_of(inner)
    results = [
        torch.full_like(kept, torch.nan),
        torch.full_like(empty[1], torch.nan),
        torch.full((tiles, room), torch.nan),
    ]
    per_device = [[t.clone() for t in (far, down, owners, weights, kept, *results)] for _ in range(2)]
    tilescale.emulate(gradient_program(2, inner, features, "bfloat16"), per_device)
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


@pytest.mark.parametrize("narrow", [False, True])
def test_a_layer_and_its_gradients(narrow: bool):
    """On two devices, with choices of no expert, in memory full of NaN."""
    size, local, choices, features, inner, most, room = 2, 2, 2, 64, 48, 5, 768
    ranks = range(size)
    chosen = torch.randint(-1, size * local, (size, most, choices))
    weights, x = torch.rand(size, most, choices), torch.randn(size, most, features).bfloat16()
    gate_up = torch.randn(size, local, 2 * inner, features).mul(features**-0.5).bfloat16()
    down, grad = torch.randn(size, local, features, inner).mul(inner**-0.5).bfloat16(), torch.randn_like(x)

    def rows(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan).bfloat16()

    def inboxes() -> list[torch.Tensor]:
        return [rows(size, most, features) for _ in range(2)]

    of_choices, groups = moe_tables.arriving_choices(size, most, choices), row_exchange.sharers(features, 8, most)
    none = torch.zeros(1, 1, 1)
    given = [
        [x[r], torch.zeros(1), chosen[r].view(-1), weights[r].view(-1), gate_up[r], none, down[r], none] for r in ranks
    ]
    sent = [[torch.full(of_choices, -9, dtype=torch.int32), torch.full(of_choices, torch.nan)] for _ in ranks]
    tables = [moe_tables.new_tables(chosen[r], size, local, most, room) for r in ranks]
    made = [[rows(room, features), rows(room, 2 * inner), rows(room, inner), rows(room, features)] for _ in ranks]
    y = [rows(most, features) for _ in ranks]
    counted = [torch.empty(moe_tables.form_of_counts(size, local, most, choices)[0], dtype=torch.int32) for _ in ranks]
    form = expert_programs.LayerForm("bfloat16", keeps=True, narrow=narrow)
    program = expert_programs.layer_program(size, local, choices, features, inner, "int64", form, blocks=3)
    per_device = []
    for r in ranks:
        (in_rows, in_sums), (wide, hidden, active, products) = inboxes(), made[r]
        received = *sent[r], in_rows, torch.zeros(1, 1), in_sums, torch.zeros(1, 1)
        unused = rows(1, 1), torch.zeros(1, 1)
        worked = wide, hidden, *unused, active, torch.zeros(1, 1), products
        per_device.append([*given[r], *received, counted[r], *tables[r], *worked, y[r], groups])
    tilescale.emulate(program, per_device)
    leaves = [t.float().requires_grad_() for t in (x, weights, gate_up, down)]
    want = expected(leaves, chosen, local)
    near(torch.stack(y), want.detach())

    results = [
        [
            rows(most, features),
            torch.full((most, choices), torch.nan),
            torch.empty_like(gate_up[r]),
            rows(*down[r].shape),
        ]
        for r in ranks
    ]
    per_device = []
    for r, (of_rows, counts, _, *others) in enumerate(tables):
        kept = [grad[r], gate_up[r], down[r], *made[r][:2], of_rows, counts, *others]
        own = [rows(room, features), rows(room, 2 * inner), rows(room, inner), rows(room, features)]
        of_rows = torch.full((inner // expert_programs.columns_of(inner), room), torch.nan)
        per_device.append([*kept, sent[r][1], *inboxes(), *own, of_rows, *results[r], groups])
    tilescale.emulate(
        expert_programs.layer_gradient_program(size, local, choices, features, inner, "bfloat16", 3), per_device
    )
    for got, wanted in zip(zip(*results, strict=True), torch.autograd.grad(want, leaves, grad.float()), strict=True):
        near(torch.stack(got), wanted)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for three roundings to bfloat16, some of sums' parts."""
    error = got.float() - want
    assert error.norm() <= 0.012 * want.norm() and error.abs().max() <= 0.06 * want.abs().max()


def expected(leaves: list[torch.Tensor], chosen: torch.Tensor, local: int) -> torch.Tensor:
    """The layer in PyTorch's operations: each choice of each token by itself."""
    x, weights, gate_up, down = leaves
    y = []
    for (rank, token), of_token in zip(np.ndindex(*chosen.shape[:2]), chosen.flatten(0, 1).tolist(), strict=True):
        total = x[rank, token] * 0
        for choice, expert in enumerate(of_token):
            if expert >= 0:
                gate, up = (gate_up[divmod(expert, local)] @ x[rank, token]).chunk(2)
                made = down[divmod(expert, local)] @ (torch.nn.functional.silu(gate) * up)
                total = total + weights[rank, token, choice] * made
        y.append(total)
    return torch.stack(y).view(x.shape)


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
        (lambda: ops.Router(1).choose(torch.zeros(1, 8), torch.zeros(1)), "bias has 1 numbers, logits has 8 experts"),
        (lambda: ops.Router(1).choose(torch.zeros(1, 8), torch.zeros(1, 8)), r"bias has shape \(1, 8\)"),
        (lambda: ops.Router(1).choose(torch.zeros(1, 8), torch.zeros(8).to("meta")), "bias is meta, logits is cpu"),
    ],
)
def test_mistakes_of_routers_are_named(make, message: str):
    with pytest.raises(ArgumentError, match=message):
        make()
