# SPDX-License-Identifier: MIT
"""The CUDA provider against a driver that is played by shared memory: calls in order, shared pages, failures undone."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tilescale.comm import Team
from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap import cuda_vmm
from tilescale.comm.heap.group import HeapGroup
from tilescale.comm.heap.host import _HostPages
from tilescale.comm.heap.provider import Extent, HeapCannotGrow
from tilescale.errors import DependencyError, DeviceError, TileScaleError, UnsupportedError

MIB = 1 << 20
CALL = CollectiveCall.here("empty")


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_SUPPORTED = 801


class Anything:
    """An enumeration, or a structure, of which the driver only passes the members on."""

    def __init__(self, *_arguments: object):
        self.location = SimpleNamespace()

    def __getattr__(self, name: str) -> str:
        return name


class Driver:
    """The driver's calls on memory files. `broken` maps a call's name to the status that it returns."""

    def __init__(self) -> None:
        self.pages, self.broken, self.log = _HostPages(), {}, []
        self.memory, self.alive, self.attributes = 1 << 40, 0, {}
        self.CUresult = Status
        for name in ("CUmemAllocationHandleType", "CUmemAllocationGranularity_flags", "CUmemAccess_flags"):
            setattr(self, name, Anything())
        for name in ("CUmemAllocationType", "CUmemLocationType", "CUdevice_attribute"):
            setattr(self, name, Anything())
        self.CUmemAccessDesc = self.CUmemAllocationProp = Anything

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.log.append(name)
            status = self.broken.get(name, Status.CUDA_SUCCESS)
            if status:
                return (status, None)
            return (Status.CUDA_SUCCESS, getattr(self, f"_{name}")(*arguments))

        if name.startswith("_"):
            raise AttributeError(name)
        return call

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[Any, Any]:
        self.log.append("cuMemCreate")
        if nbytes > self.memory:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        self.alive += 1
        return Status.CUDA_SUCCESS, self.pages.create(nbytes)

    def cuGetErrorString(self, status: Status) -> tuple[Any, bytes]:
        return Status.CUDA_SUCCESS, f"it is {status.name}".encode()

    def _cuDeviceGet(self, number: int) -> int:
        return number

    def _cuDeviceGetAttribute(self, attribute: str, _device: int) -> int:
        return self.attributes.get(attribute, 1)

    def _cuMemGetAllocationGranularity(self, _properties: Any, _flag: Any) -> int:
        return 2 * MIB

    def _cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> int:
        return self.pages.reserve(nbytes)

    def _cuMemAddressFree(self, address: int, nbytes: int) -> None:
        self.pages.release(address, nbytes)

    def _cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> Any:
        if kind == "CU_MEM_HANDLE_TYPE_FABRIC":
            return SimpleNamespace(data=f"/proc/{os.getpid()}/fd/{handle}".encode())
        return self.pages.export(handle)

    def _cuMemImportFromShareableHandle(self, shared: Any, kind: Any) -> int:
        self.alive += 1
        return os.open(shared, os.O_RDWR) if isinstance(shared, bytes) else os.dup(shared)

    def _cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> None:
        self.pages.map(address, nbytes, handle)

    def _cuMemSetAccess(self, address: int, nbytes: int, access: list[Any], count: int) -> None:
        assert len(access) == count == 1

    def _cuMemUnmap(self, address: int, nbytes: int) -> None:
        self.pages.unmap(address, nbytes)

    def _cuMemRelease(self, handle: int) -> None:
        self.alive -= 1
        os.close(handle)


@pytest.fixture
def driver(monkeypatch) -> Driver:
    played = Driver()
    monkeypatch.setattr(cuda_vmm, "_driver", lambda: played)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device=None: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (3 * MIB, 64 * MIB))
    return played


def device(rank: int) -> torch.device:
    return torch.device("cuda", rank)


@pytest.mark.parametrize("hosts", [1, 2])
def test_pages_are_shared_and_all_is_given_back(run_ranks, driver: Driver, hosts: int) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    lock = threading.Lock()

    def work(team: Team) -> list[Extent]:
        heap = cuda_vmm.CudaVmm.open(HeapGroup(team), device(team.rank), hosts, 600 * MIB, CALL)
        extents = [heap.grow(5 * MIB, 0, CALL), heap.grow(300 * MIB, 251 * MIB, CALL)]
        view = heap.addresses
        for offset in (0, 255 * MIB, 257 * MIB):
            ctypes.c_int64.from_address(view.address(team.rank, offset)).value = offset + team.rank
        team.barrier()
        for peer in range(team.size):
            for offset in (0, 255 * MIB, 257 * MIB):
                assert ctypes.c_int64.from_address(view.address(peer, offset)).value == offset + peer
        team.barrier()
        with lock:
            heap.close()
        return extents

    expected = [Extent(0, 256 * MIB), Extent(256 * MIB, 256 * MIB)]
    for outcome in run_ranks(3, work):
        assert outcome == expected
    assert driver.alive == 0 and driver.log.count("cuMemUnmap") == 3 * 3 * 2
    assert driver.log.count("cuMemAddressFree") == 3
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1


def test_a_rank_without_memory_leaves_all_as_they_were(run_ranks, driver: Driver) -> None:
    def work(team: Team) -> tuple[str, Extent]:
        heap = cuda_vmm.CudaVmm.open(HeapGroup(team), device(team.rank), 1, 600 * MIB, CALL)
        team.barrier()
        driver.memory = 100 * MIB
        with pytest.raises(HeapCannotGrow) as caught:
            heap.grow(300 * MIB, 0, CALL)
        team.barrier()
        smaller = heap.grow(30 * MIB, 0, CALL)  # the preferred chunk does not fit, what is needed does
        heap.close()
        return str(caught.value), smaller

    for text, smaller in run_ranks(2, work):
        assert "rank 0 got no 300 MiB more" in text and "cuda:0 has 3 MiB of 64 MiB free" in text
        assert smaller == Extent(0, 30 * MIB)
    assert driver.alive == 0


def test_a_gpu_that_cannot_reach_its_peer(run_ranks, driver: Driver) -> None:
    def work(team: Team) -> str:
        heap = cuda_vmm.CudaVmm.open(HeapGroup(team), device(team.rank), 1, 64 * MIB, CALL)
        driver.broken["cuMemSetAccess"] = Status.CUDA_ERROR_NOT_SUPPORTED
        with pytest.raises(HeapCannotGrow) as caught:
            heap.grow(MIB, 0, CALL)
        heap.close()
        return str(caught.value)

    for text in run_ranks(2, work):
        assert "cannot access the memory of a peer" in text and "CUDA_ERROR_NOT_SUPPORTED" in text
    assert driver.alive == 0


def test_capacity_is_a_limit(driver: Driver) -> None:
    heap = cuda_vmm.CudaVmm.open(HeapGroup(Team(ranks=(0,), rank=0)), device(0), 1, 64 * MIB, CALL)
    assert heap.grow(MIB, 0, CALL) == Extent(0, 64 * MIB)
    with pytest.raises(HeapCannotGrow, match="0 B of its capacity of 64 MiB") as caught:
        heap.grow(3 * MIB, MIB, CALL)
    assert "TILESCALE_HEAP_BYTES=66MiB" in caught.value.hint
    heap.close()


def test_a_device_that_never_gets_idle_is_left_alone(driver: Driver, monkeypatch) -> None:
    heap = cuda_vmm.CudaVmm.open(HeapGroup(Team(ranks=(0,), rank=0)), device(0), 1, 64 * MIB, CALL)
    heap.grow(MIB, 0, CALL)
    monkeypatch.setattr(type(heap._pages), "is_idle_within", lambda _self, seconds: False)
    heap.close()
    assert "cuMemUnmap" not in driver.log


def test_idleness_is_waited_for_with_a_bound(driver: Driver, monkeypatch) -> None:
    pages, forever = cuda_vmm._CudaPages(device(0), fabric=False), threading.Event()
    for wait, idle in ((lambda _device: forever.wait(), False), (lambda _device: None, True)):
        pages.reserve(4 * MIB)
        monkeypatch.setattr(torch.cuda, "synchronize", wait)
        assert pages.is_idle_within(5.0 if idle else 0.05) == idle
    forever.set()


@pytest.mark.parametrize(
    ("attribute", "hosts", "text"),
    [
        ("CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", 1, "virtual memory management"),
        ("CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", 1, "handles to share"),
        ("CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED", 2, "fabric handles"),
    ],
)
def test_what_a_device_lacks(driver: Driver, attribute: str, hosts: int, text: str) -> None:
    assert cuda_vmm.CudaVmm.objection(device(0), hosts) is None
    driver.attributes[attribute] = 0
    found = cuda_vmm.CudaVmm.objection(device(0), hosts)
    assert isinstance(found, UnsupportedError) and text in found.message and "nvshmem" in found.hint


def test_promised_but_forbidden(driver: Driver) -> None:
    driver.broken["cuMemExportToShareableHandle"] = Status.CUDA_ERROR_NOT_SUPPORTED
    found = cuda_vmm.CudaVmm.objection(device(0), 1)
    assert isinstance(found, DeviceError) and "it is CUDA_ERROR_NOT_SUPPORTED" in found.message
    assert driver.alive == 0


def test_a_probe_leaves_nothing_behind(driver: Driver) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    assert cuda_vmm.CudaVmm.objection(device(0), 1) is None
    assert len(os.listdir("/proc/self/fd")) == descriptors and driver.alive == 0


def test_a_device_that_does_not_work(driver: Driver, monkeypatch) -> None:
    def fail(_device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of order\nand more")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    found = cuda_vmm.CudaVmm.objection(device(0), 1)
    assert isinstance(found, DeviceError) and found.message == "cuda:0 does not work: CUDA error: out of order"


def test_addresses_are_those_that_the_driver_reserves(driver: Driver) -> None:
    pages = cuda_vmm._CudaPages(device(0), fabric=False)
    driver._cuMemAddressReserve = lambda nbytes, *_: 0x7000 + nbytes  # type: ignore[method-assign]
    assert pages.reserve(4 * MIB) == 0x7000 + 4 * MIB


def test_the_device_is_idle_before_memory_is_used_again(driver: Driver, monkeypatch) -> None:
    pages, waited = cuda_vmm._CudaPages(device(1), fabric=False), []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    pages.wait_idle()
    assert waited == [device(1)]


@pytest.mark.parametrize(("gib", "suggested"), [(16, 16), (141, 64)])
def test_the_suggested_capacity_is_that_of_the_device_up_to_a_limit(monkeypatch, gib: int, suggested: int) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(total_memory=gib << 30))
    assert cuda_vmm.CudaVmm.suggest(device(0), 2) == suggested << 30


@pytest.mark.parametrize("status", Status)
def test_a_driver_that_does_not_start_says_why(monkeypatch, status: Status) -> None:
    bindings = ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(cuInit=lambda _flags: (status,), CUresult=Status)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    if status is Status.CUDA_SUCCESS:
        assert cuda_vmm._driver() is bindings.driver
    else:
        with pytest.raises(DeviceError, match=f"does not start: {status.name}"):
            cuda_vmm._driver()


def test_without_cuda() -> None:
    found = cuda_vmm.CudaVmm.objection(device(0), 1)
    assert isinstance(found, TileScaleError)
    assert isinstance(found, DependencyError | DeviceError)
