# SPDX-License-Identifier: MIT
"""GEMMs between nodes in chunks of rows: while one chunk is in flight, the next one is multiplied.

Between nodes NCCL's kernels carry data, and those need SMs: a grid that waits for them while it holds all SMs would
wait for ever. So no grid waits here. Each chunk is a separate collective, which overlaps its phases inside nodes and
between them, on a stream concurrent with that of the GEMMs; the two streams wait for each other's chunks. A chunk is as
large as a message between nodes must be to reach the rate of its network.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from tilescale.backends import device_services
from tilescale.comm import Team, init
from tilescale.cost.reach import linked, message_bytes
from tilescale.hda.current import current_machine
from tilescale.ops import whole_tensors

WHOLE_BYTES = 2 << 20
"""Largest size that is sent in one chunk."""

TILE = 128
"""Rows of a GEMM's tile: a chunk has whole ones."""


def chunks(rows: int, row_bytes: int, team: Team) -> list[slice]:
    """Rows that are sent together, in chunks of one size but for the last; one chunk of a small tensor, or within a
    node."""
    if rows * row_bytes <= WHOLE_BYTES or not whole_tensors.spans_nodes(team):
        return [slice(0, rows)]
    machine = current_machine()
    level = machine.tensor_level.name
    far = machine.path(level, 0, linked(machine, ((level, team.size),)))
    step = -(-message_bytes(far) // max(row_bytes, 1) // TILE) * TILE
    return [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def received_first(parts: list[slice], collective: Callable[[slice], Any], work: Callable[[Any], Any]) -> list[Any]:
    """Apply work to the result of a collective, chunk by chunk; the next chunk's collective runs concurrently."""
    if len(parts) == 1:
        return [work(collective(parts[0]))]
    side, made = _ConcurrentStream(), []
    for part in parts:
        with side.stream():
            brought = side.keep(collective(part))
        side.main_waits()
        made.append(work(brought))
    side.main_waits()
    return made


def sent_after(
    parts: list[slice], work: Callable[[slice], torch.Tensor], collective: Callable[[torch.Tensor, slice], torch.Tensor]
) -> torch.Tensor:
    """The rows that a collective makes of what work made, chunk by chunk; work on the next one is done meanwhile."""
    if len(parts) == 1:
        return collective(work(parts[0]), parts[0])
    side, rows = _ConcurrentStream(), []
    for part in parts:
        made = side.keep(work(part))
        side.waits_for_main()
        with side.stream():
            rows.append(collective(made, part))
    side.main_waits()
    return torch.cat(rows)


class _ConcurrentStream:
    """A stream of collectives concurrent with the current one; tensors shared by the two are kept alive."""

    def __init__(self) -> None:
        device_services().not_recorded()  # streams are not
        device = init().device
        self._streams = (torch.cuda.current_stream(device), _side(device)) if device.type != "cpu" else None
        self._kept: list[Any] = []
        self.waits_for_main()

    def stream(self) -> AbstractContextManager[Any]:
        """Launch the work inside on the stream of collectives."""
        return nullcontext() if self._streams is None else torch.cuda.stream(self._streams[1])

    def keep(self, made: Any) -> Any:
        """Keep memory that the other stream uses alive until the two streams have joined."""
        self._kept.append(made)
        return made

    def waits_for_main(self) -> None:
        """Order later work of the stream of collectives after that of the current one."""
        if self._streams is not None:
            self._streams[1].wait_stream(self._streams[0])

    def main_waits(self) -> None:
        """Order later work of the current stream after that of the stream of collectives."""
        if self._streams is not None:
            self._streams[0].wait_stream(self._streams[1])


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """One for each device, whose kernels begin before those of GEMMs."""
    return torch.cuda.Stream(device, priority=-1)
