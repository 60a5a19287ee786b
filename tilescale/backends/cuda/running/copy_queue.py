# SPDX-License-Identifier: MIT
"""The copy queue of a device: asynchronous operations next to the kernels of its main stream, in start order.

The queue is a stream of its own. It waits for the main stream where an operation starts, so it sees all earlier work,
and the main stream waits for it at the end of a call. Captured in a CUDA graph, these are a fork and a join.

Streams are mapped to a few hardware queues, and two streams of one hardware queue can deadlock on each other. Streams
of different priorities have different hardware queues, so this stream's priority differs from any that programs are
usually called on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from tilescale.backends.cuda.running import stream_memory
from tilescale.backends.cuda.running.stream_memory import WaitCondition, WordWrite
from tilescale.backends.cuda.running.streams import own_stream

_PRIORITY = -1


class CopyQueue:
    """The queue of one device.

    Operations that wait for a flag are held back until the call has launched its kernels: the driver may wait for an
    idle device to load one, and a wait for that kernel would keep the device busy. `stream`: the stream that executes
    it.
    """

    def __init__(self, device: torch.device):
        self.stream = own_stream(device, _PRIORITY)
        self._is_ahead = False
        self._held: list[Callable[[], Any]] | None = None
        self._host: list[torch.Tensor] = []  # captured graphs still use the smaller ones

    @property
    def is_held(self) -> bool:
        """Whether added operations are held back."""
        return self._held is not None

    def batched(self, launches: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
        """A call's launches in order, without starts and holds between which nothing is added to the current stream.
        Batches of memory operations that follow one another are one."""
        kept: list[Callable[[], Any]] = []
        done: list[Callable[[], Any]] = []  # starts and holds since the last launch on the current stream
        for launch in launches:
            if launch in (self.start, self.hold):
                if launch in done:
                    continue
                done.append(launch)
            elif not (isinstance(launch, partial) and launch.func in (self.add, self.add_batch)):
                done.clear()
            last = kept[-1] if kept else None
            if isinstance(launch, partial) and isinstance(last, partial) and launch.func == last.func == self.add_batch:
                kept[-1] = partial(self.add_batch, parts=[*last.keywords["parts"], *launch.keywords["parts"]])
            else:
                kept.append(launch)
        return kept

    def start(self) -> None:
        """Let operations added from now on follow the current stream's earlier work."""
        self.add(partial(self.stream.wait_event, torch.cuda.current_stream().record_event()))
        self._is_ahead = True

    def add(self, launch: Callable[[], Any]) -> None:
        """Add to the stream."""
        if self._held is None:
            launch()
        else:
            self._held.append(launch)

    def add_batch(self, parts: Sequence[Callable[[], Sequence[WordWrite | WaitCondition]]]) -> None:
        """Add a batch of memory operations, which are made when it is added to the stream."""
        self.add(lambda: stream_memory.add(self.stream, *(each for part in parts for each in part())))

    def hold(self) -> None:
        """Hold back operations added from now on."""
        self._held = self._held or []

    def flush(self) -> None:
        """Add the operations held back."""
        held, self._held = self._held or [], None
        for launch in held:
            launch()

    def join(self) -> None:
        """Let the current stream wait for all started operations."""
        self.flush()
        if self._is_ahead:
            torch.cuda.current_stream().wait_stream(self.stream)
            self._is_ahead = False

    def host_memory(self, nbytes: int) -> int:
        """The address of `nbytes` bytes of host memory, reused by one operation after the other."""
        if not self._host or self._host[-1].nbytes < nbytes:
            self._host.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
        return self._host[-1].data_ptr()

    def drop(self) -> None:
        """Drop started and held-back operations: their call has failed."""
        self._held, self._is_ahead = None, False


@cache
def copy_queue(device: torch.device) -> CopyQueue:
    """The queue of a device of this process."""
    return CopyQueue(device)
