# SPDX-License-Identifier: MIT
"""Heap provider `cuda_vmm`: the CUDA driver's virtual memory management, one GPU for each rank.

Handles are sent as POSIX file descriptors on one host. Ranks on several hosts use fabric handles, where the GPUs and
the system (NVLink between hosts, an IMEX channel) have them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap.group import HeapGroup
from tilescale.comm.heap.mapped import MappedHeap
from tilescale.errors import DependencyError, DeviceError, TileScaleError, UnsupportedError
from tilescale.hda.units import format_bytes

if TYPE_CHECKING:
    import torch

_LARGEST = 64 << 30


class CudaVmm(MappedHeap):
    """Device memory of GPUs that reach each other's memory."""

    @classmethod
    def objection(cls, device: torch.device, hosts: int) -> TileScaleError | None:
        """No CUDA driver, a device without virtual memory management, or one whose memory cannot be shared that way."""
        try:
            pages = _CudaPages(device, fabric=hosts > 1)
            _probe(pages)
        except (TileScaleError, MemoryError) as error:
            return error if isinstance(error, TileScaleError) else DeviceError(str(error))
        return None

    @classmethod
    def suggest(cls, device: torch.device, ranks: int) -> int:
        """The device's memory, at most 64 GiB: growing up to there costs addresses only."""
        import torch

        return min(torch.cuda.get_device_properties(device).total_memory, _LARGEST)

    @classmethod
    def open(cls, group: HeapGroup, device: torch.device, hosts: int, capacity: int, call: CollectiveCall) -> CudaVmm:
        """An empty heap."""
        return cls(group, _CudaPages(device, fabric=hosts > 1), capacity)


def _probe(pages: _CudaPages) -> None:
    """Make and share one page: a container or a missing channel may forbid it in spite of the device's attributes."""
    handle = pages.create(pages.granularity)
    try:
        shared = pages.export(handle)
        if isinstance(shared, int):
            os.close(shared)
    finally:
        pages.drop(handle)


class _CudaPages:
    """Physical memory of one GPU; see `Pages`. A handle is a CUmemGenericAllocationHandle."""

    chunk = 256 << 20

    def __init__(self, device: torch.device, fabric: bool):
        """Raises DependencyError, DeviceError or UnsupportedError if this GPU cannot do it."""
        import torch

        cu = self._cu = _driver()
        self._device = device
        try:
            torch.cuda.synchronize(device)  # creates the context that the driver's calls need
        except (RuntimeError, AssertionError) as error:
            raise DeviceError(f"{device} does not work: {str(error).splitlines()[0]}") from error
        self.shared_by_descriptor = not fabric
        types = cu.CUmemAllocationHandleType
        self._handle_type = (
            types.CU_MEM_HANDLE_TYPE_FABRIC if fabric else types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        self._check_device(fabric)
        self._properties = self._allocation()
        advice = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(self._call("cuMemGetAllocationGranularity", self._properties, advice))
        self._access = cu.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def reserve(self, nbytes: int) -> int:
        self._waiter = _IdleWaiter(self._device)
        return int(self._call("cuMemAddressReserve", nbytes, self.granularity, 0, 0))

    def release(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> Any:
        import torch

        out_of_memory = self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        for last in (False, True):
            status, handle = self._cu.cuMemCreate(nbytes, self._properties, 0)
            if status != out_of_memory or last:
                break
            torch.cuda.empty_cache()  # PyTorch keeps freed memory to itself
        if status == out_of_memory:
            free, total = torch.cuda.mem_get_info(self._device)
            raise MemoryError(f"{self._device} has {format_bytes(free)} of {format_bytes(total)} free")
        self._check("cuMemCreate", status)
        return handle

    def export(self, handle: Any) -> int | bytes:
        shared = self._call("cuMemExportToShareableHandle", handle, self._handle_type, 0)
        return int(shared) if self.shared_by_descriptor else bytes(shared.data)

    def adopt(self, shared: int | bytes) -> Any:
        try:
            return self._call("cuMemImportFromShareableHandle", shared, self._handle_type)
        finally:
            if isinstance(shared, int):
                os.close(shared)  # the handle holds the memory now

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)
        try:
            self._call("cuMemSetAccess", address, nbytes, [self._access], 1)
        except DeviceError as error:
            self.unmap(address, nbytes)
            raise DeviceError(
                f"{self._device} cannot access the memory of a peer ({error.message})",
                hint="`nvidia-smi topo -p2p r` shows which GPUs reach each other",
            ) from error

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def drop(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def wait_idle(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)

    def is_idle_within(self, seconds: float) -> bool:
        self._waiter.begin.set()
        return self._waiter.done.wait(seconds)

    def _check_device(self, fabric: bool) -> None:
        has = self._cu.CUdevice_attribute
        sharing = (
            ("fabric handles, which ranks on several hosts need", has.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)
            if fabric
            else ("handles to share", has.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
        )
        mapping = ("virtual memory management", has.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)
        number = self._call("cuDeviceGet", self._device.index)
        for what, attribute in (mapping, sharing):
            if not self._call("cuDeviceGetAttribute", attribute, number):
                raise UnsupportedError(f"{self._device} has no {what}", hint="TILESCALE_HEAP=nvshmem may work")

    def _allocation(self) -> Any:
        properties = self._cu.CUmemAllocationProp()
        properties.type = self._cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = self._cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._device.index
        properties.requestedHandleTypes = self._handle_type
        return properties

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result of a driver call, without its status. Raises DeviceError."""
        status, *results = getattr(self._cu, name)(*arguments)
        self._check(name, status)
        return results[0] if results else None

    def _check(self, name: str, status: Any) -> None:
        if status != self._cu.CUresult.CUDA_SUCCESS:
            _, text = self._cu.cuGetErrorString(status)
            raise DeviceError(f"{name} on {self._device}: {status.name}: {(text or b'').decode()}")


class _IdleWaiter(threading.Thread):
    """Waits for a device to get idle, from `begin` on.

    CUDA has no wait with a bound, and a kernel that waits for a dead peer would keep the process for ever. The thread
    starts with the heap, because Python starts none while it exits.
    """

    def __init__(self, device: torch.device):
        super().__init__(name="tilescale-heap-close", daemon=True)
        self._device = device
        self.begin, self.done = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        import torch

        self.begin.wait()
        with contextlib.suppress(RuntimeError):  # a kernel failed, which its launch reports; nothing runs any more
            torch.cuda.synchronize(self._device)
        self.done.set()


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DependencyError(
            f"symmetric memory on GPUs needs CUDA's Python bindings: {error}",
            hint="pip install cuda-bindings, in the version of CUDA that torch.version.cuda names",
        ) from error
    try:
        status = driver.cuInit(0)[0]
    except RuntimeError as error:  # no driver library
        raise DeviceError(f"no CUDA driver: {error}") from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the CUDA driver does not start: {status.name}")
    return driver
