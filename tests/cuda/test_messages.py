# SPDX-License-Identifier: MIT
"""Kernels of collectives on the host: all ranks, blocks and threads at once, in whatever order the system runs them."""

import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cuda.host_ranks import Ranks
from tilescale.backends.cuda.running.collectives.setting import Operands, Stand

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

ALGORITHMS = [
    ("allreduce", "one_shot"),
    ("allreduce", "two_shot"),
    ("reduce_scatter", "direct"),
    ("all_gather", "direct"),
    ("all_to_all", "direct"),
    ("broadcast", "direct"),
]
SHORT = 400
"""Bytes of a part that still go as words, in these tests."""

COUNTS = (1, 2, 7, 33, 64, 150, 700, 2500)
"""Elements of a part, of short and long messages, of which the last ones take several rounds."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilescale.backends.cuda.running.collectives import exchanges

    monkeypatch.setattr(exchanges, "short_up_to", lambda own, stand, ranks: SHORT)


def stand(name: str, dtype: str, op: str = "sum", level: str = "device") -> Stand:
    reduction = op if name in ("allreduce", "reduce_scatter") else None
    made = SimpleNamespace(name=name, level=level, reduction=reduction, axis=0, call=None)
    return Stand(made, None, dtype, None, lambda: None)


def shapes(name: str, count: int, ranks: int) -> tuple[int, int]:
    """Elements of source and target."""
    source = count * ranks if name in ("reduce_scatter", "all_to_all") else count
    return source, count * ranks if name in ("all_gather", "all_to_all") else count


def randoms(count: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    x = torch.randn(count + shift + 16) * 4
    start = (-x.to(dtype).data_ptr() // dtype.itemsize) % 16
    made = x.to(dtype)
    start = -(made.data_ptr() // dtype.itemsize) % (16 // dtype.itemsize) if made.data_ptr() % 16 else 0
    return made[start + shift : start + shift + count]


def total(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    functions = {"sum": torch.add, "prod": torch.mul, "max": torch.maximum, "min": torch.minimum}
    result = parts[0].to(wide)
    for part in parts[1:]:
        result = functions[op](result, part.to(wide))
    return result.to(dtype)


def wanted(name: str, given: list[torch.Tensor], rank: int, root: int, op: str) -> torch.Tensor:
    if name == "allreduce":
        return total(given, op)
    if name == "broadcast":
        return given[root]
    if name == "all_gather":
        return torch.cat(given)
    parts = [x.chunk(len(given))[rank] for x in given]
    return torch.cat(parts) if name == "all_to_all" else total(parts, op)


def check(call: Any, name: str, count: int, ranks: int, dtype: torch.dtype, op: str = "sum", shift: int = 0) -> None:
    """One call of all ranks with new numbers, into poisoned memory around which nothing may change."""
    source, target = shapes(name, count, ranks)
    in_place, root = name in ("allreduce", "broadcast"), count % ranks
    given = [randoms(source, dtype, shift) for _ in range(ranks)]
    want = [wanted(name, [x.clone() for x in given], r, root, op) for r in range(ranks)]
    around = [torch.full((shift + target + 40,), 77).to(dtype) for _ in range(ranks)]
    outs = given if in_place else [x[shift + 16 : shift + 16 + target] for x in around]
    call([Operands(x, out, root) for x, out in zip(given, outs, strict=True)])
    for rank, out in enumerate(outs):
        assert torch.equal(out, want[rank]), (name, count, rank, (out != want[rank]).nonzero()[:5])
        edges = around[rank]
        beside = torch.cat([edges[: shift + 16], edges[shift + 16 + target :]])
        assert beside.eq(77).all(), "nothing beside it changes"


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("name", "algorithm"), ALGORITHMS)
def test_calls_of_changing_sizes(name: str, algorithm: str, ranks: int, monkeypatch, folder: Path, short: None):
    job = Ranks(monkeypatch, folder, {"device": ranks})
    call = job.collective(stand(name, "bfloat16"), algorithm)
    chance = random.Random(ranks)
    for count in [*COUNTS, *chance.choices(COUNTS, k=8)]:
        check(call, name, count, ranks, torch.bfloat16, shift=chance.choice([0, 0, 1]))
    assert not job.reports.any()
