# SPDX-License-Identifier: MIT
"""All-to-alls of unequal parts on GPUs: their implementation, and the host's read of the number of rows."""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.collectives.test_accepted import NODES, host_steps
from tests.cuda.support import lowered
from tilescale.backends.cuda.running.collectives import nccl
from tilescale.backends.cuda.running.collectives.setting import Operands, PlacedCollective, SiblingDevices
from tilescale.backends.cuda.running.diagnosis import ReportContext, error_for
from tilescale.backends.cuda.running.timeouts import WaitFailure, WaitReport
from tilescale.errors import Location, OutOfBoundsError

HERE = Location(__file__, 1, "")


def exchange(devices: int, impl: str | None = None):
    @T.prim_func
    def program(X: T.Tensor((8, 4), "bfloat16"), sent: T.Tensor((devices,), "int32"), Y: T.Tensor((8, 4), "bfloat16")):
        with T.Kernel(device=devices):
            with T.Scale("device"):
                T.all_to_all_v(X, Y, sent, impl=impl)

    return program


def ways(program: Any, machine: str = "h200-sxm-8") -> list[str]:
    """Construction of a program's host operations."""
    return [step.impl for step in host_steps(lowered(program, machine).lowered.body) if step.impl]


@pytest.mark.parametrize(("impl", "made"), [(None, "direct"), ("direct", "direct"), ("nccl", "nccl")])
def test_kernels_make_it_where_devices_share_memory(impl: str | None, made: str):
    """The host looks at the numbers only if NCCL is asked for."""
    assert ways(exchange(4, impl)) == [made]


def test_nccl_makes_it_between_nodes(tmp_path: Path):
    described = tmp_path / "nodes.yaml"
    described.write_text(NODES, encoding="utf-8")
    with tilescale.use_machine(str(described)):
        assert ways(exchange(4), str(described)) == ["nccl"]


@pytest.mark.parametrize(("index", "text"), [(0, "sends -3 rows, src has 8"), (1, "gets -3 rows, dst has 8")])
def test_rows_that_do_not_fit_are_an_error_of_the_line(index: int, text: str):
    site = SimpleNamespace(what="T.all_to_all_v of level 'device'", where=HERE)
    scene = ReportContext("program", 0, [site], 1.0, [SimpleNamespace(count=1, behind=lambda other: 0)] * 2)
    error = error_for([WaitReport(1, WaitFailure.ROWS, 0, (0, 0, 0), index, 8, -3)], scene)
    assert isinstance(error, OutOfBoundsError) and error.where[0] == HERE
    assert f"program on rank 1: T.all_to_all_v of level 'device': {text}; so rank 0 stopped too" in str(error)


# -- by NCCL -----------------------------------------------------------------------------------------------------------


class Nccl:
    """`all_to_all_single` between ranks that are threads; the group of a rank is its number."""

    def __init__(self, ranks: int):
        self._boxes = {(a, b): queue.Queue() for a in range(ranks) for b in range(ranks)}
        self._ranks = ranks

    def exchange(
        self, out: torch.Tensor, given: torch.Tensor, arriving: Sequence[int] | None = None,
        sent: Sequence[int] | None = None, group: int = 0,
    ) -> None:  # fmt: skip
        assert (sent is None) == (arriving is None) and len(given) == (sum(sent) if sent else len(given))
        parts = given.chunk(self._ranks) if sent is None else given.split(list(sent))
        for rank, part in enumerate(parts):
            self._boxes[group, rank].put(part.clone())
        out.copy_(torch.cat([self._boxes[rank, group].get(timeout=20) for rank in range(self._ranks)]))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Make an exchange by NCCL of all ranks; return the ranks that read on the host."""

    def call(operands: Sequence[Operands], counts: tuple[int, ...] = ()) -> list[Any]:
        ranks = len(operands)
        monkeypatch.setattr(torch.distributed, "all_to_all_single", Nccl(ranks).exchange)
        monkeypatch.setattr(nccl, "group", lambda own, level: own.number)
        monkeypatch.setattr(SiblingDevices, "of", lambda own, level: SiblingDevices(own.number, ranks, 0, 1))
        stand = PlacedCollective(
            SimpleNamespace(name="all_to_all_v", level="device", counts=counts), HERE, "bfloat16", None, None
        )
        owners = [SimpleNamespace(number=rank, reads_at=None) for rank in range(ranks)]
        works = [nccl.all_to_all_v(own, stand)(given) for own, given in zip(owners, operands, strict=True)]
        with ThreadPoolExecutor(ranks) as pool:
            for done in [pool.submit(lambda work=work: [step() for step in work]) for work in works]:
                done.result(timeout=60)
        return [own.reads_at for own in owners]

    return call


@pytest.mark.parametrize("known", [False, True])
def test_by_nccl(known: bool, run: Callable[..., list[Any]]):
    counts = torch.tensor([[1, 0, 2], [3, 3, 0], [0, 0, 0]], dtype=torch.int32)
    given = [torch.randn(7, 4) for _ in range(3)]
    out = [torch.full((6, 4), 77.0) for _ in range(3)]
    received = [torch.zeros(3, dtype=torch.int32) for _ in range(3)]
    all_of_them = zip(given, out, counts, received, strict=True)
    operands = [Operands(x, y, 0, None if known else sent, got) for x, y, sent, got in all_of_them]
    read = run(operands, tuple(counts.flatten().tolist()) if known else ())
    assert read == [None if known else HERE] * 3, "a graph cannot repeat what the host has read"
    for rank, found in enumerate(out):
        want = torch.cat([x.split([*n.tolist(), 7 - int(n.sum())])[rank] for x, n in zip(given, counts, strict=True)])
        assert torch.equal(found[: len(want)], want) and found[len(want) :].eq(77).all()
        assert torch.equal(received[rank], counts[:, rank])


def test_by_nccl_rows_that_do_not_fit(run: Callable[..., list[Any]]):
    given = [Operands(torch.zeros(2, 4), torch.zeros(3, 4), 0, torch.tensor([2, 1]).int()) for _ in range(2)]
    with pytest.raises(OutOfBoundsError, match=r"sends \[2, 1\] rows, src has 2"):
        run(given)
