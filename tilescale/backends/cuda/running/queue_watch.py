# SPDX-License-Identifier: MIT
"""Bounded waits of the copy queue: a stream waits for a word without a limit, so the host watches it.

Around each wait the queue writes the wait's number into a word of the host's memory, so the host knows it without a
query of the device, in CUDA graphs too. A thread polls these words. A wait that exceeds its limit is reported as a
kernel reports its own (timeouts.py), which stops the program on all ranks. After a program is stopped, the thread
writes the awaited words itself, so that the device becomes idle.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilescale.backends.cuda.running import driver, stream_memory
from tilescale.backends.cuda.running.stream_memory import WaitCondition, Word, WordWrite
from tilescale.backends.cuda.running.streams import past_waits
from tilescale.backends.cuda.running.timeouts import WaitFailure, WaitRecords

_LOOK_S, _RELEASE_S = 0.05, 0.001
"""Polling intervals of the thread; the second one while it ends waits, many of which may be queued."""

PATIENCE = 2
"""Limit in multiples of a kernel's wait: the operation that would end this wait may itself wait, and must report the
cause first."""

_NUMBER_BITS = 24
_DONE, _BUSY = 0, 600
"""CUDA_SUCCESS and CUDA_ERROR_NOT_READY: states of a stream."""


@dataclass(frozen=True)
class QueueWait:
    """A wait of the queue: the number of its site, the flag's index in its tensor, and the condition."""

    site: int
    index: int
    condition: WaitCondition


class QueueWatch:
    """The waits that one program adds to the copy queue of a device. `device`: the device of the queue."""

    def __init__(
        self, records: WaitRecords, limit_ns: int, device: torch.device, progress: Callable[[], Any], start: bool = True
    ):
        """`progress` changes with every call; `start` starts the watch."""
        self._records, self._progress, self.device = records, progress, device
        self._limit_s = PATIENCE * limit_ns / 1e9
        pinned = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        _kept.append(pinned)
        self._now = pinned.numpy()
        self._word = Word.of(pinned, (0,))
        self._places: list[QueueWait] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._serial = 0
        self._seen, self._since, self._call = 0, 0.0, None
        self._stream = past_waits(device)
        if start:
            _watch(self)

    def wait(self, place: QueueWait) -> list[WordWrite | WaitCondition]:
        """The queue's operations for a wait, which is watched."""
        # Outside of graphs every wait has its own number, however often a program is called.
        self._serial += 1
        begun = WordWrite(self._word, self._serial << _NUMBER_BITS | self._number(place))
        return [begun, place.condition, WordWrite(self._word, 0)]

    def is_lost(self) -> bool:
        """Whether the device is lost: then every call of the driver returns the same error."""
        (status,) = driver.function("cuStreamQuery")(self._stream.cuda_stream)
        return int(status) not in (_DONE, _BUSY)

    @property
    def is_waiting(self) -> bool:
        """Whether the queue is in one of its waits, or the last one is still watched."""
        return bool(self._now[0]) or self._seen != 0

    def _number(self, place: QueueWait) -> int:
        condition = place.condition
        exact = condition.value if condition.compare == "==" else None  # else the newest value satisfies all
        number = self._numbers.setdefault((place.site, condition.word, condition.compare, exact), len(self._places) + 1)
        if number > len(self._places):
            self._places.append(place)
        elif condition.value > self._places[number - 1].condition.value:
            self._places[number - 1] = place
        return number

    def look(self, now: float) -> bool:
        """Report a wait that exceeds its limit; end the wait of a stopped program. True if there was one to end."""
        word = int(self._now[0])
        if word == 0:
            self._seen = 0
            return False
        place = self._places[word % (1 << _NUMBER_BITS) - 1]
        if self._records.stopped:
            stream_memory.write(self._stream, place.condition.word, place.condition.enough)
            return True
        if word != self._seen:
            self._seen, self._since, self._call = word, now, None
        elif self._call is None and now - self._since > self._limit_s / 2:
            self._call = self._progress()
        elif now - self._since > self._limit_s:
            self._overdue(place, now)
        return False

    def _overdue(self, place: QueueWait, now: float) -> None:
        call = self._progress()
        if call == self._call:
            seen = self._records.read_at(place.condition.word)
            self._records.fail(WaitFailure.TIMEOUT, place.site, place.index, place.condition.value, seen)
        else:
            # A graph that is replayed again and again reaches the same wait.
            self._since, self._call = now, call


_kept: list[torch.Tensor] = []
"""Words that devices may still write after their owner is gone, because calls are queued."""

_watches: weakref.WeakSet[QueueWatch] = weakref.WeakSet()
_troubled: weakref.WeakSet[QueueWatch] = weakref.WeakSet()
"""Watches whose poll has failed, with a warning."""
_thread: threading.Thread | None = None


def _watch(watch: QueueWatch) -> None:
    global _thread
    _watches.add(watch)
    if _thread is None or not _thread.is_alive():
        _thread = threading.Thread(target=_run, name="tilescale-queue", daemon=True)
        _thread.start()


def _run() -> None:
    while True:
        ended = False
        for watch in list(_watches):
            ended = watch.is_waiting and _look(watch) or ended
        time.sleep(_RELEASE_S if ended else _LOOK_S)


def _look(watch: QueueWatch) -> bool:
    """Call `QueueWatch.look`. After any error the thread continues, because the next poll may end a wait.

    A lost device is the exception: its waits have ended then, and its next user gets the error.
    """
    try:
        with torch.cuda.device(watch.device):
            return watch.look(time.monotonic())
    except Exception as error:  # noqa: BLE001 - errors of the driver, of PyTorch, interrupts
        if watch.is_lost():
            _watches.discard(watch)
        elif watch not in _troubled:
            _troubled.add(watch)
            print(f"tilescale: the watch on the copy queue of {watch.device} goes on after {error!r}", file=sys.stderr)
        return False
