# SPDX-License-Identifier: MIT
"""The checks of tests/gpu/heap_check.py on one GPU; with several, run that file under torchrun."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tilescale.comm import SymmetricHeap, Team

pytestmark = pytest.mark.gpu


def _checks() -> list[Callable[[SymmetricHeap], None]]:
    path = Path(__file__).parents[1] / "gpu" / "heap_check.py"
    spec = importlib.util.spec_from_file_location("heap_check", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CHECKS


@pytest.fixture
def heap() -> Iterator[SymmetricHeap]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    with SymmetricHeap(Team(ranks=(0,), rank=0), "cuda", provider="cuda_vmm") as opened:
        yield opened


@pytest.mark.parametrize("check", _checks(), ids=lambda check: check.__name__)
def test_on_a_gpu(heap: SymmetricHeap, check: Callable[[SymmetricHeap], None]) -> None:
    check(heap)
