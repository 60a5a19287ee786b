# SPDX-License-Identifier: MIT
"""Several sequences in layers whose tokens are split over the ranks: how often their tokens are copied."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilescale import ops
from tilescale.ops.operator import operator_of

pytestmark = pytest.mark.usefixtures("emulated")
TOKENS, FEATURES, INNER = 8, 16, 32


class Copies(TorchDispatchMode):
    """The number of copies of whole tensors, also inside of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func.name().split("::")
        if space == "tilescale":
            with self:
                made = operator_of(name.partition(".")[0]).function(*args)
            return made
        self.counts[name.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    @property
    def number(self) -> int:
        """Of all kinds."""
        return sum(self.counts[name] for name in ("clone", "copy_", "cat", "_to_copy"))


def copies(x: torch.Tensor, grad: torch.Tensor) -> tuple[int, int]:
    """In forward and backward of a gated pair of layers, whose results are compared with PyTorch's."""
    torch.manual_seed(1)
    gate, up, down = (
        torch.nn.Linear(*sizes, bias=False).bfloat16() for sizes in ((FEATURES, INNER),) * 2 + ((INNER, FEATURES),)
    )
    x = x.detach().requires_grad_()
    want = down(torch.nn.functional.silu(gate(x)) * up(x))
    (slope,) = torch.autograd.grad(want, x, grad)
    for layer in (gate, up):
        ops.ColumnParallelLinear.shard(layer)
    ops.RowParallelLinear.shard(down)
    ops.gather_once(gate, up)
    with Copies() as forward:
        y = down(torch.nn.functional.silu(gate(x)) * up(x))
    with Copies() as backward:
        (of_x,) = torch.autograd.grad(y, x, grad)
    for got, wanted in ((y, want), (of_x, slope)):
        assert got.shape == wanted.shape
        torch.testing.assert_close(got, wanted, rtol=0.05, atol=0.05)
    return forward.number, backward.number


def tokens(batch: int, *, token_major: bool = False) -> torch.Tensor:
    x = torch.randn(batch, TOKENS, FEATURES, dtype=torch.bfloat16)
    return x.transpose(0, 1).contiguous().transpose(0, 1) if token_major else x


def test_several_sequences_cost_a_copy_of_what_enters_the_pair():
    once = copies(tokens(1), tokens(1))
    entered = copies(tokens(3), tokens(3))
    assert (entered[0] - once[0], entered[1] - once[1]) == (1, 1)


def test_sequences_whose_tokens_lie_together_cost_none():
    once = copies(tokens(1), tokens(1))
    assert copies(tokens(3, token_major=True), tokens(3, token_major=True)) == once
