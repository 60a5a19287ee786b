# SPDX-License-Identifier: MIT
"""All-to-all of unequal parts by a kernel, which reads the row counts on the device.

Every rank needs the full matrix of row counts: it determines the number of messages, and the offsets in the targets. So
the counts are gathered first, by short messages.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tilescale.backends.cuda.running.collectives import dense
from tilescale.backends.cuda.running.collectives.exchanges import (
    LONG_SLOTS,
    UNIT_BYTES,
    BlockMessages,
    HeaderCall,
    MessageForms,
    PartStrides,
    exchange_of,
    largest_slot,
)
from tilescale.backends.cuda.running.collectives.kernels import THREADS, HeaderKernel, functions, launch, moving
from tilescale.backends.cuda.running.collectives.setting import BoundCollective, Operands, PlacedCollective
from tilescale.backends.cuda.running.collectives.workspaces import SLOTS, SlotShape
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import StreamWork
from tilescale.comm.heap.lasting import lasting

COUNT_BYTES = 4


def all_to_all_v(context: ProgramContext, placed: PlacedCollective) -> BoundCollective:
    """`T.all_to_all_v`. Collective."""
    rows = _UnequalAllToAll(context, placed)

    def bind(given: Operands) -> list[StreamWork]:
        def exchange(source: torch.Tensor, target: torch.Tensor) -> list[StreamWork]:
            return [*rows.gathered_counts(given.sent), rows.exchanged(source, target, given.received)]

        return dense.along(0, given.source, given.target, exchange)

    return bind


class _UnequalAllToAll:
    def __init__(self, context: ProgramContext, placed: PlacedCollective):
        """Collective."""
        machine = context.target.machine
        self._context, self._level, self._team = context, placed.made.level, placed.team(context)
        size = self._team.size
        self._gather = BlockMessages(context, placed, counting(context, placed))
        known = placed.made.counts or [0] * size * size
        self._table: torch.Tensor = lasting(
            lambda: torch.tensor(known, dtype=torch.int32, device=context.device)
        )
        kernel = moving_rows(context, placed)
        self._functions: dict[bool, Any] = functions(context.device_code(kernel.text), kernel, context.device.index)
        sms = machine.program_units
        blocks = sms * kernel.blocks_per_sm
        self._shape = SlotShape(self._level, size, 1, LONG_SLOTS, blocks, largest_slot(max(1, size - 1)), SLOTS)
        self._site = placed.site(context)

    def gathered_counts(self, sent: torch.Tensor | None) -> list[StreamWork]:
        """A launch that gathers the counts of all ranks, unless the program has them."""
        if sent is None:
            return []
        return self._gather.between(
            sent, self._table, PartStrides(sent.nbytes, self._table.nbytes, target_step=sent.nbytes)
        )

    def exchanged(self, source: torch.Tensor, target: torch.Tensor, received: torch.Tensor | None) -> StreamWork:
        """A launch that exchanges rows by the table of counts. Collective if it needs a new workspace.

        Ranks may have tensors of different lengths: they need not agree on anything that depends on the length.
        """
        row = math.prod(source.shape[1:]) * source.itemsize
        exchange = exchange_of(self._context, self._team, self._shape, self._site)
        exchange.source, exchange.target = source.data_ptr(), target.data_ptr()
        exchange.bytes, exchange.source_step, exchange.target_step = row, len(source), len(target)
        exchange.table = self._table.data_ptr()
        exchange.received = 0 if received is None else received.data_ptr()
        aligned = all(place % UNIT_BYTES == 0 for place in (exchange.source, exchange.target, row))
        return launch(self._functions[aligned], self._shape.blocks, THREADS, exchange, self._context.device)


def counting(context: ProgramContext, placed: PlacedCollective) -> HeaderCall:
    """The function of the headers that gathers the counts of all ranks."""
    return HeaderCall("move", moving("int32"), placed.team(context).size * COUNT_BYTES, ("true",))


def moving_rows(context: ProgramContext, placed: PlacedCollective) -> HeaderKernel:
    """The function of the headers that exchanges rows."""
    return HeaderKernel("move_rows", "slots", moving(placed.dtype), placed.team(context).size)


def kernels(context: ProgramContext, placed: PlacedCollective) -> list[HeaderKernel]:
    """The kernels that a collective may launch, to be compiled ahead."""
    return [*MessageForms(context, placed, counting(context, placed)).kernels.values(), moving_rows(context, placed)]
