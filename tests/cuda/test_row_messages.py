# SPDX-License-Identifier: MIT
"""The kernel of all-to-alls of unequal parts on the host: all ranks, blocks and threads at once."""

import random
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.cuda.host_ranks import LIMIT_NS, Library, Ranks, shorten
from tilescale.backends.cuda.running.collectives.kernels import HeaderKernel, moving
from tilescale.backends.cuda.running.collectives.setting import Operands, PlacedCollective
from tilescale.backends.cuda.running.timeouts import WaitFailure

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

RANKS = (1, 2, 3)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    kernels = [HeaderKernel("move_rows", "slots", moving("bfloat16"), ranks) for ranks in RANKS]
    kernels += [
        HeaderKernel("move", form, moving("int32"), ranks, ("true",))
        for ranks in RANKS[1:]
        for form in ("words", "slots")
    ]
    return Library(tuple(kernels), tmp_path_factory.mktemp("host"))


@pytest.fixture
def job(library: Library, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Ranks]:
    shorten(monkeypatch, "words", 400)
    return lambda ranks: Ranks(monkeypatch, library, {"device": ranks})


def stand(counts: tuple[int, ...] = ()) -> PlacedCollective:
    made = SimpleNamespace(name="all_to_all_v", level="device", axis=0, call=None, counts=counts)
    return PlacedCollective(made, None, "bfloat16", None, lambda: None)


def operands(counts: torch.Tensor, width: int, spare: int = 2, on_device: bool = True) -> list[Operands]:
    """Tensors of each rank, which has as many rows as it needs and `spare` ones; targets are poisoned."""
    made = []
    for rank, sent in enumerate(counts):
        source = torch.randn(int(sent.sum()) + spare, width).bfloat16()
        target = torch.full((int(counts[:, rank].sum()) + spare, width), 77.0).bfloat16()
        numbers = sent.clone() if on_device else None
        made.append(Operands(source, target, 0, numbers, torch.full((len(counts),), -1, dtype=torch.int32)))
    return made


def check(call: Any, counts: torch.Tensor, width: int, on_device: bool = True) -> None:
    """One call of all ranks."""
    given = operands(counts, width, on_device=on_device)
    call(given)
    for rank, mine in enumerate(given):
        parts = [g.source.split([*sent.tolist(), 2])[rank] for g, sent in zip(given, counts, strict=True)]
        want = torch.cat(parts)
        assert torch.equal(mine.target[: len(want)], want), (counts, rank)
        assert mine.target[len(want) :].eq(77).all(), "rows behind the last one stay as they are"
        assert torch.equal(mine.received, counts[:, rank])


def table(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("width", [1, 8, 24])
def test_rows_come_where_they_belong(ranks: int, width: int, job: Callable[[int], Ranks]):
    """Of no, few and many messages; rows of 2, 16 and 48 bytes, calls of changing numbers in a row."""
    several, chance = job(ranks), random.Random(width)
    call = several.collective(stand(), "direct")
    for most in (0, 1, 3, 40, 300 // width + 90, 5):
        check(call, table([[chance.randint(0, most) for _ in range(ranks)] for _ in range(ranks)]), width)
    assert not several.reports.any()


def test_one_part_alone_goes_in_many_messages(job: Callable[[int], Ranks]):
    call = job(3).collective(stand(), "direct")
    for rows in ([[0, 700, 0], [0, 0, 0], [0, 0, 0]], [[0, 0, 0], [0, 900, 0], [1, 0, 0]]):
        check(call, table(rows), 8)


def test_numbers_of_the_program(job: Callable[[int], Ranks]):
    counts = table([[1, 5, 0], [40, 2, 3], [0, 0, 7]])
    call = job(3).collective(stand(tuple(counts.flatten().tolist())), "direct")
    for _ in range(3):
        check(call, counts, 8, on_device=False)


@pytest.mark.parametrize(
    ("change", "rank", "side", "seen"), [("source", 1, 0, 6), ("target", 2, 1, 7), ("number", 0, 0, -4)]
)
def test_rows_without_room_are_reported(
    change: str, rank: int, side: int, seen: int, job: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
):
    """Ranks without rows take part, no rank writes beyond a tensor, and the others' waits end."""
    monkeypatch.setattr("tests.cuda.host_ranks.LIMIT_NS", LIMIT_NS // 100)
    three = job(3)
    call = three.collective(stand(), "direct")
    counts = table([[1, 2, 3], [3, 0, 3], [2, 2, 1]])
    given = operands(counts, 8, spare=0)
    mine = given[rank]
    beyond = mine.target.clone()
    if change == "source":
        given[rank] = Operands(mine.source[:5], mine.target, 0, mine.sent, mine.received)
    elif change == "target":
        given[rank] = Operands(mine.source, mine.target[:6], 0, mine.sent, mine.received)
    else:
        mine.sent[1] = -4
    call(given)
    stopped, kind, _, index, room, rows = three.reports[rank, :6].tolist()
    assert (stopped, kind - 1, index, rows) == (1, WaitFailure.ROWS, side, seen)
    assert room == len(given[rank].target if side else given[rank].source)
    if change == "target":
        assert torch.equal(mine.target[6:], beyond[6:]), "nothing is written beyond it"
