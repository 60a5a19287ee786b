# SPDX-License-Identifier: MIT
"""The copy queue of a device: operations beside the kernels of its main stream, in the order in which they started.

A stream of its own, which waits for the main stream where an operation starts (it sees all that was done before) and
for which the main stream waits at the end of a call. Captured in a CUDA graph, these are a fork and a join.

Streams are mapped to a few hardware queues, and two of one hardware queue can wait for each other for nothing. Those
of different priorities have different ones, so this one's differs from any that programs are usually called on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from tilescale.backends.cuda.running.own_streams import own_stream

if TYPE_CHECKING:
    import torch

_PRIORITY = -1


class CopyQueue:
    """The queue of one device.

    What waits for a flag is held back until the call has launched its kernels: the driver may wait for the device to
    load one, and what waits for that kernel would keep it from getting idle.

    Attributes:
        stream: what executes it.
    """

    def __init__(self, device: torch.device):
        self.stream = own_stream(device, _PRIORITY)
        self._is_ahead = False
        self._held: list[Callable[[], Any]] | None = None
        self._host: list[torch.Tensor] = []  # graphs that were captured go on using the smaller ones

    @property
    def is_held(self) -> bool:
        """Whether what is added is held back."""
        return self._held is not None

    def without_repeats(self, launches: Sequence[Callable[[], Any]]) -> list[Callable[[], Any]]:
        """A call's launches, in order, without starts between which nothing is added to the current stream."""
        kept, is_started = [], False
        for launch in launches:
            starts = launch == self.start
            if not (starts and is_started):
                kept.append(launch)
            is_own = launch == self.hold or isinstance(launch, partial) and launch.func == self.add
            is_started = starts or is_own and is_started
        return kept

    def start(self) -> None:
        """What is added now sees all that the current stream did so far."""
        import torch

        self.add(partial(self.stream.wait_event, torch.cuda.current_stream().record_event()))
        self._is_ahead = True

    def add(self, launch: Callable[[], Any]) -> None:
        """Add to the stream, after all that was added before."""
        if self._held is None:
            launch()
        else:
            self._held.append(launch)

    def hold(self) -> None:
        """Hold back what is added from now on."""
        self._held = self._held or []

    def flush(self) -> None:
        """Hold nothing back any more."""
        held, self._held = self._held or [], None
        for launch in held:
            launch()

    def join(self) -> None:
        """The current stream goes on after all that was started."""
        import torch

        self.flush()
        if self._is_ahead:
            torch.cuda.current_stream().wait_stream(self.stream)
            self._is_ahead = False

    def host_memory(self, nbytes: int) -> int:
        """The address of so much memory of the host, for what one operation after the other moves through it."""
        import torch

        if not self._host or self._host[-1].nbytes < nbytes:
            self._host.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
        return self._host[-1].data_ptr()

    def drop(self) -> None:
        """Forget what was started and what is held back: its call has failed."""
        self._held, self._is_ahead = None, False


@cache
def copy_queue(device: torch.device) -> CopyQueue:
    """The queue of a device of this process."""
    return CopyQueue(device)
