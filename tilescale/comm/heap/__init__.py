# SPDX-License-Identifier: MIT
"""Symmetric memory: tensors that exist on every rank at the same offset of a heap that all ranks have mapped.

heap.py          SymmetricHeap: allocation, views over all ranks       default.py      the heap of the whole job
address_map.py   addresses of every rank's heap                          provider.py     sources of memory
arena.py         allocated offsets                               ledger.py       ranks that hold a block
tensors.py       torch tensors over foreign memory                     group.py        the ranks of a heap
open_heaps.py    the heap of a tensor; the end at exit          nvshmem.py      NVSHMEM's own heap
descriptors.py   file descriptors between processes                    reach.py        the part of a heap with addresses
mapped.py        heaps that this process maps: host.py (shared memory) and cuda_vmm.py (GPUs)
"""

from tilescale.comm.heap.address_map import AddressMap
from tilescale.comm.heap.default import default_heap, empty, from_tensor, zeros
from tilescale.comm.heap.heap import SymmetricHeap, Usage
from tilescale.comm.heap.open_heaps import heap_of

__all__ = ["AddressMap", "SymmetricHeap", "Usage", "default_heap", "empty", "from_tensor", "heap_of", "zeros"]
