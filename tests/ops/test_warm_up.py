# SPDX-License-Identifier: MIT
"""A dry run compiles all kernels of a model, leaves no trace, and the model is right afterwards."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tilescale import ops
from tilescale.errors import ArgumentError, UsageError
from tilescale.ops import kernels as kept
from tilescale.runtime import ahead
from tilescale.runtime.kernel import Kernel
from tilescale.settings import settings


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILESCALE_EMULATE", "1")
    settings.cache_clear()
    for cache in (kept._kept, kept.local_kernel):
        cache.cache_clear()
    yield
    settings.cache_clear()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ops.ColumnParallelLinear.shard(nn.Linear(32, 64).bfloat16(), sequence=True)
        self.down = ops.RowParallelLinear.shard(nn.Linear(64, 32).bfloat16(), sequence=True)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.relu(self.up(x))))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """The kernels that a warm-up compiles."""
    found: list[Kernel] = []
    names = inspect.unwrap(ops.warm_up).__globals__
    made = names["compile_all"]
    monkeypatch.setitem(names, "compile_all", lambda needed: (found.extend(needed.now), made(needed)))
    return found


def test_all_kernels_of_a_step_are_met_and_none_is_left(compiled: list[Kernel], monkeypatch: pytest.MonkeyPatch):
    model = Block()
    ops.warm_up(model, torch.zeros(8, 32).bfloat16())
    assert len(compiled) >= 2  # at least one for each GEMM
    met = len(compiled)
    monkeypatch.setattr(Kernel, "_first_call", lambda own, *args: pytest.fail(f"{own} was not met"))
    for kernel in compiled:
        kernel._call = kernel._on_emulator
    x = torch.randn(8, 32).bfloat16()
    model(x).sum().backward()
    assert len(compiled) == met


def test_a_dry_run_leaves_no_trace_and_the_model_is_right_after_it():
    model = Block()
    before = torch.random.get_rng_state()
    ops.warm_up(model, torch.zeros(8, 32).bfloat16())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
    model.eval()
    x = torch.randn(8, 32).bfloat16()
    up = torch.relu(nn.functional.linear(x.double(), model.up.weight.double(), model.up.bias.double())).bfloat16()
    expected = nn.functional.linear(up.double(), model.down.weight.double(), model.down.bias.double())
    torch.testing.assert_close(model(x).double(), expected, rtol=2e-2, atol=2e-2)


def test_results_of_a_dry_run_are_zeros():
    with ahead.dry_run() as needed:
        result = ops.all_gather_matmul(torch.randn(8, 32).bfloat16(), torch.randn(32, 16).bfloat16())
    assert needed.now and not result.any()


@pytest.mark.parametrize(("differentiates", "features"), [(True, 40), (False, 48)])
def test_kernels_of_a_backward_are_met_with_the_forward(differentiates: bool, features: int):
    """Their compilation takes longest, and the forward has all that they depend on."""
    layer = ops.ColumnParallelLinear.shard(nn.Linear(features, 64).bfloat16(), sequence=True)
    with ahead.dry_run() as needed, torch.set_grad_enabled(differentiates):
        made = layer(torch.zeros(8, features).bfloat16().requires_grad_(differentiates))
        forward = list(needed.now)
        if differentiates:
            made.sum().backward()
    assert needed.now == forward and len(forward) == (3 if differentiates else 1)


def test_a_function_runs_as_it_is(compiled: list[Kernel]):
    given: list[torch.Tensor] = []

    def step(x: torch.Tensor) -> None:
        given.append(ops.all_reduce(x))

    ops.warm_up(step, torch.ones(4, 8))
    assert len(given) == 1 and not given[0].any()
    torch.testing.assert_close(ops.all_reduce(torch.ones(4, 8)), torch.ones(4, 8))


def test_a_warm_up_leaves_no_objects_for_the_collections_of_the_next_step():
    """A collection of all objects takes half a second in a process with a model."""
    enabled: list[bool] = []
    kept: list[list[int]] = []

    def step() -> None:
        enabled.append(gc.isenabled())
        kept.extend([] for _ in range(100_000))

    gc.unfreeze()  # objects of the tests
    try:
        ops.warm_up(step)
        assert enabled == [False] and gc.isenabled()
        assert gc.get_freeze_count() > 100_000
        ops.warm_up(step)  # again, before a collection
        gc.collect(1)
        assert gc.get_freeze_count() > 200_000
        gc.collect()
        assert gc.get_freeze_count() == 0
        gc.collect()
    finally:
        gc.freeze()
    ops.warm_up(step)
    gc.collect()
    assert gc.get_freeze_count() > 0, "objects that a user has frozen stay so"


def test_objects_that_python_itself_has_frozen_are_no_users(monkeypatch: pytest.MonkeyPatch):
    """Python 3.12 freezes some hundred at its start."""
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(gc, "unfreeze", frozen.clear)
    ops.warm_up(lambda: None)
    assert frozen
    gc.collect()
    assert not frozen


def test_what_fails_ends_the_dry_run():
    def step() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        ops.warm_up(step)
    with pytest.raises(UsageError, match="within a dry run"):
        ops.warm_up(lambda: ops.warm_up(step))
    ops.warm_up(lambda: None)


def test_what_cannot_be_called_is_refused():
    with pytest.raises(ArgumentError, match="run is Tensor"):
        ops.warm_up(torch.zeros(1))  # type: ignore[arg-type]
