# SPDX-License-Identifier: MIT
"""After a dry run with one row count, no other row count needs another kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.halves import half_at_night
from tilescale.comm import Team
from tilescale.hda import Machine
from tilescale.hda.current import use_machine
from tilescale.ops import kernels, whole_tensors
from tilescale.ops.gemm_tiles import ROWS
from tilescale.runtime import ahead
from tilescale.runtime.kernel import Kernel

DRAWN, MOST_KERNELS = 200, 16
"""Row counts, and kernels of a grid: of each of eight widths one with a block for each tile, and a persistent one."""

TEAM = Team(ranks=(0, 1), rank=0)
OPERATORS = {
    "ag_gemm": lambda op, a, b, scales: op._gemms(a, [b, b], None, scales, False, TEAM, "", False, []),
    "gated": lambda op, a, b, scales: op._gemms(a, [b, b], None, scales, False, TEAM, "silu", True, []),
    "gemm_rs": lambda op, a, b, scales: op._scattered(a, b, None, scales, TEAM, None),
    "gemm_ar": lambda op, a, b, scales: op._summed(a, b, None, scales, TEAM, None),
}

OF_ROWS = {
    "all_reduce_rms_norm": lambda op, a: op._operator.plain(a, a[0], None, 1e-6, 0.0, ""),
    "all_reduce_rms_norm_float8": lambda op, a: op._operator.plain(
        a, a[0], None, None, "row", False, False, 1e-6, 0.0, ""
    ),
    "all_reduce_layer_norm": lambda op, a: op._operator.plain(a, a[0], None, None, 1e-6, ""),
    "whole_tensors": lambda op, a: (op.gathered(a, TEAM), op.summed(a, TEAM)),
}
"""Operators of rows alone."""


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Kernel]]:
    """Kernels that were called, on no device, as a rank of two H200."""
    found: set[Kernel] = set()
    monkeypatch.setattr(Kernel, "__call__", lambda self, *args: found.add(self))
    monkeypatch.setattr(whole_tensors, "compare_counts", lambda a, team: None)
    space = SimpleNamespace(was_read=lambda: None)
    space.own = space.symmetric = lambda dtype, *shapes: [empty(*shape, dtype=dtype) for shape in shapes]
    for name in ("ag_gemm", "gemm_rs"):
        monkeypatch.setattr(import_module(f"tilescale.ops.{name}"), "workspace_of", lambda team: space)
    kernels._kept.cache_clear()
    with use_machine(Machine.load("h200-sxm-8")):
        yield found
    kernels._kept.cache_clear()


def operator(name: str, N: int, K: int, dtype: torch.dtype) -> Callable[[int], Any]:
    """The operator for a number of rows of a shard."""
    made = import_module("tilescale.ops." + {"gated": "ag_gemm"}.get(name, name))
    parts = 1 if made.__name__.endswith("ag_gemm") else TEAM.size

    def call(rows: int) -> Any:
        a, b = empty(parts * rows, K, dtype=dtype), empty(N, K, dtype=dtype).t()
        scales = None
        if dtype.itemsize == 1:
            columns = 2 * N if parts == 1 else N
            scales = empty(parts * rows, dtype=torch.float32), empty(columns, dtype=torch.float32)
        return OPERATORS[name](made, a, b, scales)

    return call


@pytest.mark.parametrize(("name", "dtype"), half_at_night([*OPERATORS], [torch.bfloat16, torch.float8_e4m3fn]))
def test_a_new_row_count_needs_no_new_kernel(name: str, dtype: torch.dtype, called: set[Kernel]):
    random = Random(f"{name} {dtype}")
    call = operator(name, 128 * random.randint(16, 64), 128 * random.randint(16, 64), dtype)
    with ahead.dry_run() as needed:
        call(random.randint(1, ROWS))
    met = needed.found()
    called.clear()
    for _ in range(DRAWN):
        call(max(1, round(2 ** random.uniform(0, 16))))
    assert 1 < len(called) and called <= set(met), [kernel.program.func.attrs["global_symbol"] for kernel in called]
    own = [kernel for kernel in met if not kernel.program.name.startswith("whole_")]  # those are all operators'
    assert len(own) <= MOST_KERNELS * (1 + (name == "ag_gemm"))  # one grid gathers, the other one does not


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_new_row_count_needs_no_new_kernel_for_rows_alone(
    name: str, called: set[Kernel], monkeypatch: pytest.MonkeyPatch
):
    random, made = Random(name), import_module(f"tilescale.ops.{name}")
    for each in OF_ROWS:
        module = import_module(f"tilescale.ops.{each}")
        monkeypatch.setattr(module, "team_of", lambda group: TEAM, raising=False)
        monkeypatch.setattr(module, "operator_of", lambda name: SimpleNamespace(function=by_name(name)), raising=False)
    with ahead.dry_run() as needed:
        OF_ROWS[name](made, empty(random.randint(1, ROWS), 4096, dtype=torch.bfloat16))
    met = needed.found()
    called.clear()
    for _ in range(DRAWN):
        rows = max(1, round(2 ** random.uniform(0, 16)))
        OF_ROWS[name](made, empty(rows, 4096, dtype=torch.bfloat16))
    assert 1 < len(called) <= len(met) <= MOST_KERNELS and called <= set(met)


def by_name(name: str) -> Callable[..., Any]:
    """The function of an operator of rows alone."""
    if name == "all_reduce":
        return lambda a, op, group: whole_tensors.summed(a, TEAM)
    made = import_module("tilescale.ops.all_reduce_rms_norm")
    return made._operator.plain
