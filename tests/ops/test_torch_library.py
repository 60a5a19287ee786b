# SPDX-License-Identifier: MIT
"""Operators as PyTorch's compiler sees them, in a job of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tilescale import ops
from tilescale.settings import settings


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILESCALE_EMULATE", "1")
    settings.cache_clear()
    yield
    settings.cache_clear()


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16().requires_grad_()


def mlp(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    both = ops.all_gather_matmul(x, [up.t(), gate.t()], bias=[bias, None])
    y = ops.matmul_reduce_scatter(torch.relu(both[0]) * both[1], down.t())
    return ops.all_to_all(ops.matmul_all_reduce(y, down), 1, 0)


def test_a_graph_without_a_break_computes_the_same():
    given, results = [leaf(4, 16), leaf(32, 16), leaf(32, 16), leaf(16, 32), leaf(32)], []
    for call in (mlp, torch.compile(mlp, fullgraph=True, backend="aot_eager")):
        leaves = [t.detach().clone().requires_grad_() for t in given]
        out = call(*leaves)
        out.float().pow(2).sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("all_gather_matmul", lambda x, w: (x, [w], None, True, "")),
        ("matmul_reduce_scatter", lambda x, w: (x, w, None, "")),
        ("matmul_all_reduce", lambda x, w: (x, w, None, "")),
        ("all_gather", lambda x, w: (x, 1, "")),
        ("reduce_scatter", lambda x, w: (x, 0, "")),
        ("all_reduce", lambda x, w: (x, "")),
        ("all_to_all", lambda x, w: (x, 0, 1, "")),
    ],
)
def test_schemas_and_fake_implementations(name: str, given):
    operator = getattr(torch.ops.tilescale, name)
    torch.library.opcheck(operator, given(leaf(4, 16), leaf(16, 16)), test_utils=("test_schema", "test_faketensor"))
