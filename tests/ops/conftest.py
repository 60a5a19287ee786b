# SPDX-License-Identifier: MIT
"""A mesh of one rank, for operators in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tilescale.settings import settings


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A job of one rank without GPUs. The programs themselves are checked elsewhere."""
    monkeypatch.setenv("TILESCALE_EMULATE", "1")
    monkeypatch.setenv("TILESCALE_CHECK", "none")
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.fixture
def fresh_compiler() -> None:
    """Clear the caches of compiled programs."""
    torch._dynamo.reset()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()
