# SPDX-License-Identifier: MIT
"""Graphs of autograd end with their calls: a node that is left would bind a leaf to the stream of an earlier call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.autograd_nodes import no_graph_is_kept
from tilescale import ops

pytestmark = pytest.mark.usefixtures("emulated")


CHOSEN = torch.tensor([[0, 1], [1, 2]])


def experts(x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return ops.moe_layer(x, (CHOSEN, weights), gate_up, down)


@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        (ops.matmul_reduce_scatter, [(16, 64), (64, 32)]),
        (ops.all_gather_matmul, [(16, 64), (64, 32)]),
        (ops.all_reduce, [(16, 64)]),
        (experts, [(2, 64), (2, 2), (3, 32, 64), (3, 64, 16)]),
    ],
    ids=["matmul_reduce_scatter", "all_gather_matmul", "all_reduce", "moe_layer"],
)
def test_no_graph_outlives_a_call(call: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]]):
    leaves = [torch.randn(*shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    check(leaves, lambda: call(*leaves))


def test_no_graph_outlives_a_call_of_layers():
    up, down = ops.ColumnParallelLinear.shard(linear()), ops.RowParallelLinear.shard(linear())
    x = torch.randn(16, 64, dtype=torch.bfloat16).requires_grad_()
    check([x, up.weight, down.weight], lambda: down(up(x)))


def linear() -> torch.nn.Linear:
    return torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)


def check(leaves: list[torch.Tensor], call: Callable[[], torch.Tensor]) -> None:
    for _ in range(2):
        with no_graph_is_kept(leaves):
            y = call()
            y.backward(torch.ones_like(y))
            del y
