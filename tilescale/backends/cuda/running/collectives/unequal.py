# SPDX-License-Identifier: MIT
"""All-to-all of unequal parts by a kernel, which reads the row counts on the device.

Every rank needs the full matrix of row counts: it determines the number of messages, and the offsets in the targets. So
the counts are gathered first, by short messages.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tilescale.backends.cuda.lowering.arguments import Site
from tilescale.backends.cuda.running.collectives import dense
from tilescale.backends.cuda.running.collectives.exchanges import (
    LONG_SLOTS,
    UNIT_BYTES,
    Forms,
    Messages,
    Parts,
    Use,
    exchange_of,
    largest_slot,
)
from tilescale.backends.cuda.running.collectives.kernels import THREADS, Kernel, functions, launch, moving
from tilescale.backends.cuda.running.collectives.setting import Bound, Operands, Stand
from tilescale.backends.cuda.running.collectives.workspaces import SLOTS, Shape
from tilescale.backends.cuda.running.program_context import Owner
from tilescale.backends.cuda.running.steps import Work

if TYPE_CHECKING:
    import torch

COUNT_BYTES = 4


def all_to_all_v(own: Owner, stand: Stand) -> Bound:
    """`T.all_to_all_v`. Collective."""
    rows = _Rows(own, stand)

    def bind(given: Operands) -> list[Work]:
        def exchange(source: torch.Tensor, target: torch.Tensor) -> list[Work]:
            return [*rows.told(given.sent), rows.exchanged(source, target, given.received)]

        return dense.along(0, given.source, given.target, exchange)

    return bind


class _Rows:
    """One such collective of a program."""

    def __init__(self, own: Owner, stand: Stand):
        """Collective."""
        import torch

        machine = own.target.machine
        self._own, self._level, self._team = own, stand.made.level, stand.team(own)
        size = self._team.size
        self._gather = Messages(own, stand, counting(own, stand))
        known = stand.made.counts or [0] * size * size
        self._table: torch.Tensor = torch.tensor(known, dtype=torch.int32, device=own.device)
        kernel = moving_rows(own, stand)
        self._functions: dict[bool, Any] = functions(own.device_code(kernel.text), kernel, own.device.index)
        processors = machine.count(machine.program_level.name, machine.tensor_level.name)
        blocks = processors * kernel.blocks_per_processor
        self._shape = Shape(self._level, size, 1, LONG_SLOTS, blocks, largest_slot(max(1, size - 1)), SLOTS)
        own.sites.append(Site(stand.what, stand.where))
        self._site = len(own.sites) - 1

    def told(self, sent: torch.Tensor | None) -> list[Work]:
        """A launch that gathers the counts of all ranks, unless the program has them."""
        if sent is None:
            return []
        return self._gather.between(sent, self._table, Parts(sent.nbytes, self._table.nbytes, target_step=sent.nbytes))

    def exchanged(self, source: torch.Tensor, target: torch.Tensor, received: torch.Tensor | None) -> Work:
        """A launch that exchanges rows by the table of counts. Collective if it needs a new workspace.

        Ranks may have tensors of different lengths: they need not agree on anything that depends on the length.
        """
        row = math.prod(source.shape[1:]) * source.itemsize
        exchange = exchange_of(self._own, self._team, self._shape, self._site)
        exchange.source, exchange.target = source.data_ptr(), target.data_ptr()
        exchange.bytes, exchange.source_step, exchange.target_step = row, len(source), len(target)
        exchange.table = self._table.data_ptr()
        exchange.received = 0 if received is None else received.data_ptr()
        aligned = all(place % UNIT_BYTES == 0 for place in (exchange.source, exchange.target, row))
        return launch(self._functions[aligned], self._shape.blocks, THREADS, exchange, self._own.device)


def counting(own: Owner, stand: Stand) -> Use:
    """The function of the headers that gathers the counts of all ranks."""
    return Use("move", moving("int32"), stand.team(own).size * COUNT_BYTES, ("true",))


def moving_rows(own: Owner, stand: Stand) -> Kernel:
    """The function of the headers that exchanges rows."""
    return Kernel("move_rows", "slots", moving(stand.dtype), stand.team(own).size)


def kernels(own: Owner, stand: Stand) -> list[Kernel]:
    """All kernels of it."""
    return [*Forms(own, stand, counting(own, stand)).kernels.values(), moving_rows(own, stand)]
