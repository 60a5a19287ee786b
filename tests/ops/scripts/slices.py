# SPDX-License-Identifier: MIT
"""Operators on slices of a DeviceMesh, in a job of four ranks: teams of two call at the same time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tilescale
from tilescale import ops
from tilescale.errors import ArgumentError

WORLD = tilescale.init()

if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = [torch.randn(3, 16, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(4)]
    for name in ("tp", "dp"):
        group = mesh[name].get_group()
        want = torch.cat([x[rank] for rank in dist.get_process_group_ranks(group)])
        for given in (mesh[name], group):
            assert torch.equal(ops.all_gather(x[WORLD.rank], group=given), want)
    try:
        ops.all_gather(x[WORLD.rank], group=mesh)
    except ArgumentError as error:
        assert "group is a mesh of 2 dimensions" in str(error)
    else:
        raise AssertionError("a mesh of two dimensions is no group")
    dist.destroy_process_group()
    print("passed", flush=True)
