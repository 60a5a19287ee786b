# SPDX-License-Identifier: MIT
"""What `ops.parallelize_module` says of plans that do not do what they seem to."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

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


def test_of_others_nothing_is_said(mesh: DeviceMesh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.parallelize_module(model(), mesh, PLAN)
