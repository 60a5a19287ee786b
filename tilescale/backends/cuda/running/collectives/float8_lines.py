# SPDX-License-Identifier: MIT
"""Collectives whose floats travel as float8, in lines with their scales (headers/float8_messages.cuh).

One kernel quantizes, sends, sums and dequantizes: a tensor is read and written once, and no rank waits for another one
except for its data.
"""

from __future__ import annotations

import torch

from tilescale.backends.cuda.running.collectives.exchanges import (
    SHARING,
    UNIT_BYTES,
    PartStrides,
    exchange_of,
    is_aligned,
)
from tilescale.backends.cuda.running.collectives.kernels import THREADS, HeaderKernel, functions, launch, normalising
from tilescale.backends.cuda.running.collectives.setting import PlacedCollective
from tilescale.backends.cuda.running.collectives.workspaces import SlotShape
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import StreamWork, moved
from tilescale.backends.tilelang.ptx import WARP
from tilescale.program.wire import line_floats

FORM, SLOTS = "float8", 4
"""The form of these messages, and slots of a sender."""

FUNCTIONS = {"all_gather": ("gather", 1), "reduce_scatter": ("scatter", 1), "allreduce": ("reduce", 2)}
"""Collective -> its function of the header, and that one's sets of slots."""


def kernel(context: ProgramContext, placed: PlacedCollective) -> HeaderKernel:
    function, _ = FUNCTIONS[placed.made.name]
    return HeaderKernel(function, FORM, normalising(placed.dtype), placed.team(context).size)


class LineMessages:
    """A program's use of such a kernel."""

    def __init__(self, context: ProgramContext, placed: PlacedCollective):
        """Collective."""
        self._context, self._placed, self.team = context, placed, placed.team(context)
        if self.team.size == 1:
            return
        machine, made = context.target.machine, kernel(context, placed)
        sms = machine.program_units
        self._blocks = sms * made.blocks_per_sm
        self._functions = functions(context.device_code(made.text), made, context.device.index)
        self._site = placed.site(context)

    def between(self, source: torch.Tensor, target: torch.Tensor, parts: PartStrides) -> list[StreamWork]:
        """A launch that exchanges the parts of contiguous tensors. Collective if it needs a new workspace."""
        if parts.nbytes == 0:
            return []
        if self.team.size == 1:
            return moved(source, target)
        context, (_, sets) = self._context, FUNCTIONS[self._placed.made.name]
        blocks, threads = self._grid(parts.nbytes // source.itemsize)
        warps = self._blocks * THREADS // WARP
        shape = SlotShape(self._placed.made.level, self.team.size, sets, SLOTS, warps, WARP * UNIT_BYTES, FORM)
        exchange = exchange_of(context, self.team, shape, self._site, parts)
        exchange.source, exchange.target = source.data_ptr(), target.data_ptr()
        function = self._functions[is_aligned(exchange)]
        return [launch(function, blocks, threads, exchange, context.device, True)]

    def _grid(self, floats: int) -> tuple[int, int]:
        """Blocks, and their threads: a warp for each message, up to the maximum."""
        messages = -(-floats // (line_floats(SHARING["lines"]) * (WARP // SHARING["lines"])))
        warps = min(-(-messages // self._blocks), THREADS // WARP)
        return min(-(-messages // warps), self._blocks), warps * WARP
