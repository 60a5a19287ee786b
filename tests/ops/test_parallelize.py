# SPDX-License-Identifier: MIT
"""What `ops.parallelize_module` says of plans that do not do what they seem to."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from tilescale import ops
from tilescale.errors import ArgumentError

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).to(dtype)


def test_names_that_no_module_has_are_told_of(mesh: DeviceMesh):
    with pytest.warns(UserWarning, match="'up' could not be resolved"):
        made = ops.parallelize_module(model(), mesh, {"up": ColwiseParallel(), **PLAN})
    assert isinstance(made[0], ops.ColumnParallelLinear) and isinstance(made[2], ops.RowParallelLinear)


def test_layers_of_a_type_that_has_no_products_are_told_of(mesh: DeviceMesh):
    with pytest.warns(UserWarning, match=r"layers \['0', '2'\] are torch.float32: PyTorch's"):
        made = ops.parallelize_module(model(torch.float32), mesh, PLAN)
    assert type(made[0]) is nn.Linear


def test_other_arguments_are_named(mesh: DeviceMesh):
    for given, said in (
        ((None, mesh, {}), "module is NoneType"),
        ((model(), mesh, {"0": "colwise"}), r"parallelize_plan\['0'\] is str"),
        ((model(), mesh, "colwise"), "parallelize_plan is str"),
        ((model(), None, PLAN), "device_mesh is None"),
    ):
        with pytest.raises(ArgumentError, match=said):
            ops.parallelize_module(*given)
    with pytest.raises(ArgumentError, match="src_data_rank is 0, group no mesh"):
        ops.RowParallelLinear.shard(nn.Linear(16, 16), src_data_rank=0)


def test_without_a_plan_nothing_is_done(mesh: DeviceMesh):
    with pytest.warns(UserWarning, match="will do nothing"):
        assert type(ops.parallelize_module(model(), mesh)[0]) is nn.Linear


@pytest.mark.parametrize("norm", [lambda: nn.RMSNorm(16), lambda: nn.LayerNorm(16), lambda: nn.Dropout(0.0)])
def test_norms_of_tokens_work_on_shards(mesh: DeviceMesh, norm: Callable[[], nn.Module]):
    """As PyTorch's: the same results, gradients, parameters; what is no norm stays as it is."""
    ours, theirs = (nn.Sequential(norm().bfloat16()) for _ in range(2))
    ops.parallelize_module(ours, mesh, {"0": SequenceParallel()})
    parallelize_module(theirs, mesh, {"0": SequenceParallel()})
    ours = copy.deepcopy(ours)
    x = torch.randn(2, 8, 16).bfloat16()
    results = []
    for model in (ours, theirs):
        given = x.clone().requires_grad_()
        y = model(given)
        y.to_local().float().pow(2).sum().backward()
        results.append([y.to_local(), given.grad, *(p.grad.to_local() for p in model.parameters())])
        assert y.placements == (Shard(1),)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    assert [p.grad.placements for p in ours.parameters()] == [p.grad.placements for p in theirs.parameters()]
    assert list(ours.state_dict()) == list(theirs.state_dict()) and type(ours[0]).__name__ == type(theirs[0]).__name__


def test_of_others_nothing_is_said(mesh: DeviceMesh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.parallelize_module(model(), mesh, PLAN)
