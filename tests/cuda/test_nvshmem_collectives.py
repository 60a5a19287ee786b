# SPDX-License-Identifier: MIT
"""Whole tensors by NVSHMEM's collectives: what it is passed, by a stand-in whose ranks are threads; what it takes."""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import tilescale
import tilescale.language as T
from tests.cuda.host_ranks import Library as Kernels
from tests.cuda.host_ranks import Ranks
from tests.cuda.support import lowered, of_nvshmem
from tests.cuda.test_messages import check, randoms, stand, total, wanted
from tilescale.backends.cuda.running.collectives import nvshmem
from tilescale.backends.cuda.running.collectives.setting import Operands
from tilescale.collectives import records
from tilescale.errors import UnsupportedError

RANKS, WORLD = 3, 17
OPERATIONS = ("allreduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")
NAMES = {theirs: ours for ours, theirs in nvshmem.TYPES.items()}


class Nvshmem:
    """Its collectives on a stream, between threads; a stream's number is its rank. Everybody's target must be ready."""

    def __init__(self, ranks: int):
        self.given: dict[int, tuple[int, int]] = {}
        self.together = threading.Barrier(ranks, timeout=30)
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.endswith("_on_stream"):
            raise AttributeError(name)
        theirs, *reduction, operation = name.removesuffix("_on_stream").split("_")
        dtype = getattr(torch, NAMES[theirs])

        def call(team: int, target: int, source: int, count: int, *rest: int) -> None:
            *root, rank = rest
            assert team == WORLD and len(root) == (operation == "broadcast")
            self.called.append(name)
            self.given[rank] = target, source
            self.together.wait()
            parts = self._read(operation, rank, count, dtype, root)
            out = total(parts, *reduction) if reduction else torch.cat(parts)
            self.together.wait()
            _memory(target, out.nbytes).copy_(out.view(torch.uint8))
            self.together.wait()

        return call

    def _read(self, operation: str, rank: int, count: int, dtype: torch.dtype, root: list[int]) -> list[torch.Tensor]:
        own = rank if operation in ("reducescatter", "alltoall") else 0
        nbytes, ranks = count * dtype.itemsize, root or sorted(self.given)
        return [_memory(self.given[r][1] + own * nbytes, nbytes).clone().view(dtype) for r in ranks]


def _memory(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Nvshmem:
    made = Nvshmem(RANKS)
    bindings = SimpleNamespace(Team_id=SimpleNamespace(TEAM_WORLD=WORLD))
    package = ModuleType("nvshmem")
    package.bindings = _Either(bindings, made)
    monkeypatch.setitem(sys.modules, "nvshmem", package)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: index, raising=False)
    return made


class _Either:
    def __init__(self, *parts: Any):
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        return next(getattr(part, name) for part in self._parts if hasattr(part, name))


@pytest.fixture
def job(library: Nvshmem, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = Ranks(monkeypatch, Kernels.__new__(Kernels), {"device": RANKS})
    for rank, own in enumerate(made.owners):
        own.device = SimpleNamespace(index=rank)
    return made


@pytest.mark.parametrize("name", OPERATIONS)
def test_collectives(name: str, job: Ranks, library: Nvshmem):
    call = job.collective(stand(name), "nvshmem")
    for count in (1, 7, 700):
        check(call, name, count, RANKS, torch.bfloat16, shift=count % 2)
    assert len(set(library.called)) == 1 and library.called[0].startswith("bfloat16")


@pytest.mark.parametrize(("dtype", "op"), [("float32", "max"), ("float16", "sum"), ("int32", "sum"), ("int8", "min")])
def test_types_and_reductions(dtype: str, op: str, job: Ranks):
    for name in ("allreduce", "reduce_scatter"):
        check(job.collective(stand(name, dtype, op), "nvshmem"), name, 33, RANKS, getattr(torch, dtype), op)


@pytest.mark.parametrize("name", ["all_gather", "all_to_all", "reduce_scatter"])
def test_what_has_gaps_goes_through_the_heap(name: str, job: Ranks):
    call = job.collective(stand(name, axis=1), "nvshmem")
    narrow, wide = (7, 4), (7, 12)
    shape, result = (narrow, wide) if name == "all_gather" else (wide, narrow if name == "reduce_scatter" else wide)
    given = [randoms(shape[0] * shape[1], torch.bfloat16).view(shape) for _ in range(RANKS)]
    outs = [torch.zeros(result, dtype=torch.bfloat16) for _ in range(RANKS)]
    call([Operands(x, out) for x, out in zip(given, outs, strict=True)])
    for rank, out in enumerate(outs):
        assert torch.equal(out, wanted(name, given, rank, 0, "sum", axis=1))


def test_a_sum_of_rows_with_gaps_comes_back(job: Ranks):
    whole = [randoms(60, torch.bfloat16).view(5, 12) for _ in range(RANKS)]
    before = [x.clone() for x in whole]
    job.collective(stand("allreduce"), "nvshmem")([Operands(x[:, :4], x[:, :4]) for x in whole])
    for rank in range(RANKS):
        assert torch.equal(whole[rank][:, :4], total([x[:, :4] for x in before], "sum"))
        assert torch.equal(whole[rank][:, 4:], before[rank][:, 4:])


# -- what it takes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def nodes() -> Iterator[None]:
    with tilescale.use_machine("h200-sxm-8x4"):
        yield


def reduced(op: str = "sum", dtype: str = "float32") -> Any:
    @T.prim_func
    def sums(X: T.Tensor((64,), dtype)):
        with T.Kernel(device=2):
            with T.Scale("device"):
                T.allreduce(X, op=op, impl="nvshmem")

    return sums


def test_it_is_taken_where_the_heap_is_its_own(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UnsupportedError, match="impl='nvshmem' of T.allreduce: available here: one_shot"):
        lowered(reduced())
    of_nvshmem(monkeypatch)
    assert "nvshmem (asked for)" in lowered(reduced()).notes[0]
    for func, why in ((reduced("prod"), "it makes no prod"), (reduced(dtype="float8_e4m3"), "it takes no float8_e4m3")):
        found = f"impl='nvshmem' of T.allreduce: {why}; available here: (?!.*nvshmem)"
        with pytest.raises(UnsupportedError, match=found):
            lowered(func)


@pytest.mark.usefixtures("nodes")
def test_devices_take_part_only_all_together(monkeypatch: pytest.MonkeyPatch):
    of_nvshmem(monkeypatch)

    @T.prim_func
    def inside(X: T.Tensor((64,), "float32")):
        with T.Kernel(node=2, device=2):
            with T.Scale("device"):
                T.allreduce(X, impl="nvshmem")

    with pytest.raises(UnsupportedError, match="available here: (?!.*nvshmem)"):
        lowered(inside, "h200-sxm-8x4")


def test_the_record_says_what_it_takes():
    record = records()["nvshmem"]
    assert record.against(4, "bfloat16", "max") is None and not record.in_order
    assert "prod" in (record.against(4, "bfloat16", "prod") or "")
    assert "float8_e4m3" in (record.against(4, "float8_e4m3", "sum") or "")
