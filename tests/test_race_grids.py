# SPDX-License-Identifier: MIT
"""Races at the shapes of other projects' benchmarks: their works and contenders."""

from __future__ import annotations

import importlib
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilescale

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Modules of works by their name, for two GPUs."""
    monkeypatch.setattr(sys, "path", [str(FOLDER), str(FOLDER / "works"), *sys.path])
    monkeypatch.setattr(tilescale, "init", lambda: SimpleNamespace(size=2, rank=0))
    return importlib.import_module


def test_ours_races_at_all_shapes_of_krakens_benchmarks(works: Any) -> None:
    heats = list(works("triton_kernels").heats(False, 2))
    titles = [(heat.work, heat.shape, heat.mode) for heat in heats]
    assert len(titles) == len(set(titles)) == 2 * (9 + 2 * 10) + 2 * 4 * 3 + 1
    for heat in heats:
        names = [contender.name for contender in heat.contenders]
        assert heat.baseline in names and names[-1] == "tilescale" and len(names) == len(set(names))
        assert "kraken" in names or heat.work == "gather_keys"
    assert {heat.shape for heat in heats if heat.work == "gemm_rs"} >= {(128, 6656, 4096), (1024, 6656, 16384)}
    assert {heat.shape[0] for heat in heats if heat.work == "ag_gemm"} == {256, 512, 1024, 2048}, "rows of all ranks"


def test_contenders_for_gathered_keys_are_built_without_a_gpu(works: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(works("trials"), "device", lambda: torch.device("cpu"))
    keys = works("triton_kernels").Keys(4)
    for make in (keys.library, keys.operator):
        assert make().check is not None


def test_the_grid_of_nccl_tests_is_doubled_from_its_first_size_on(works: Any) -> None:
    tensors = works("whole_tensors")
    assert tensors.doubled(8)[:3] == (8, 16, 32) and tensors.doubled(8)[-1] == 8 << 30
    sizes = [nbytes for nbytes in tensors.doubled(8) if nbytes <= 1 << 27]
    put, *heats = tensors.heats(2, ("eager",), False, [*itertools.product(tensors.NAMES, sizes)])
    assert put.work != "allreduce" and len(heats) == 5 * 25
    assert [heat.shape for heat in heats[:2]] == [(4,), (8,)], "elements of bfloat16"
    (largest,) = (heat for heat in heats if (heat.work, heat.shape) == ("allreduce", (1 << 26,)))
    assert largest.bytes == 1 << 27, "rates are nccl-tests' bus bandwidth: 2 (n - 1) / n of the tensor"
