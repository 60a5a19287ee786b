# SPDX-License-Identifier: MIT
"""Reports that devices leave when a wait fails, and the word that stops all waits of a program.

headers/sync.cuh writes them: a symmetric array with a head of 8 words and a row of 8 words for each rank. The first
failed wait of a rank writes the rank's row on all devices and then stops all of them: from then on no wait of the
program blocks. Each device sets one word of its host's memory, which the host reads without a query of the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import torch

from tilescale.backends.cuda.running import stream_memory
from tilescale.backends.cuda.running.stream_memory import Word
from tilescale.backends.cuda.running.streams import past_waits
from tilescale.comm.heap import SymmetricHeap
from tilescale.comm.heap.reach import Reach
from tilescale.comm.heap.tensors import tensor_at

HEAD, ROW = 8, 8
"""Words of the head (stop, address of the host's word, slot, stride, ranks, rank, address of moments) and of a row."""

COMPLETE = 2
STOPPED_BY_HOST = -1


class WaitFailure(IntEnum):
    """Causes of a failed wait, or of a signal that was not sent."""

    TIMEOUT = 0  # a flag did not reach its value
    OUTSIDE = 1  # the flag's index lies outside of its tensor
    ABSENT = 2  # a rank did not arrive at a barrier
    DIFFERENT = 3  # a rank arrived at another barrier, or with other arguments
    ROWS = 4  # an all-to-all of unequal parts has more rows than its source (index 0), or its target (1)
    POLL = 5  # a polled value does not change


@dataclass(frozen=True)
class WaitReport:
    """The first failed wait of a rank.

    Attributes:
        rank: the rank.
        site: number of the place in the program.
        block: coordinates of the tile program, x first.
        index: index of the flag in its tensor, or the rank that did not arrive.
        expected, seen: values of the flag (for OUTSIDE, `expected` is how many flags there are), or of the barrier;
            for ROWS the capacity and the number of rows, or a negative number.
    """

    rank: int
    kind: WaitFailure
    site: int
    block: tuple[int, int, int]
    index: int
    expected: int
    seen: int


def decode(words: Sequence[int]) -> list[WaitReport]:
    """The complete rows of an array, by rank."""
    reports = []
    for rank, begin in enumerate(range(HEAD, len(words), ROW)):
        state, kind, site, block, index, expected, seen = words[begin : begin + 7]
        if state == COMPLETE:
            at = (block & 0x7FFF_FFFF, block >> 31 & 0xFFFF, block >> 47 & 0xFFFF)
            reports.append(WaitReport(rank, WaitFailure(kind), site, at, index, expected, seen))
    return reports


_WORDS = 512
"""Words in a page."""

_kept: list[torch.Tensor] = []
"""Pages of words that devices may still write after their owner is gone, because calls are queued."""


def _pinned_words() -> Iterator[torch.Tensor]:
    """Words that devices write, each zero. The driver takes as long to pin one as to pin a page."""
    while True:
        _kept.append(torch.zeros(_WORDS, dtype=torch.int64, pin_memory=True))
        yield from _kept[-1].split(1)


_unused = _pinned_words()


@cache
def _stop_word() -> torch.Tensor:
    """The word that stops waits, for copies to devices."""
    return torch.full((1,), STOPPED_BY_HOST, dtype=torch.int64, pin_memory=True)


class WaitRecords:
    """The reports of one program on one device.

    Attributes:
        device: the head of the array, an argument of kernels.
        moments: two words for each moment that blocks record, if they do (sync.cuh).
    """

    def __init__(self, heap: SymmetricHeap | Reach, words: torch.Tensor, moments: int = 0):
        """`words`: `words_of(ranks)` words of the heap; `moments`: the number of those that all blocks record."""
        ranks, rank = heap.team.size, heap.team.rank
        self._heap, self._words = heap, words
        self.device = self._words[:HEAD]
        self._host, self._stop = next(_unused), _stop_word()
        self._stopped = self._host.numpy().data  # read in less time than the array
        self._stream = past_waits(heap.device)
        self._head = [0, self._host.data_ptr(), heap.addresses.slot(rank), heap.addresses.stride // 8, ranks, rank]
        self.moments = torch.zeros(2 * moments, dtype=torch.int64, device=heap.device if moments else "cpu")
        self._head.append(self.moments.data_ptr())
        self.clear()

    @staticmethod
    def words_of(ranks: int) -> int:
        """Number of words of an array."""
        return HEAD + ROW * ranks

    @property
    def stopped(self) -> bool:
        """Whether waits no longer block, as far as this rank's device has noticed. Does not query the device."""
        return self._stopped[0] != 0

    @property
    def failed(self) -> bool:
        """Whether a wait has failed, here or elsewhere, so that waits no longer block."""
        return self._stopped[0] > 0

    def stop(self) -> None:
        """Let no wait of this rank's device block any more."""
        with torch.cuda.stream(self._stream):
            self._words[:1].copy_(self._stop, non_blocking=True)  # by copy engine: kernels may fill all SMs
        self._stopped[0] = STOPPED_BY_HOST

    def fail(self, kind: WaitFailure, site: int, index: int, expected: int, seen: int) -> None:
        """Report a wait of this rank that no kernel reports, on all devices, and stop all: `fail` of sync.cuh."""
        rank, ranks = self._heap.team.rank, self._heap.team.size
        row = HEAD + ROW * rank
        # The state is written last, and then the word that stops. Streams write them: kernels may fill all SMs.
        words = [*enumerate((kind, site, 0, index, expected, seen), row + 1), (row, COMPLETE), (0, rank + 1)]
        everywhere = self._heap.peers(self._words)
        for slot in range(ranks):
            for at, value in words:
                stream_memory.write(self._stream, Word.of(everywhere, (slot, at)), value)
        self._stopped[0] = rank + 1

    def read_at(self, word: Word) -> int:
        """The current number in a word of this device, also while kernels run."""
        dtype = {4: torch.int32, 8: torch.int64}[word.nbytes]
        return self.read_concurrently(tensor_at(word.address, (1,), (1,), dtype, self._heap.device, lambda: None))[0]

    def read(self) -> list[WaitReport]:
        """The failed waits of all ranks that this device knows, also while kernels run."""
        return decode(self.read_concurrently(self._words))

    def read_concurrently(self, tensor: torch.Tensor) -> list[int]:
        """The current numbers in a tensor on this device, also while kernels run."""
        with torch.cuda.stream(self._stream):
            return tensor.cpu().tolist()

    def clear(self) -> None:
        """Let waits block again. Nothing may run on any rank's device."""
        self._words.zero_()
        self.device[: len(self._head)].copy_(torch.tensor(self._head))
        torch.cuda.synchronize(self._heap.device)
        self._stopped[0] = 0
