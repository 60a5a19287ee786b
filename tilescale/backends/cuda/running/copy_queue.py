# SPDX-License-Identifier: MIT
"""The copy queue of a device: operations beside the kernels of its main stream, in the order in which they started.

Streams of its own, which wait for the main stream where an operation starts (they see all that was done before) and
for which the main stream waits at the end of a call. Captured in a CUDA graph, these are a fork and a join.

One stream waits for flags, one copies, one writes flags, each in the order of the operations: a copy follows the one
before at once, while its own flag has been waited for meanwhile, and the flag of the one before is written meanwhile.

Streams are mapped to a few hardware queues, and two of one hardware queue can wait for each other for nothing. Those
of different priorities have different ones, so theirs differs from any that programs are usually called on. Among
themselves they are given their work in the order in which one stream could do it, so they may share one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from tilescale.backends.cuda.running import stream_memory

if TYPE_CHECKING:
    import torch

    from tilescale.backends.cuda.running.stream_memory import Rows, Word

_PRIORITY = -1


class CopyQueue:
    """The queue of one device.

    What waits for a flag is held back until the call has launched its kernels: the driver may wait for the device to
    load one, and what waits for that kernel would keep it from getting idle.

    Attributes:
        stream: what copies.
    """

    def __init__(self, device: torch.device):
        import torch

        self._waiting, self.stream, self._writing = (torch.cuda.Stream(device, priority=_PRIORITY) for _ in range(3))
        self._is_ahead = False
        self._held: list[Callable[[], Any]] | None = None

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
            is_own = launch == self.hold or isinstance(launch, partial) and launch.func in self._adding
            is_started = starts or is_own and is_started
        return kept

    @property
    def _adding(self) -> tuple[Callable[..., None], ...]:
        return self.wait, self.copy, self.write, self.exchange

    def start(self) -> None:
        """What is added now sees all that the current stream did so far."""
        import torch

        event = torch.cuda.current_stream().record_event()
        for stream in (self._waiting, self.stream, self._writing):
            self._add(partial(stream.wait_event, event))
        self._is_ahead = True

    def wait(self, launch: Callable[[torch.cuda.Stream], Any]) -> None:
        """Add a wait, which `launch` adds to a stream: what is copied from now on starts when it is over."""
        self._add(partial(launch, self._waiting))
        self._add(partial(self.stream.wait_stream, self._waiting))

    def copy(self, part: Rows) -> None:
        """Add a copy."""
        self._add(partial(stream_memory.copy, self.stream, part))

    def exchange(self, launch: Callable[[], Any]) -> None:
        """Add what moves data on the current stream."""
        self._add(partial(self._on_stream, launch))

    def write(self, word: Word, value: int) -> None:
        """Add a write of a flag: whoever sees it sees what was copied until now."""
        self._add(partial(self._writing.wait_stream, self.stream))
        self._add(partial(stream_memory.write, self._writing, word, value))

    def _on_stream(self, launch: Callable[[], Any]) -> None:
        import torch

        with torch.cuda.stream(self.stream):
            launch()

    def _add(self, launch: Callable[[], Any]) -> None:
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
            for stream in (self._waiting, self.stream, self._writing):
                torch.cuda.current_stream().wait_stream(stream)
            self._is_ahead = False

    def drop(self) -> None:
        """Forget what is held back: its call has failed."""
        self._held = None


@cache
def copy_queue(device: torch.device) -> CopyQueue:
    """The queue of a device of this process."""
    return CopyQueue(device)
