# SPDX-License-Identifier: MIT
"""Symmetric memory: tensors that exist on every rank at the same offset of a heap that all ranks have mapped."""

from tilescale.comm.heap.address_map import AddressMap
from tilescale.comm.heap.default import default_heap, empty, from_tensor, zeros
from tilescale.comm.heap.heap import SymmetricHeap, Usage
from tilescale.comm.heap.open_heaps import heap_of

__all__ = ["AddressMap", "SymmetricHeap", "Usage", "default_heap", "empty", "from_tensor", "heap_of", "zeros"]
