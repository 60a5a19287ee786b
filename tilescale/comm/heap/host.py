# SPDX-License-Identifier: MIT
"""Heap provider `host`: anonymous shared memory of one host, for ranks without a GPU."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys
import tempfile
from functools import cache
from typing import TYPE_CHECKING

from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap.group import HeapGroup
from tilescale.comm.heap.mapped import MappedHeap
from tilescale.errors import DeviceError, TileScaleError, UnsupportedError

if TYPE_CHECKING:
    import torch

_LARGEST = 64 << 30
_MAP_FIXED = 0x10  # Python's mmap module can neither map at an address nor map nothing
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value


class HostProvider(MappedHeap):
    """Shared memory of the processes on one host."""

    freed_at_exit = True

    @classmethod
    def objection(cls, device: torch.device, hosts: int) -> TileScaleError | None:
        """Ranks on several hosts."""
        return None if hosts == 1 else UnsupportedError(f"ranks on {hosts} hosts share no memory", hint="use one host")

    @classmethod
    def suggest(cls, device: torch.device, ranks: int) -> int:
        """This rank's part of the host's memory, at most 64 GiB."""
        return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks, _LARGEST)

    @classmethod
    def open(
        cls, group: HeapGroup, device: torch.device, hosts: int, capacity: int, call: CollectiveCall
    ) -> HostProvider:
        """An empty heap. Raises UnsupportedError: several ranks where they cannot hand each other memory."""
        if group.size > 1 and not hasattr(socket, "SO_PEERCRED"):
            raise UnsupportedError(
                "symmetric tensors of several ranks need Linux, whose processes hand each other memory",
                hint="pass plain tensors to kernels, or run all devices in one process with tilescale.emulate",
            )
        return cls(group, _HostPages(), capacity)


class _HostPages:
    """Pages of memory files; see `Pages`. A handle is a descriptor."""

    granularity = mmap.ALLOCATIONGRANULARITY
    chunk = 16 << 20
    shared_by_descriptor = True

    def reserve(self, nbytes: int) -> int:
        return _map(None, nbytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)

    def release(self, address: int, nbytes: int) -> None:
        if _libc().munmap(address, nbytes):
            raise _error("munmap")

    def create(self, nbytes: int) -> int:
        try:
            descriptor = _memory_file()
            os.ftruncate(descriptor, nbytes)
        except OSError as error:
            raise DeviceError(f"no file for shared memory can be made: {error}") from error
        return descriptor

    def export(self, handle: int) -> int:
        return os.dup(handle)

    def adopt(self, shared: int | bytes) -> int:
        assert isinstance(shared, int)
        return shared

    def map(self, address: int, nbytes: int, handle: int) -> None:
        _map(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, handle)

    def unmap(self, address: int, nbytes: int) -> None:
        # The addresses stay reserved: no other mapping may appear between the ranks' heaps.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _map(address, nbytes, _PROT_NONE, flags, -1)

    def drop(self, handle: int) -> None:
        os.close(handle)

    def wait_idle(self) -> None:
        pass  # a tensor operation on the CPU has ended when its call returns

    def is_idle_within(self, seconds: float) -> bool:
        return True


def _memory_file() -> int:
    """A file without a name: in memory on Linux, among temporary files elsewhere."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tilescale-heap", os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(prefix="tilescale-heap-")
    os.unlink(path)
    return descriptor


def _map(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int) -> int:
    result = _libc().mmap(address, nbytes, protection, flags, descriptor, 0)
    if result == _FAILED:
        raise _error("mmap")
    return result


def _error(name: str) -> DeviceError:
    return DeviceError(f"{name}: {os.strerror(ctypes.get_errno())}")


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
