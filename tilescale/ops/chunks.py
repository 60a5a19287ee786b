# SPDX-License-Identifier: MIT
"""Products between nodes in chunks of rows: while one chunk is on its way, the next one is multiplied.

Between nodes NCCL's kernels carry data, and those need processors: a grid that waits for them while it holds all of
them would wait for ever. So no grid waits here. Each chunk is a collective of its own, which itself overlaps what it
does inside nodes and between them, on a stream beside that of the products; the two streams wait for each other's
chunks. A chunk has what a message between nodes needs to reach the rate of its network.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from tilescale.comm import Team, init
from tilescale.cost.reach import linked, message_bytes
from tilescale.hda.current import current_machine
from tilescale.ops import whole_tensors
from tilescale.ops.repeated import not_recorded

WHOLE_BYTES = 2 << 20
"""What is sent in one chunk, at most."""

TILE = 128
"""Rows of a product's tile: a chunk has whole ones."""


def chunks(rows: int, row_bytes: int, team: Team) -> list[slice]:
    """Rows that travel together, in chunks of one size but for the last; one chunk of what is small, or in a node."""
    if rows * row_bytes <= WHOLE_BYTES or not whole_tensors.spans_nodes(team):
        return [slice(0, rows)]
    machine = current_machine()
    level = machine.tensor_level.name
    far = machine.path(level, 0, linked(machine, ((level, team.size),)))
    step = -(-message_bytes(far) // max(row_bytes, 1) // TILE) * TILE
    return [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def received_first(parts: list[slice], collective: Callable[[slice], Any], work: Callable[[Any], Any]) -> list[Any]:
    """What work makes of what a collective has brought, chunk by chunk; the next one's collective runs meanwhile."""
    if len(parts) == 1:
        return [work(collective(parts[0]))]
    beside, made = _Beside(), []
    for part in parts:
        with beside.stream():
            brought = beside.keep(collective(part))
        beside.main_waits()
        made.append(work(brought))
    beside.main_waits()
    return made


def sent_after(
    parts: list[slice], work: Callable[[slice], torch.Tensor], collective: Callable[[torch.Tensor, slice], torch.Tensor]
) -> torch.Tensor:
    """The rows that a collective makes of what work made, chunk by chunk; work on the next one is done meanwhile."""
    if len(parts) == 1:
        return collective(work(parts[0]), parts[0])
    beside, rows = _Beside(), []
    for part in parts:
        made = beside.keep(work(part))
        beside.waits_for_main()
        with beside.stream():
            rows.append(collective(made, part))
    beside.main_waits()
    return torch.cat(rows)


class _Beside:
    """A stream of collectives beside the current one, which keeps what either has made for the other."""

    def __init__(self) -> None:
        not_recorded()  # streams are not
        device = init().device
        self._streams = (torch.cuda.current_stream(device), _side(device)) if device.type != "cpu" else None
        self._kept: list[Any] = []
        self.waits_for_main()

    def stream(self) -> AbstractContextManager[Any]:
        """What is launched inside runs on the stream of collectives."""
        return nullcontext() if self._streams is None else torch.cuda.stream(self._streams[1])

    def keep(self, made: Any) -> Any:
        """Memory that the other stream uses: it is not given to others before both streams are one again."""
        self._kept.append(made)
        return made

    def waits_for_main(self) -> None:
        """What follows on the stream of collectives comes after what is on the current one."""
        if self._streams is not None:
            self._streams[1].wait_stream(self._streams[0])

    def main_waits(self) -> None:
        """What follows on the current stream comes after what is on that of collectives."""
        if self._streams is not None:
            self._streams[0].wait_stream(self._streams[1])


@cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """One for each device, whose kernels begin before those of products."""
    return torch.cuda.Stream(device, priority=-1)
