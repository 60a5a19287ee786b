# SPDX-License-Identifier: MIT
"""Barriers of all ranks: at a program's entry and exit, and between its phases.

A kernel of one thread signals each device this rank's count of barriers and its purpose, and waits for the same from
each. So every rank knows which one is missing, and a rank with another program order or other arguments is detected,
not mixed up.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, no_type_check

import torch

from tilelang_core import stock as T
from tilelang_core import tl
from tilelang_core.compile import entry
from tilescale.backends.cuda import headers
from tilescale.backends.cuda.running.steps import StreamWork
from tilescale.backends.cuda.running.timeouts import WaitRecords
from tilescale.backends.tilelang.lowering.kernel import prelude
from tilescale.comm.heap import SymmetricHeap
from tilescale.comm.heap.lasting import lasting
from tilescale.comm.heap.reach import Reach

_SITE_BITS, _CALL_BITS = 10, 22


def purpose(site: int, call: int) -> int:
    """The purpose of a rank's barrier in 32 bits: the place in the program and a digest of the call, as int32."""
    word = (site % (1 << _SITE_BITS)) << _CALL_BITS | call % (1 << _CALL_BITS)
    return word - (1 << 32) if word >> 31 else word


def site_of(word: int, sites: int) -> int | None:
    """The place that a purpose names, among `sites`."""
    site = word >> _CALL_BITS & ((1 << _SITE_BITS) - 1)
    return site if site < sites else None


@dataclass(frozen=True)
class LastBarrier:
    """A rank's last barrier: the count, and the purpose."""

    count: int
    purpose: int

    def behind(self, other: "LastBarrier") -> int:
        """Number of barriers that this rank has not reached and another one has. Counts wrap at 2^32."""
        return (other.count - self.count + (1 << 31)) % (1 << 32) - (1 << 31)


class RankBarrier:
    """The barriers of all ranks in one program, in the order of its stream.

    Attributes:
        words: on this device, each rank's last barrier.
        everywhere: the words of all devices; in each instance, followed by the number of blocks of each rank that have
            left.
        counts: this device's number of barriers; of blocks that had left before the running kernel; of blocks of it
            that have ended.
    """

    def __init__(self, heap: SymmetricHeap | Reach, instance: torch.Tensor, compile: Callable[[Any], Any]):
        """Collective. `instance`: `words_of(ranks)` words of the heap, zero on all ranks; `compile` makes a kernel of a
        traced function."""
        team = heap.team
        self._kernel = entry(compile(barrier_function(team.size, heap.addresses.stride)))
        self._instance = instance
        self.words = instance[: team.size]
        self.everywhere: torch.Tensor = heap.peers(instance)
        self.counts: torch.Tensor = lasting(lambda: torch.zeros(3, dtype=torch.int32, device=heap.device))
        self._slot, self._rank = heap.addresses.slot(team.rank), team.rank

    @staticmethod
    def words_of(ranks: int) -> int:
        """Number of words of an instance."""
        return 2 * ranks

    def barrier(self, site: int, call: int, limit_ns: int, records: WaitRecords) -> StreamWork:
        """A launch that adds a barrier to the current stream. `call` is a digest of the facts that all ranks must agree
        on."""
        word = purpose(site, call)
        tensors = self.everywhere, self.counts, records.device
        return partial(self._kernel, self._slot, self._rank, word, limit_ns, site, *tensors)

    def clear(self) -> None:
        """Reset the counts to zero. Nothing may run on any rank's device."""
        self._instance.zero_()
        self.counts.zero_()


def standings(words: list[int]) -> list[LastBarrier]:
    """Each rank's last barrier, from the words of a device."""
    return [LastBarrier(word >> 32 & 0xFFFF_FFFF, word & 0xFFFF_FFFF) for word in words]


@cache
def barrier_function(devices: int, stride: int) -> Any:
    """A traced function `(slot, rank, purpose, limit, site, words of all devices, counts, wait record)`."""

    @T.prim_func
    @no_type_check  # TileLang's types are values in Python
    def device_barrier(
        slot: T.int32,
        rank: T.int32,
        purpose: T.int32,
        limit: T.int64,
        site: T.int32,
        words: T.StridedTensor((devices, 2 * devices), (stride // 8, 1), T.int64),
        counts: T.Tensor((3,), T.int32),
        record: T.Tensor((8,), T.int64),
    ):
        with T.Kernel(1, threads=1, prelude=prelude(headers.__name__, "rendezvous.cuh")):
            T.call_extern(
                "handle",
                "tilescale::barrier_of_ranks",
                T.address_of(words[0, 0]),
                T.int64(stride // 8),
                slot,
                rank,
                devices,
                T.address_of(counts[0]),
                purpose,
                limit,
                T.address_of(record[0]),
                site,
            )
            T.call_extern("handle", "tilescale::acquired")

    return device_barrier.with_attr(tl.NON_RESTRICT, [b.data for b in device_barrier.buffer_map.values()])
