# SPDX-License-Identifier: MIT
"""GEMMs and layers with any N or K, forward and backward, on one emulated rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from tilescale import ops
from tilescale.ops.padding import padded, trimmed
from tilescale.ops.workspace import needed

pytestmark = pytest.mark.usefixtures("emulated")

SHAPES = [(5, 12, 100), (3, 1, 1), (4, 100, 16), (7, 30, 9)]
"""M, N, K."""


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor, share: float = 2**-5) -> None:
    torch.testing.assert_close(got.float(), want.float(), rtol=share, atol=float(want.float().abs().mean()) * share)


@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("product", [ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce])
def test_products_and_gradients(product: Any, transposed: bool, m: int, n: int, k: int):
    a, bias = random(m, k).requires_grad_(), random(n).requires_grad_()
    b = (random(n, k).t() if transposed else random(k, n)).requires_grad_()
    c, grad = product(a, b, bias=bias), random(m, n)
    assert c.shape == (m, n) and c.is_contiguous()
    c.backward(grad)
    close(c, a.float() @ b.float() + bias.float())
    close(a.grad, grad.float() @ b.float().t())
    close(b.grad, a.float().t() @ grad.float())
    close(bias.grad, grad.float().sum(0))


@pytest.mark.parametrize("product", [ops.all_gather_matmul, ops.matmul_reduce_scatter, ops.matmul_all_reduce])
def test_float8_with_scales_and_by_rounding(product: Any):
    m, n, k = 5, 20, 40
    a, b = random(m, k, dtype=torch.float8_e4m3fn), random(n, k, dtype=torch.float8_e4m3fn)
    of_a, of_b = torch.rand(m) + 0.5, torch.rand(n) + 0.5
    want = (a.float() @ b.float().t()) * of_a[:, None] * of_b
    close(product(a, b.t(), scales=(of_a, of_b)), want)
    x, w = random(m, k).requires_grad_(), random(n, k).requires_grad_()
    y, grad = product(x, w.t(), float8=ops.Float8()), random(m, n)
    y.backward(grad)
    torch.testing.assert_close(y.float(), x.float() @ w.float().t(), rtol=0.3, atol=2.0)
    torch.testing.assert_close(x.grad.float(), grad.float() @ w.float(), rtol=0.3, atol=2.0)
    close(w.grad, grad.float().t() @ x.float())


def test_several_weights_gates_and_kept_rows():
    a, weights = random(5, 100), [random(100, 12), random(100, 8), random(100, 30)]
    results, rows = ops.all_gather_matmul(a, weights, bias=[random(12), None, random(30)], return_gathered=True)
    assert [tuple(x.shape) for x in results] == [(5, 12), (5, 8), (5, 30)] and torch.equal(rows, a)
    close(results[1], a.float() @ weights[1].float())
    gate, up = random(100, 20), random(100, 20)
    gated, rows = ops.all_gather_matmul(a, [gate, up], activation="silu", gated=True, return_gathered=True)
    close(gated, silu(a.float() @ gate.float()) * (a.float() @ up.float()))
    assert torch.equal(rows, a)


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("float8", [None, ops.Float8(), ops.Float8("blockwise")])
def test_layers_of_any_features(sequence: bool, float8: ops.Float8 | None):
    up, down = nn.Linear(100, 36).bfloat16(), nn.Linear(36, 100).bfloat16()
    plain = nn.Sequential(up, down)
    x = random(2, 4, 100).requires_grad_()
    want = plain(x)
    (of_x,) = torch.autograd.grad(want.sum(), x)
    layers = [
        kind.shard(layer, sequence=sequence, float8=float8)
        for kind, layer in ((ops.ColumnParallelLinear, up), (ops.RowParallelLinear, down))
    ]
    y = nn.Sequential(*layers)(x)
    share = 2**-4 if float8 is None else 0.5
    close(y, want, share)
    close(torch.autograd.grad(y.sum(), x)[0], of_x, share)


def test_what_needs_no_padding_stays_where_it_is():
    a, weights, bias = random(3, 16), [random(16, 8)], random(8)
    assert [x is y for x, y in zip(padded(a, weights, bias), (a, weights, bias), strict=False)] == [True] * 3
    assert trimmed(a, 16) is a


def test_a_workspace_has_room_for_padding():
    assert needed(4, 100, torch.bfloat16) == needed(4, 112, torch.bfloat16)
