# SPDX-License-Identifier: MIT
"""Collectives between devices of which groups share memory: kernels on the host, messages between threads."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.cuda.host_ranks import Library, Ranks
from tilescale.backends.cuda.running.collectives import exchanges, hierarchical
from tilescale.backends.cuda.running.collectives.kernels import Kernel, combining, moving
from tilescale.backends.cuda.running.collectives.setting import Operands, Stand
from tilescale.program.operations import Collective

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

GROUPS, PLACES = 3, 2
RANKS = GROUPS * PLACES
SHORT, CHUNK = 40, 64
"""Bytes up to which parts go as words; bytes of a message between groups."""

SIZES = (2, 6, 34, 200)
"""Elements of a part: less than a chunk, and several of which the last one is short."""


def compiled() -> Iterator[Kernel]:
    for form in ("words", "slots"):
        yield Kernel("reduce", form, combining("float32", "sum"), PLACES, ("false",))
        yield Kernel("reduce", form, combining("bfloat16", "max"), PLACES, ("false",))
        for dtype in ("float32", "bfloat16"):
            yield Kernel("move", form, moving(dtype), PLACES, ("true",))
        yield Kernel("move", form, moving("float32"), PLACES, ("false",))
        yield Kernel("broadcast", form, moving("float32"), PLACES)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tuple(compiled()), tmp_path_factory.mktemp("host"))


@pytest.fixture
def job(library: Library, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    monkeypatch.setattr(exchanges, "short_up_to", lambda own, stand, ranks: SHORT)
    monkeypatch.setattr(hierarchical, "chunk_bytes", lambda target: CHUNK)
    return Ranks(monkeypatch, library, {"device": RANKS}, shift=0, near=PLACES)


def stand(name: str, dtype: str = "float32", op: str | None = None, dim: int | None = 0) -> Stand:
    made = Collective(None, name, "device", (), op=op, dim=dim)
    return Stand(made, None, dtype, None, lambda: None)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers: their sums are exact in any order."""
    return torch.randint(-8, 9, shape).to(dtype)


def blank(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1e9)


Make = Callable[[int, int], tuple[list[Operands], list[torch.Tensor]]]


def allreduce(seed: int, count: int) -> tuple[list[Operands], list[torch.Tensor]]:
    given = [numbers(count) for _ in range(RANKS)]
    total = torch.stack(given).sum(0)
    return [Operands(x, x) for x in given], [total] * RANKS


def reduce_scatter(seed: int, count: int) -> tuple[list[Operands], list[torch.Tensor]]:
    given = [numbers(RANKS * count, 3) for _ in range(RANKS)]
    return [Operands(x, blank(count, 3)) for x in given], [*torch.stack(given).sum(0).chunk(RANKS)]


def all_gather(seed: int, count: int) -> tuple[list[Operands], list[torch.Tensor]]:
    given = [numbers(count) for _ in range(RANKS)]
    return [Operands(x, blank(RANKS * count)) for x in given], [torch.cat(given)] * RANKS


def all_to_all(seed: int, count: int) -> tuple[list[Operands], list[torch.Tensor]]:
    given = [numbers(RANKS * count) for _ in range(RANKS)]
    parts = [x.chunk(RANKS) for x in given]
    wanted = [torch.cat([theirs[rank] for theirs in parts]) for rank in range(RANKS)]
    return [Operands(x, blank(RANKS * count)) for x in given], wanted


def broadcast(seed: int, count: int) -> tuple[list[Operands], list[torch.Tensor]]:
    root = seed % RANKS
    given = [numbers(count) for _ in range(RANKS)]
    wanted = given[root].clone()
    return [Operands(x, x, root) for x in given], [wanted] * RANKS


@pytest.mark.parametrize(
    ("make", "op"),
    [(allreduce, "sum"), (reduce_scatter, "sum"), (all_gather, None), (all_to_all, None), (broadcast, None)],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_every_device_gets_what_the_flat_collective_gives(make: Make, op: str | None, job: Ranks):
    call = job.collective(stand(make.__name__, op=op), "hierarchical")
    for seed, count in enumerate((*SIZES, 7, 1)):
        operands, wanted = make(seed, count)
        call(operands)
        for given, expected in zip(operands, wanted, strict=True):
            assert torch.equal(given.target, expected), (seed, count)


def test_other_types_and_reductions(job: Ranks):
    call = job.collective(stand("allreduce", "bfloat16", "max"), "hierarchical")
    given = [torch.randn(50, 3).bfloat16() for _ in range(RANKS)]
    wanted = torch.stack(given).amax(0)
    call([Operands(x, x) for x in given])
    assert all(torch.equal(x, wanted) for x in given)


def test_a_gather_side_by_side_and_tensors_with_gaps(job: Ranks):
    call = job.collective(replace(stand("all_gather", dim=1)), "hierarchical")
    given = [numbers(8, 5) for _ in range(RANKS)]
    targets = [blank(8, 2 * 5 * RANKS)[:, ::2] for _ in range(RANKS)]
    call([Operands(x, y) for x, y in zip(given, targets, strict=True)])
    assert all(torch.equal(y, torch.cat(given, 1)) for y in targets)


def test_short_types_are_combined_in_float32():
    parts = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert hierarchical.combined(parts, "sum").item() == 258.0
