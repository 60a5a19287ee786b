# SPDX-License-Identifier: MIT
"""Sums over the ranks of gradients that leave sharded features, counted on one rank."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from tilescale import ops
from tilescale.ops import partial_gradients

PLAN = {"[qkv]": ColwiseParallel(), "o": RowwiseParallel()}


class Attention(nn.Module):
    """Heads, a norm of each, and parameters in front of and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.norm, self.head_norm, self.last = nn.RMSNorm(16), nn.RMSNorm(4), nn.RMSNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.norm(x)
        q, k, v = (w(given).view(*x.shape[:-1], -1, 4) for w in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(self.head_norm(q), self.head_norm(k), v)
        return x + self.last(self.o(y.flatten(-2)))


class Latent(Attention):
    """The keys have a part that all heads share, as in DeepSeek-V2: it comes from a layer that is not split."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(16, 20, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, shared = self.low(x).split((16, 4), -1)
        q, k, v = (w(self.norm(given)).view(*x.shape[:-1], -1, 4) for w in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k + shared.unsqueeze(-2), v)
        return self.o(y.flatten(-2))


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Counts sums by the shape of the gradient."""
    found: Counter = Counter()
    find = partial_gradients.summed_alike

    def counted(x: torch.Tensor, group: str) -> torch.Tensor:
        found[tuple(x.shape)] += 1
        return find(x, group)

    monkeypatch.setattr(partial_gradients, "summed_alike", counted)
    return found


def trained(mesh: DeviceMesh, block: nn.Module, plan: dict = PLAN) -> nn.Module:
    made = ops.parallelize_module(block.bfloat16(), mesh, plan)
    made(torch.randn(2, 3, 16).bfloat16()).float().pow(2).sum().backward()
    return made


@pytest.mark.usefixtures("emulated")
def test_gradients_of_norms_of_heads_are_summed_at_each_use(mesh: DeviceMesh, sums: Counter):
    made = trained(mesh, Attention())
    assert sums == {(4,): 2}
    made(torch.randn(2, 3, 16).bfloat16())  # a forward without a backward keeps nothing
    made(torch.randn(2, 3, 16).bfloat16()).float().sum().backward()
    assert sums == {(4,): 4}


@pytest.mark.usefixtures("emulated")
def test_a_copy_of_a_model_whose_call_failed_sums_its_own(mesh: DeviceMesh, sums: Counter):
    made = trained(mesh, Attention())
    sums.clear()
    given = torch.randn(2, 3, 16, requires_grad=True).bfloat16()
    with pytest.raises(ZeroDivisionError), made.o.register_forward_pre_hook(lambda *_: 1 // 0):
        made(given)
    copied = copy.deepcopy(made)
    copied(given).float().sum().backward()
    assert sums == {(4,): 2} and made.head_norm.weight.grad is not copied.head_norm.weight.grad


@pytest.mark.usefixtures("emulated")
def test_gradients_of_frozen_norms_are_not_summed_until_they_train(mesh: DeviceMesh, sums: Counter):
    block = Attention()
    block.head_norm.requires_grad_(False)
    made = trained(mesh, block)
    assert not sums
    made.head_norm.requires_grad_(True)
    made(torch.randn(2, 3, 16).bfloat16()).float().sum().backward()
    assert sums == {(4,): 2}


@pytest.mark.usefixtures("emulated")
def test_values_of_all_ranks_that_meet_heads_have_one_sum(mesh: DeviceMesh, sums: Counter):
    """The shared part of the keys; the norm and the layer in front have whole gradients."""
    trained(mesh, Latent())
    assert sums == {(2, 3, 4): 1}


class TwoEnds(Attention):
    """Two row-parallel layers take the same heads."""

    def __init__(self) -> None:
        super().__init__()
        self.o2 = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.head_norm(self.q(x).view(*x.shape[:-1], -1, 4)).flatten(-2)
        return self.o(y) + self.o2(y)


class Gated(Attention):
    """A value of all ranks that comes from outside meets the heads, and so does a number."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor, scale: float) -> torch.Tensor:
        heads = self.q(x).view(*x.shape[:-1], -1, 4)
        return self.o((heads * gate * scale).flatten(-2))


class Replicated(Attention):
    """A parameter that is a DTensor of all ranks meets the heads."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.scale = nn.Parameter(distribute_tensor(torch.ones(4).bfloat16(), mesh, [Replicate()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o((self.q(x).view(*x.shape[:-1], -1, 4) * self.scale.to_local()).flatten(-2))


class Chained(Attention):
    """The sum of a row-parallel layer meets the heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.q(x).view(*x.shape[:-1], -1, 4)
        return self.o((heads * self.k(self.v(x))[..., :4].unsqueeze(-2)).flatten(-2))


@pytest.mark.usefixtures("emulated")
def test_an_edge_in_front_of_two_layers_has_one_sum(mesh: DeviceMesh, sums: Counter):
    trained(mesh, TwoEnds(), PLAN | {"o2": RowwiseParallel()})
    assert sums == {(4,): 1}


@pytest.mark.usefixtures("emulated")
def test_gradients_of_given_values_are_summed_where_they_leave_the_heads(mesh: DeviceMesh, sums: Counter):
    made = ops.parallelize_module(Gated().bfloat16(), mesh, PLAN)
    leaf = torch.randn(3, requires_grad=True)
    made(torch.randn(2, 3, 16).bfloat16(), leaf.view(1, 3, 1, 1).bfloat16(), 0.5).float().sum().backward()
    assert sums == {(1, 3, 1, 1): 1} and leaf.grad is not None


@pytest.mark.usefixtures("emulated")
def test_gradients_of_replicated_dtensors_are_summed(mesh: DeviceMesh, sums: Counter):
    trained(mesh, Replicated(mesh))
    assert sums == {(4,): 1}


@pytest.mark.usefixtures("emulated")
def test_gradients_of_what_a_layer_has_summed_are_summed_where_they_leave_the_heads(mesh: DeviceMesh, sums: Counter):
    trained(mesh, Chained(), {"[qv]": ColwiseParallel(), "[ko]": RowwiseParallel()})
    assert sums == {(2, 3, 16): 1}


@pytest.mark.usefixtures("emulated")
def test_a_block_keeps_no_graph(mesh: DeviceMesh):
    class Mark:
        """An entry of a node's metadata, which lives as long as the node."""

    made, mark = ops.parallelize_module(Attention().bfloat16(), mesh, PLAN), Mark()
    given = torch.randn(2, 3, 16, requires_grad=True).bfloat16()
    assert given.grad_fn is not None
    given.grad_fn.metadata["mark"], left = mark, weakref.ref(mark)
    made(given)
    del given, mark
    gc.collect()
    assert left() is None


def test_placements_of_a_whole_value_are_all_replicated():
    assert partial_gradients._lies_whole([Replicate(), Replicate()])
    assert not partial_gradients._lies_whole([Replicate(), Shard(0)])


@pytest.mark.usefixtures("emulated")
def test_modules_that_the_plan_names_are_left_to_it(mesh: DeviceMesh, sums: Counter):
    trained(mesh, Attention(), PLAN | {"head_norm": SequenceParallel(sequence_dim=2, use_local_output=True)})
    assert not sums


@pytest.mark.usefixtures("emulated", "fresh_compiler")
def test_a_compiled_graph_says_once_what_it_does_not_sum(mesh: DeviceMesh):
    partial_gradients._warn_once.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        blocks = nn.Sequential(Attention(), Attention()).bfloat16()
        made = ops.parallelize_module(blocks, mesh, {f"*.{name}": style for name, style in PLAN.items()})
        run = torch.compile(made, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            run(torch.randn(2, 3, 16).bfloat16()).float().sum().backward()
        with torch.no_grad():
            run(torch.randn(2, 3, 16).bfloat16())
    (said,) = [str(each.message) for each in caught if "compiled" in str(each.message)]
    assert "norm.weight, head_norm.weight, last.weight" in said and "SequenceParallel" in said
