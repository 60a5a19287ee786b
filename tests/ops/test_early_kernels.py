# SPDX-License-Identifier: MIT
"""The compilation of layers' kernels begins when the layers are made, and a step of many rows needs no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel
from torch.distributed.tensor.placement_types import Replicate

from tilescale import ops
from tilescale.ops import early_kernels
from tilescale.ops import kernels as kept
from tilescale.ops.row_counts import MANY
from tilescale.runtime import ahead, early
from tilescale.runtime.kernel import Kernel

GATHERED = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=False)
OVER_RANKS = {
    "": GATHERED,
    **dict.fromkeys(("q", "k"), ColwiseParallel()),
    "o": RowwiseParallel(output_layouts=Shard(1)),
}
ON_ALL = {**dict.fromkeys(("q", "k"), ColwiseParallel()), "o": RowwiseParallel()}


class Block(nn.Module):
    """Two layers with one input, and one of their product."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(64, 64, dtype=dtype) for _ in "qko")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.q(x) * self.k(x))


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Kernel]]:
    """Kernels whose compilation begins, on a computer that compiles them for this device."""
    found: list[Kernel] = []
    for cache in (kept._kept, kept.local_kernel):
        cache.cache_clear()
    monkeypatch.setattr(early_kernels, "_is_on_gpu", lambda layer: layer.weight.dtype is not torch.float32)
    monkeypatch.setattr(ahead.backends, "compiles", lambda: True)
    monkeypatch.setattr(early, "begin", lambda kernels, later, listing: found.extend(kernels))
    yield found
    early.taken()


@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("plan", [OVER_RANKS, ON_ALL], ids=["tokens over ranks", "tokens on all ranks"])
def test_a_step_of_many_rows_needs_no_other_kernel(
    plan: dict[str, object], trains: bool, begun: list[Kernel], mesh: DeviceMesh
):
    model = ops.parallelize_module(Block().train(trains), mesh, plan)
    assert begun and len({*begun}) == len(begun)
    x = torch.zeros(1, MANY, 64).bfloat16()
    with ahead.dry_run() as needed, torch.set_grad_enabled(trains):
        made = model(x)
        if trains:
            made.sum().backward()
    assert needed.now and {*needed.now} <= {*begun}


def test_equal_layers_are_called_once(begun: list[Kernel], mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch):
    called: list[nn.Module] = []
    call = early_kernels._call
    monkeypatch.setattr(early_kernels, "_call", lambda layer: called.append(layer) or call(layer))
    plan = {f"{i}.{name}": style for i in range(4) for name, style in OVER_RANKS.items() if name}
    plan |= {str(i): GATHERED for i in range(4)}
    ops.parallelize_module(nn.Sequential(*(Block() for _ in range(4))), mesh, plan)
    assert len(called) == 2  # q with k, and o


def test_layers_are_not_called_where_the_caches_have_all(
    begun: list[Kernel], mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
):
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(early_kernels, "done_file", lambda find, given: asked.append(given))
    monkeypatch.setattr(early, "are_compiled", lambda listing: True)
    for block in (Block(), Block(), Block().eval()):
        ops.parallelize_module(block, mesh, OVER_RANKS)
    assert not begun and asked[0] == asked[1] != asked[2]


def test_float32_waits_for_the_type_of_the_call(begun: list[Kernel], mesh: DeviceMesh):
    ops.parallelize_module(Block(torch.float32), mesh, OVER_RANKS)
    assert not begun


def test_layers_are_right_after_it(begun: list[Kernel], mesh: DeviceMesh):
    torch.manual_seed(0)
    model = Block()
    x = torch.randn(1, 8, 64).bfloat16()
    want = model(x)
    made = ops.parallelize_module(model, mesh, OVER_RANKS)
    torch.testing.assert_close(made(x), want, rtol=2e-2, atol=2e-2)
    assert all(p.grad is None for p in made.parameters())
