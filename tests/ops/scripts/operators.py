# SPDX-License-Identifier: MIT
"""Operators in a job of several ranks. Every `check_` function runs on every rank, one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilescale
from tilescale import ops
from tilescale.errors import ArgumentError, RankMismatchError
from tilescale.ops import ag_gemm, strategy

WORLD = tilescale.init()
RANK, SIZE = WORLD.rank, WORLD.size


def everyones(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """The random tensors of all ranks, which every rank can make."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(SIZE)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for roundings to bfloat16."""
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=float(want.float().abs().mean()) * 2**-5)


def check_all_gather_matmul():
    a, b, bias = everyones(33, 40), everyones(72, 40, seed=1), everyones(72, seed=2)
    want = torch.cat(a).float() @ b[RANK].float().t() + bias[RANK].float()
    for _ in range(2):
        close(ops.all_gather_matmul(a[RANK], b[RANK].t(), bias=bias[RANK]), want)


def check_one_gather_for_several_weights():
    a, b, bias = everyones(3, 16)[RANK], [everyones(n, 16, seed=n)[RANK] for n in (8, 24)], everyones(8)[RANK]
    results = ops.all_gather_matmul(a, [w.t() for w in b], bias=[bias, None])
    whole = torch.cat(everyones(3, 16)).float()
    close(results[0], whole @ b[0].float().t() + bias.float())
    close(results[1], whole @ b[1].float().t())


def check_gradients_of_all_gather_matmul():
    a, grads = everyones(5, 16), everyones(5 * SIZE, 32, seed=3)
    b, bias = [everyones(n, 16, seed=n) for n in (8, 24)], everyones(8, seed=2)
    leaf, *weights = (x[RANK].clone().requires_grad_() for x in (a, *b))
    added = bias[RANK].clone().requires_grad_()
    results = ops.all_gather_matmul(leaf, [w.t() for w in weights], bias=[added, None])
    torch.autograd.backward(results, grads[RANK].split([8, 24], 1))
    joined = [torch.cat(both).float() for both in zip(*b, strict=True)]
    far = sum(g.float() @ w for g, w in zip(grads, joined, strict=True)).chunk(SIZE)[RANK]
    close(leaf.grad, far)
    close(torch.cat([w.grad for w in weights]), grads[RANK].float().t() @ torch.cat(a).float())
    close(added.grad, grads[RANK].float().sum(0)[:8])


def check_gradients_of_gathered_rows():
    """Alone, and added to those of the result; without a gate and with one."""
    a, b = everyones(5, 16, dtype=torch.float32), everyones(16, 8, seed=1, dtype=torch.float32)[RANK]
    for how in ({"b": b}, {"b": [b, b], "activation": "silu", "gated": True}):
        leaf = a[RANK].clone().requires_grad_()
        result, rows = ops.all_gather_matmul(leaf, **how, return_gathered=True)
        losses = [result.sum(), (RANK + 1) * rows.pow(2).sum()]
        losses.append(losses[0] + losses[1])
        of_result, of_rows, of_both = (torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in losses)
        torch.testing.assert_close(of_rows, 2 * sum(range(1, SIZE + 1)) * a[RANK])
        torch.testing.assert_close(of_both, of_result + of_rows)


def check_activations_and_gradients():
    a, b, bias = everyones(3, 16), everyones(8, 16, seed=1), everyones(8, seed=2)
    for name, function in ag_gemm.ACTIVATIONS.items():
        given = torch.cat(a), b[RANK], bias[RANK]
        plain = [t.float().requires_grad_() for t in given]
        want = function(plain[0] @ plain[1].t() + plain[2])
        leaves = [t.clone().requires_grad_() for t in (a[RANK], *given[1:])]
        got = ops.all_gather_matmul(leaves[0], leaves[1].t(), bias=leaves[2], activation=name)
        close(got.detach(), want.detach())
        got.sum().backward()
        want.sum().backward()
        close(leaves[1].grad, plain[1].grad)
        close(leaves[2].grad, plain[2].grad)


def check_gates_and_gradients():
    a, bias = everyones(3, 16), everyones(8, seed=3)[RANK]
    both = [everyones(8, 16, seed=seed)[RANK] for seed in (1, 2)]
    grad = everyones(3 * SIZE, 8, seed=4)
    plain = [t.float().requires_grad_() for t in (torch.cat(a), *both, bias)]
    want = torch.nn.functional.silu(plain[0] @ plain[1].t()) * (plain[0] @ plain[2].t() + plain[3])
    leaves = [t.clone().requires_grad_() for t in (a[RANK], *both, bias)]
    weights = [leaves[1].t(), leaves[2].t()]
    got = ops.all_gather_matmul(leaves[0], weights, bias=[None, leaves[3]], activation="silu", gated=True)
    close(got.detach(), want.detach())
    got.backward(grad[RANK])
    want.backward(grad[RANK].float())
    for leaf, right in zip(leaves[1:], plain[1:], strict=True):
        close(leaf.grad, right.grad)
    close(leaves[0].grad, sum(WORLD.all_gather(plain[0].grad)).chunk(SIZE)[RANK])


def check_scaled_products():
    a, b = (everyones(n, 32, seed=n, dtype=torch.float8_e4m3fn) for n in (4 * SIZE, 16))
    of_a, of_b = everyones(4 * SIZE, seed=1, dtype=torch.float32), everyones(1, 16, seed=2, dtype=torch.float32)
    scaled = [x.float() * s[:, None] for x, s in zip(a, of_a, strict=True)]
    right = [y.float().t() * s for y, s in zip(b, of_b, strict=True)]
    given = a[RANK], [b[RANK].t(), b[RANK].t()]
    one = torch.tensor(0.5)
    both = ops.all_gather_matmul(*given, scales=(of_a[RANK], [of_b[RANK], one]), activation="relu")
    close(both[0], torch.relu(torch.cat(scaled) @ right[RANK]))
    close(both[1], torch.relu(torch.cat(scaled) @ b[RANK].float().t() * 0.5))
    got = ops.matmul_reduce_scatter(a[RANK], b[RANK].t(), scales=(of_a[RANK], of_b[RANK]))
    want = sum(x @ y for x, y in zip(scaled, right, strict=True))
    close(got, want.chunk(SIZE)[RANK])
    close(ops.matmul_all_reduce(a[RANK][1:], b[RANK].t(), scales=(of_a[RANK][1:], of_b[RANK])), want[1:])


RECIPES = (
    ops.Float8(),
    ops.Float8("tensorwise", torch.float8_e4m3fn),
    ops.Float8(gradients=torch.bfloat16),
    ops.Float8("blockwise"),
)
UNIT = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3, torch.bfloat16: 2.0**-9}
"""By how much of a number it may be off once it is rounded."""


def rounds(got: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *kinds: torch.dtype, add: float = 0.0) -> None:
    """It is left @ right with operands rounded to such types: as far from it as that explains, and no less."""
    want, size = left.double() @ right.double() + add, left.double().abs() @ right.double().abs()
    error, units = (got.double() - want).abs(), [UNIT[kind] for kind in kinds]
    bound = 1.01 * sum(units) * size + 2.0**-7 * (size + abs(add))
    assert bool((error <= bound).all()), float((error / bound).max())
    typical = (error.pow(2).mean() / (left.double().pow(2) @ right.double().pow(2)).mean()).sqrt()
    assert (float(typical) > 2.0**-7) == (max(units) > 2.0**-6), float(typical)


def check_gradients_of_float8_gathers():
    a, grads = everyones(16, 48), everyones(16 * SIZE, 64, seed=3)
    b, bias = [everyones(n, 48, seed=n) for n in (16, 48)], everyones(16, seed=2)
    for recipe in RECIPES:
        leaf, *weights = (x[RANK].clone().requires_grad_() for x in (a, *b))
        added = bias[RANK].clone().requires_grad_()
        results = ops.all_gather_matmul(leaf, [w.t() for w in weights], bias=[added, None], float8=recipe)
        rounds(results[1].detach(), torch.cat(a), b[1][RANK].t(), torch.float8_e4m3fn, torch.float8_e4m3fn)
        torch.autograd.backward(results, grads[RANK].split([16, 48], 1))
        far = (
            torch.cat([g[16 * RANK :][:16] for g in grads], 1),
            torch.cat([x for pair in zip(*b, strict=True) for x in pair]),
        )
        rounds(leaf.grad, *far, *of_backward(recipe))
        rounds(torch.cat([w.grad for w in weights]), grads[RANK].t(), torch.cat(a), torch.bfloat16)
        close(added.grad, grads[RANK].float().sum(0)[:16])


def of_backward(recipe: ops.Float8) -> tuple[torch.dtype, ...]:
    """The types of a gradient and of a weight where they are multiplied."""
    is_kept = recipe.gradients == torch.bfloat16
    return (torch.bfloat16,) if is_kept else (recipe.gradients, torch.float8_e4m3fn)


def check_gradients_of_float8_sums():
    a, b, grads = everyones(16 * SIZE, 32), everyones(48, 32, seed=1), everyones(16, 48, seed=3)
    whole, forward = torch.cat(grads), 2 * (torch.float8_e4m3fn,)
    far = torch.cat(a, 1), torch.cat(b, 1).t()
    for recipe in RECIPES:
        for operator, rows, given in (
            (ops.matmul_reduce_scatter, slice(16 * RANK, 16 * RANK + 16), grads[RANK]),
            (ops.matmul_all_reduce, slice(None), whole),
        ):
            leaves = [x[RANK].clone().requires_grad_() for x in (a, b)]
            got = operator(leaves[0], leaves[1].t(), bias=torch.ones(48).bfloat16(), float8=recipe)
            rounds(got.detach(), far[0][rows], far[1], *forward, add=1.0)
            got.backward(given)
            rounds(leaves[0].grad, whole, b[RANK], *of_backward(recipe))
            rounds(leaves[1].grad, whole.t(), a[RANK], torch.bfloat16)


def check_matmul_reduce_scatter_and_gradients():
    a, b, bias = everyones(6 * SIZE, 24), everyones(16, 24, seed=1), everyones(16, seed=2)[0]
    grads = everyones(6, 16, seed=3)
    leaves = [x.clone().requires_grad_() for x in (a[RANK], b[RANK], bias)]
    got = ops.matmul_reduce_scatter(leaves[0], leaves[1].t(), bias=leaves[2])
    want = sum(x.float() @ w.float().t() for x, w in zip(a, b, strict=True)) + bias.float()
    close(got.detach(), want.chunk(SIZE)[RANK])
    got.backward(grads[RANK])
    whole = torch.cat(grads).float()
    close(leaves[0].grad, whole @ b[RANK].float())
    close(leaves[1].grad, whole.t() @ a[RANK].float())
    close(leaves[2].grad, whole.sum(0))


def check_matmul_all_reduce():
    a, b, bias = everyones(7, 24), everyones(16, 24, seed=1), everyones(16, seed=2)[0]
    leaves = [x.clone().requires_grad_() for x in (a[RANK], b[RANK])]
    got = ops.matmul_all_reduce(leaves[0], leaves[1].t(), bias=bias)
    close(got.detach(), sum(x.float() @ w.float().t() for x, w in zip(a, b, strict=True)) + bias.float())
    got.backward(torch.ones_like(got))
    close(leaves[0].grad, b[RANK].float().sum(0).expand(7, 24))
    close(leaves[1].grad, a[RANK].float().sum(0).expand(16, 24))


def check_features_of_any_number():
    a, b = everyones(4, 100), everyones(100, 36, seed=1)
    close(ops.all_gather_matmul(a[RANK], b[RANK]), torch.cat(a).float() @ b[RANK].float())
    want = sum(x.float() @ y.float() for x, y in zip(a, b, strict=True))
    close(ops.matmul_reduce_scatter(a[RANK], b[RANK]), want.chunk(SIZE)[RANK])
    close(ops.matmul_all_reduce(a[RANK], b[RANK]), want)


def check_sums_of_anything():
    x = everyones(5, 77)
    close(ops.all_reduce(x[RANK]), sum(part.float() for part in x))
    assert ops.all_reduce(x[RANK][0, 0]).shape == ()


def check_combinations_of_all_types():
    """Sums of integers wrap around; a NaN of one rank stays in a maximum and a minimum."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8):
        x = torch.stack(everyones(6, 7, dtype=torch.float32)).mul(40).int().to(dtype)
        assert torch.equal(ops.all_reduce(x[RANK]), x.sum(0, dtype=dtype))
        assert torch.equal(ops.all_reduce(x[RANK], op="max"), x.amax(0))
        out = torch.empty_like(x[RANK])
        assert ops.all_reduce(x[RANK], op="min", out=out) is out and torch.equal(out, x.amin(0))
        assert torch.equal(ops.reduce_scatter(x[RANK]), x.sum(0, dtype=dtype).chunk(SIZE)[RANK])
        assert torch.equal(ops.reduce_scatter(x[RANK], op="max"), x.amax(0).chunk(SIZE)[RANK])
        want = x.amin(0).chunk(SIZE)[RANK]
        part = torch.empty_like(want)
        assert ops.reduce_scatter(x[RANK], op="min", out=part) is part and torch.equal(part, want)
    x = torch.tensor([torch.nan if RANK == 0 else 1.0, RANK])
    assert ops.all_reduce(x, op="max").isnan().tolist() == ops.all_reduce(x, op="min").isnan().tolist() == [True, False]
    fine = torch.tensor([2**62 + RANK, 1 / 3], dtype=torch.float64)
    assert ops.all_reduce(fine)[1] == sum([fine[1]] * SIZE)
    assert ops.all_reduce(torch.tensor([2**62 + RANK]), op="max") == 2**62 + SIZE - 1


def check_collectives_and_gradients():
    x = everyones(SIZE, 3, 2 * SIZE, dtype=torch.float32)
    total = sum(x)
    # Gradient of an element, if the gradient of every use is one: the number of ranks that use the element.
    for call, want, users in (
        (lambda t: ops.all_gather(t, 1), torch.cat(x, 1), SIZE),
        (lambda t: ops.reduce_scatter(t, 2), total.chunk(SIZE, 2)[RANK], 1),
        (lambda t: ops.all_reduce(t), total, SIZE),
        (lambda t: ops.all_to_all(t, 2, 1), torch.cat([part.chunk(SIZE, 2)[RANK] for part in x], 1), 1),
    ):
        leaf = x[RANK].clone().requires_grad_()
        got = call(leaf)
        torch.testing.assert_close(got.detach(), want, rtol=1e-5, atol=1e-5)
        got.sum().backward()
        assert torch.equal(leaf.grad, torch.full_like(leaf, users))


def check_tokens_to_heads_and_back():
    x = everyones(2, 3, 2 * SIZE, 8)
    heads = ops.all_to_all(x[RANK], 2, 1)
    assert torch.equal(heads, torch.cat([part.chunk(SIZE, 2)[RANK] for part in x], 1))
    assert torch.equal(ops.all_to_all(heads, 1, 2), x[RANK])


def check_decode():
    batch, heads, keys, dim = 2, 4, 20, 64
    q, (k, v) = everyones(batch, heads, dim)[0], (everyones(batch, keys, 2, dim, seed=seed) for seed in (1, 2))
    lengths = [torch.tensor([keys - rank, 3 * rank + 1], dtype=torch.int32) for rank in range(SIZE)]
    want = torch.empty(batch, heads, dim)
    for b in range(batch):
        keys_of, values = (torch.cat([x[b, : n[b]] for x, n in zip(xs, lengths, strict=True)]).float() for xs in (k, v))
        scores = torch.einsum("hgd,khd->hgk", q[b].float().view(2, 2, dim), keys_of) * dim**-0.5
        want[b] = torch.einsum("hgk,khd->hgd", scores.softmax(-1), values).view(heads, dim)
    close(ops.flash_decode(q, k[RANK], v[RANK], lengths[RANK]), want)
    close(ops.flash_decode(q, k[RANK], v[RANK], lengths[RANK], own_heads=True), want.chunk(SIZE, 1)[RANK])
    all_of_them = ops.flash_decode(q, k[RANK], v[RANK], torch.full((batch,), keys, dtype=torch.int32))
    more = ops.flash_decode(q, k[RANK], v[RANK], torch.full((batch,), keys + 99, dtype=torch.int32))
    assert torch.equal(more, all_of_them), "no more than there are"
    wide = everyones(batch, heads, 2 * dim)[0]
    cache = everyones(batch, keys, 2 * dim, seed=1)
    for b in range(batch):
        rows = torch.cat([x[b, : n[b]] for x, n in zip(cache, lengths, strict=True)]).float()
        want[b] = (wide[b].float() @ rows.t() * 0.1).softmax(-1) @ rows[:, :dim]
    close(ops.mla_decode(wide, cache[RANK], lengths[RANK], value_dim=dim, scale=0.1), want)


def check_decode_of_pages_and_of_float8():
    """Pages of keys and values alternate in one tensor, unused entries are -1, some sequences have no keys."""
    page, heads, dim, table = 16, 2, 64, torch.tensor([[3, 1], [0, -1], [-1, -1]], dtype=torch.int32)
    lengths = [torch.tensor([17 + rank, 16 - rank, 0], dtype=torch.int32) for rank in range(SIZE)]
    q, pages = everyones(3, 2 * heads, dim)[0], everyones(4, 2, page, heads, dim, seed=1)
    scales = torch.tensor([0.5, 2.0]), torch.tensor([3.0])
    for kind in (torch.bfloat16, torch.float8_e4m3fn):
        of_k, of_v = scales if kind != torch.bfloat16 else (None, None)
        given = [x.to(kind).float() for x in pages]
        want = torch.empty(3, 2 * heads, dim)
        for b in range(3):
            k, v = (
                torch.cat([x[table[b].clamp(0), i].flatten(0, 1)[: n[b]] for x, n in zip(given, lengths, strict=True)])
                for i in range(2)
            )
            k, v = (x if of is None else x * of[:, None] for x, of in ((k, of_k), (v, of_v)))
            scores = torch.einsum("hgd,khd->hgk", q[b].float().view(heads, 2, dim), k) * dim**-0.5
            want[b] = torch.einsum("hgk,khd->hgd", scores.softmax(-1), v).view(-1, dim)
        caches = pages[RANK].to(kind).unbind(1)
        close(ops.flash_decode(q, *caches, lengths[RANK], block_table=table, k_scale=of_k, v_scale=of_v), want)
    cache, wide = everyones(4, page, 2 * dim, seed=2), everyones(3, heads, 2 * dim, seed=3)[0]
    for b in range(3):
        rows = torch.cat([x[table[b].clamp(0)].flatten(0, 1)[: n[b]] for x, n in zip(cache, lengths, strict=True)])
        rows = rows.to(torch.float8_e4m3fn).float() * 2
        want[b, :heads] = (wide[b].float() @ rows.t() * 0.1).softmax(-1) @ rows[:, :dim]
    narrow, how = cache[RANK].to(torch.float8_e4m3fn), {"block_table": table, "value_dim": dim, "scale": 0.1}
    close(ops.mla_decode(wide, narrow, lengths[RANK], cache_scale=scales[1] - 1, **how), want[:, :heads])


def check_sequence_attention():
    tokens, dim = 6, 64
    order = torch.cat(WORLD.all_gather(ops.sequence_positions(tokens, zigzag=True)))
    q, k, v = (torch.cat(everyones(1, tokens, heads, dim, seed=heads), 1) for heads in (4, 2, 2))
    in_order = [x[:, order.argsort()].float().transpose(1, 2) for x in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*in_order, is_causal=True, enable_gqa=True).transpose(1, 2)
    mine = [x.chunk(SIZE, 1)[RANK] for x in (q, k, v)]
    for ring in (False, True):
        got = ops.sequence_attention(*mine, causal=True, zigzag=True, ring=ring)
        close(got, want[:, ops.sequence_positions(tokens, zigzag=True)])


def check_attention_backward_from_a_result():
    tokens, dim = 6, 64
    order = torch.cat(WORLD.all_gather(ops.sequence_positions(tokens, zigzag=True)))
    whole = [torch.cat(everyones(1, tokens, heads, dim, seed=heads), 1) for heads in (4, 2, 2)]
    grad = torch.cat(everyones(1, tokens, 4, dim, seed=9), 1)
    leaves = [x[:, order.argsort()].double().requires_grad_() for x in whole]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    hidden = torch.ones(SIZE * tokens, SIZE * tokens, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * 0.1).masked_fill(hidden, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    out.backward(grad[:, order.argsort()].double())
    own = ops.sequence_positions(tokens, zigzag=True)
    mine, given = [x.chunk(SIZE, 1)[RANK] for x in whole], grad.chunk(SIZE, 1)[RANK]
    for ring in (False, True):
        how = {"causal": True, "zigzag": True, "ring": ring, "scale": 0.1}
        made, lse = ops.sequence_attention_forward(*mine, **how)
        close(made, out.detach()[:, own])
        torch.testing.assert_close(lse, scores.detach().logsumexp(-1)[..., own].float(), rtol=1e-3, atol=1e-3)
        exact = out.detach()[:, own].bfloat16(), scores.detach().logsumexp(-1)[..., own].float()
        for results in (exact, (made, lse)):
            found = ops.sequence_attention_backward(given, *mine, *results, **how)
            for got, leaf in zip(found, leaves, strict=True):
                close(got, leaf.grad[:, own])
        ours = [x.clone().requires_grad_() for x in mine]
        by_autograd = torch.autograd.grad(ops.sequence_attention(*ours, **how), ours, given)
        for got, want in zip(found, by_autograd, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-3)


def check_experts_and_gradients():
    experts, tokens, choices, k, n = 2 * SIZE, 6, 2, 16, 24
    x, w = everyones(tokens, k), torch.cat(everyones(2, n, k, seed=1))
    chosen = [scores.topk(choices).indices for scores in everyones(tokens, experts, seed=2)]
    share, grads = everyones(tokens, choices, seed=3, dtype=torch.float32), everyones(tokens, n, seed=4)
    leaf, weight, given = (t.clone().requires_grad_() for t in (x[RANK], w.chunk(SIZE)[RANK], share[RANK]))
    results = []
    for _ in range(2):
        routing = ops.moe_route(chosen[RANK], experts, given)
        y = ops.grouped_matmul(ops.moe_dispatch(leaf, routing), weight.mT, routing)
        results.append(ops.moe_combine(y, routing, routing.weights))
    assert torch.equal(*results), "the same bits each time"
    narrow = share[RANK].bfloat16().requires_grad_()
    taken = ops.moe_route(chosen[RANK], experts, narrow).weights
    assert torch.equal(taken, ops.moe_route(chosen[RANK], experts, share[RANK].bfloat16().float()).weights)
    taken.sum().backward()
    assert narrow.grad.dtype == torch.bfloat16

    plain = [t.float().requires_grad_() for t in (torch.stack(x), w, torch.stack(share))]
    made = torch.einsum("rtk,enk->rten", plain[0], plain[1])
    where = torch.stack(chosen)[..., None].expand(-1, -1, -1, n)
    want = (made.gather(2, where) * plain[2][..., None]).sum(2)
    close(results[0].detach(), want[RANK].detach())
    results[0].backward(grads[RANK])
    want.backward(torch.stack(grads).float())
    close(leaf.grad, plain[0].grad[RANK])
    close(weight.grad, plain[1].grad.chunk(SIZE)[RANK])
    close(given.grad, plain[2].grad[RANK])


def check_float8_tokens_travel_with_scales():
    x, scales, tokens = everyones(3, 32), everyones(3, 2, dtype=torch.float32), 3 - RANK
    routing = ops.moe_route(torch.zeros(tokens, 1, dtype=torch.int64), SIZE, most=3)  # all go to rank 0
    rows, given = ops.moe_dispatch(x[RANK][:tokens].to(torch.float8_e4m3fn), routing, scales[RANK][:tokens])
    if RANK == 0:
        assert torch.equal(rows[:5].float(), torch.cat([x[0], x[1][:2]]).to(torch.float8_e4m3fn).float())
        assert torch.equal(given[:5], torch.cat([scales[0], scales[1][:2]]))


def check_no_tokens_have_gradients():
    """As an expanded one comes, which is what `sum` sends back: without elements it passes for contiguous."""
    tokens = 0 if RANK else 2
    x = torch.ones(tokens, 8).bfloat16().requires_grad_()
    routing = ops.moe_route(torch.zeros(tokens, 1, dtype=torch.int64), SIZE, most=2)
    ops.moe_combine(ops.moe_dispatch(x, routing), routing).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def check_errors_are_everyones():
    with pytest.raises(ArgumentError, match=f"dimension 0 of a is {SIZE + 1}, the group has {SIZE} ranks"):
        ops.matmul_reduce_scatter(torch.ones(SIZE + 1, 8).half(), torch.ones(8, 8).half())
    rows, b = 9 + RANK, torch.ones(8, 8).half()  # which are rounded up alike
    for call in (
        lambda: ops.all_reduce(torch.ones(8 if RANK else 4096).half()),
        lambda: ops.all_reduce(torch.ones(rows, 3)),
        lambda: ops.all_gather(torch.ones(rows, 3).half()),
        lambda: ops.all_gather(torch.ones(rows, 3).byte()),
        lambda: ops.reduce_scatter(torch.ones(SIZE * rows, 3)),
        lambda: ops.all_to_all(torch.ones(SIZE * rows, 3)),
        lambda: ops.all_gather_matmul(torch.ones(rows, 8).half(), b),
        lambda: ops.matmul_reduce_scatter(torch.ones(SIZE * rows, 8).half(), b),
        lambda: ops.matmul_all_reduce(torch.ones(rows, 8).half(), b),
    ):
        with pytest.raises(RankMismatchError):
            call()


def run(names: dict[str, Any]) -> None:
    """All checks of a script, of what is small; and once more, where a product could be, as if it were large."""
    by_estimate, asked = strategy._overlaps, False

    def of_small(*job: Any) -> bool:
        nonlocal asked
        asked = True
        return by_estimate(*job)

    for check in [value for name, value in names.items() if name.startswith("check_")]:
        strategy._overlaps, asked = of_small, False
        check()
        if asked:
            strategy._overlaps = lambda machine, job, ranks: True
            check()
        WORLD.barrier()
        if RANK == 0:
            print("passed", check.__name__, flush=True)


if __name__ == "__main__":
    run(dict(globals()))
