# SPDX-License-Identifier: MIT
"""Modules of engines, which may not be installed here, or need more than is."""

from __future__ import annotations

import sys
from importlib import import_module, metadata
from types import ModuleType

import torch
import torch.distributed as dist

import tilescale

WORLD = tilescale.init()


def needed(name: str) -> ModuleType:
    """A module; without it the script ends, and says why."""
    try:
        return import_module(name)
    except Exception as error:  # noqa: BLE001 - what packages do when they are imported without GPUs
        print(f"skipped: {name} cannot be imported here: {type(error).__name__}: {error}", flush=True)
        sys.exit(0)


def entry_points(group: str) -> metadata.EntryPoints:
    """The plugin that pyproject.toml names for a group."""
    function = group.partition(".")[0]
    point = metadata.EntryPoint("tilescale", f"tilescale.ops.engine_plugins:{function}", group)
    return metadata.EntryPoints([point])


def members() -> tuple[dist.ProcessGroup, torch.Tensor, torch.Tensor]:
    """A group of all ranks, a tensor of this one, and the sum of all, in float64."""
    dist.init_process_group("gloo")
    given = [torch.randn(6, 64, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(WORLD.size)]
    return dist.new_group(list(range(WORLD.size))), given[WORLD.rank], torch.stack([x.double() for x in given]).sum(0)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)
