# SPDX-License-Identifier: MIT
"""The choice of a provider, and NVSHMEM's against a library that is played."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tilescale.comm import SymmetricHeap, Team
from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap import nvshmem, provider
from tilescale.comm.heap.group import HeapGroup
from tilescale.comm.heap.host import HostProvider
from tilescale.comm.heap.nvshmem import Nvshmem
from tilescale.comm.heap.provider import Extent, HeapCannotGrow, ProviderEntry, register
from tilescale.errors import DependencyError, RankMismatchError, UnsupportedError, UsageError
from tilescale.settings import Settings

ALONE = Team(ranks=(0,), rank=0)
CALL = CollectiveCall.here("empty")
MIB = 1 << 20


class Fussy(HostProvider):
    """A provider that one rank objects to."""

    @classmethod
    def objection(cls, device: torch.device, hosts: int) -> Any:
        """Errors to raise, set through `refuses`."""
        if cls.refuses:
            return cls.refuses.pop()
        return None

    refuses: list[Any] = []


class Broken(HostProvider):
    """A provider that fails when it is asked."""

    @classmethod
    def objection(cls, device: torch.device, hosts: int) -> Any:
        raise RuntimeError("no such library")


@pytest.fixture
def providers(monkeypatch) -> None:
    monkeypatch.setattr(provider, "PROVIDERS", {})
    monkeypatch.setitem(sys.modules, "fussy_providers", SimpleNamespace(Fussy=Fussy, Broken=Broken))


def test_the_first_that_no_rank_objects_to(run_ranks, providers) -> None:
    register(ProviderEntry("fussy", "cpu", "fussy_providers:Fussy"))
    register(ProviderEntry("host", "cpu", "tilescale.comm.heap.host:HostProvider"))
    Fussy.refuses = [UnsupportedError("not here", hint="go elsewhere")]  # the one rank that asks first
    assert run_ranks(2, lambda team: SymmetricHeap(team, "cpu").provider) == ["host", "host"]
    assert run_ranks(2, lambda team: SymmetricHeap(team, "cpu").provider) == ["fussy", "fussy"]


def test_an_objection_to_the_wanted_one_is_raised_everywhere(run_ranks, providers) -> None:
    register(ProviderEntry("fussy", "cpu", "fussy_providers:Fussy"))
    Fussy.refuses = [DependencyError("no package", hint="pip install it")]
    for outcome in run_ranks(2, lambda team: SymmetricHeap(team, "cpu", provider="fussy")):
        assert isinstance(outcome, DependencyError) and "pip install it" in str(outcome)
        assert "cannot open a heap of fussy" in str(outcome)


def test_none_works(providers) -> None:
    register(ProviderEntry("broken", "cpu", "fussy_providers:Broken"))
    register(ProviderEntry("absent", "cpu", "tilescale.comm.no_such_module:Nothing"))
    with pytest.raises(UnsupportedError) as caught:
        SymmetricHeap(ALONE, "cpu")
    assert "broken: RuntimeError: no such library (rank 0)" in str(caught.value) and "absent: " in str(caught.value)


def test_names_are_taken_once(providers) -> None:
    register(ProviderEntry("host", "cpu", "tilescale.comm.heap.host:HostProvider"))
    with pytest.raises(UsageError, match="'host' exists"):
        register(ProviderEntry("host", "cpu", "tilescale.comm.heap.host:HostProvider"))


def test_ranks_that_want_different_ones(run_ranks, providers) -> None:
    register(ProviderEntry("a", "cpu", "tilescale.comm.heap.host:HostProvider"))
    register(ProviderEntry("b", "cpu", "tilescale.comm.heap.host:HostProvider"))
    for outcome in run_ranks(2, lambda team: SymmetricHeap(team, "cpu", provider="ab"[team.rank])):
        assert isinstance(outcome, RankMismatchError) and "['a']" in str(outcome) and "['b']" in str(outcome)


def test_settings() -> None:
    found = Settings.from_env({"TILESCALE_HEAP": "nvshmem", "TILESCALE_HEAP_BYTES": "16GiB"})
    assert found == Settings(heap="nvshmem", heap_bytes=16 << 30)
    assert Settings.from_env({"TILESCALE_HEAP_BYTES": "5000"}).heap_bytes == 5000
    for text in ("0", "-1", "16GB", "many", "1.5GiB"):
        with pytest.raises(UsageError, match="e.g. 16GiB"):
            Settings.from_env({"TILESCALE_HEAP_BYTES": text})


def test_ranks_on_several_hosts_share_no_host_memory() -> None:
    assert HostProvider.objection(torch.device("cpu"), 1) is None
    assert isinstance(HostProvider.objection(torch.device("cpu"), 2), UnsupportedError)


@pytest.mark.skipif(sys.modules.get("nvshmem") is not None, reason="NVSHMEM is installed here")
def test_a_missing_package_says_what_to_install() -> None:
    found = Nvshmem.objection(torch.device("cuda", 0), 1)
    assert isinstance(found, DependencyError) and "nvshmem4py" in found.hint


class Library:
    """Fake of the used parts of nvshmem.core and nvshmem.bindings, for rank 0 of one; keeps a log of the calls."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.next, self.room, self.status = 0x70000010, 2 << 30, 0
        self.InitStatus = SimpleNamespace(STATUS_IS_INITIALIZED=2, STATUS_LIMITED_MPG=3, STATUS_FULL_MPG=4)

    def get_version(self) -> str:
        return "3.4.5"

    def init_status(self) -> int:
        return self.status

    def get_unique_id(self) -> str:
        return "id"

    def init(self, **options: Any) -> None:
        self.status = 2
        self.log.append(("init", options["uid"], options["rank"], options["nranks"], options["initializer_method"]))

    def my_pe(self) -> int:
        return 0

    n_pes = my_pe

    def malloc(self, nbytes: int) -> int:
        if nbytes > self.room:
            return 0
        self.room -= nbytes
        self.next += nbytes + 64  # headers between pieces
        self.log.append(("malloc", nbytes))
        return self.next - nbytes

    def ptr(self, address: int, peer: int) -> int:
        return address

    def free(self, address: int) -> None:
        self.log.append(("free", address))

    def finalize(self) -> None:
        self.status = 0
        self.log.append("finalize")


@pytest.fixture
def library(monkeypatch) -> Library:
    played = Library()
    package = ModuleType("nvshmem")
    package.core = package.bindings = played
    core = SimpleNamespace(Device=lambda index: SimpleNamespace(set_current=lambda: played.log.append(("on", index))))
    names = {"nvshmem": package, "nvshmem.core": played, "nvshmem.bindings": played, "cuda.core": core}
    for name, module in (names | {"cuda": SimpleNamespace(core=core)}).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device=None: None)
    monkeypatch.setattr(nvshmem, "set_default", lambda *words: played.log.append(words))
    return played


def test_nvshmem_from_start_to_end(library: Library) -> None:
    assert Nvshmem.objection(torch.device("cuda", 0), 1) is None
    heap = Nvshmem.open(HeapGroup(ALONE), torch.device("cuda", 0), 1, 1024 * MIB, CALL)
    settings = [("NVSHMEM_DISABLE_NVLS", "1"), ("NVSHMEM_DISABLE_NCCL", "1")]
    assert library.log[:4] == [*settings, ("on", 0), ("init", "id", 0, 1, "uid")]
    assert heap.extents == [Extent(0, 512 * MIB)] and heap.addresses.base % 512 == 0
    piece = heap.grow(3 * MIB, 2 * MIB, CALL)
    assert piece.nbytes == 512 * MIB and piece.offset >= 512 * MIB and piece.offset % 512 == 0
    with pytest.raises(HeapCannotGrow, match="0 B of its capacity of 1 GiB"):
        heap.grow(MIB, 0, CALL)
    heap.close()
    frees = [entry[1] for entry in library.log if entry[0] == "free"]
    assert len(frees) == 2 and library.log[-1] == "finalize"


def test_nvshmem_without_memory(library: Library) -> None:
    heap = Nvshmem.open(HeapGroup(ALONE), torch.device("cuda", 0), 1, 4096 * MIB, CALL)
    library.room = 100 * MIB
    assert heap.grow(3 * MIB, 0, CALL).nbytes == 4 * MIB, "what is needed, where the usual chunk does not fit"
    with pytest.raises(HeapCannotGrow) as caught:
        heap.grow(300 * MIB, 0, CALL)
    assert "NVSHMEM_MAX_MEMORY_PER_GPU" in caught.value.hint
    heap.close()


def test_nvshmem_that_the_user_started_stays(library: Library) -> None:
    library.status, library.n_pes = 2, lambda: 1
    heap = Nvshmem.open(HeapGroup(ALONE), torch.device("cuda", 0), 1, 64 * MIB, CALL)
    heap.close()
    assert "finalize" not in library.log and not any(entry[0] == "init" for entry in library.log)
    library.n_pes = lambda: 8
    with pytest.raises(UnsupportedError, match="rank 0 of 8"):
        Nvshmem.open(HeapGroup(ALONE), torch.device("cuda", 0), 1, 64 * MIB, CALL)


def test_nvshmem_chunk_in_another_place(library: Library) -> None:
    heap = Nvshmem.open(HeapGroup(ALONE), torch.device("cuda", 0), 1, 1024 * MIB, CALL)
    library.next = 0x1000
    with pytest.raises(UnsupportedError, match="outside of the range"):
        heap.grow(MIB, 0, CALL)


def test_a_heap_that_cannot_grow_says_how_large_it_has_to_be() -> None:
    refusal = HeapCannotGrow.full(capacity=1024 * MIB, room=3 * MIB, least=8 * MIB - 1)
    assert str(refusal) == "3 MiB of its capacity of 1 GiB are left"
    assert refusal.hint == "set TILESCALE_HEAP_BYTES=1029MiB or more, or pass capacity= to SymmetricHeap"
