# SPDX-License-Identifier: MIT
"""All-reduce in one step, or in two, whose kernel adds the residual and normalizes each row of the sum.

As separate kernels, the sum would be written to memory and read back. A cluster of blocks has whole rows, which it
needs for their mean squares. Fewer rows get more blocks each, because a single SM sends them slowly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from tilelang_core import ir
from tilescale.backends.cuda.running.collectives import exchanges
from tilescale.backends.cuda.running.collectives.exchanges import (
    SHARING,
    SHORT_SLOTS,
    UNIT_BYTES,
    KernelCapacity,
    RowGrid,
    exchange_of,
    rows_grid,
)
from tilescale.backends.cuda.running.collectives.kernels import HeaderKernel, functions, launch, normalising
from tilescale.backends.cuda.running.collectives.setting import BoundCollective, Operands, PlacedCollective
from tilescale.backends.cuda.running.collectives.workspaces import SlotShape
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import StreamWork
from tilescale.program.norm import GROUP, check_packed, packed_rows


def allreduce(own: ProgramContext, stand: PlacedCollective, steps: int) -> BoundCollective:
    """`T.allreduce_rms_norm`, `T.allreduce_layer_norm`. Collective."""
    rows = _Rows(own, stand, steps)

    def bind(given: Operands) -> list[StreamWork]:
        tensors = {name: getattr(given, name) for name in TENSORS}
        if not given.source.numel():
            return []
        gaps = [name for name, x in tensors.items() if x is not None and not x.is_contiguous()]
        if not gaps:
            return [rows.summed(tensors)]

        def start() -> None:
            dense = {name: tensors[name].contiguous() for name in gaps}
            rows.summed(tensors | dense)()
            for name in dense.keys() & WRITTEN:
                tensors[name].copy_(dense[name])

        return [start]

    return bind


def kernels(own: ProgramContext, stand: PlacedCollective, steps: int) -> list[HeaderKernel]:
    """The kernels of each form that messages may have."""
    return [*_Shape(own, stand, steps).kernels.values()]


WHOLE = GROUP
"""Elements of a row that stay in one block: they may share a scale."""

TENSORS = ("source", "weight", "bias", "residual", "target", "normed", "quantized", "scales")
WRITTEN = {"target", "normed", "quantized", "scales"}
"""Operands of the kernel, and which of them it may write."""

SCALINGS = {None: "NOT_QUANTIZED", "tensor": "TENSOR", "row": "ROW", "group": "GROUPS"}
"""Elements that share a scale, and the name in headers/norm_messages.cuh."""


class _Shape:
    """Rows of a sum, and their distribution for `steps` steps."""

    def __init__(self, own: ProgramContext, stand: PlacedCollective, steps: int):
        norm, machine = stand.made.norm, own.target.machine
        assert norm is not None and norm.columns is not None, "the plan has asked for it"
        self.team, self.norm, self.steps, self._dtype = stand.team(own), norm, steps, stand.dtype
        element = ir.bits(stand.dtype) // 8
        self.columns, self.row, self._whole = norm.columns, norm.columns * element, WHOLE * element
        processors = machine.program_units
        cluster = next((level.max_size or 1 for level in machine.levels if level.kind == "cluster"), 1)
        several = exchanges.ROW_BLOCKS.get(self.team.size, 1)
        units = exchanges.ROW_UNITS.get(self.team.size, 1)
        self.room = (
            KernelCapacity(processors, several, exchanges.ROW_THREADS, cluster, units)
            if cluster > 1
            else KernelCapacity(processors, 1, exchanges.THREADS, 1)
        )
        self._short = exchanges.short(own, stand, self.team.size)
        self.kernels = {(form, each): self._kernel(form, each) for form, _ in self._short for each in self._each(form)}

    def form(self, nbytes: int) -> str:
        """The form of messages for a tensor of `nbytes` bytes: the first one that fits."""
        part = nbytes if self.steps == 1 else nbytes // self.team.size  # to each peer
        return next((form for form, most in self._short if part <= most), self._short[-1].form)

    def spread(self, form: str, rows: int) -> RowGrid:
        """The grid of a kernel, and the share of its blocks and threads in a row."""
        return rows_grid(rows, self.row, self._whole, self.room, SHARING[form])

    def kernel(self, form: str, each: int) -> tuple[str, int]:
        """The key of the kernel for a form of messages and a number of units per thread."""
        return next(key for key in self.kernels if key[0] == form and key[1] >= each)

    def _each(self, form: str) -> list[int]:
        """Units of a row per thread for which there are kernels: those of one row, and of the most rows."""
        part = math.inf if form == self._short[-1].form else dict(self._short)[form]
        most = part * (1 if self.steps == 1 else self.team.size) / self.row
        counts = {self.spread(form, int(max(1, min(most, rows)))).each for rows in (1, self.room.blocks)}
        return sorted(counts) if self.room.units > 1 else [max(counts)]

    def _kernel(self, form: str, each: int) -> HeaderKernel:
        """The kernel for a form of messages, whose threads have up to `each` units of a row."""
        norm, flag = self.norm, lambda truth: str(bool(truth)).lower()
        how = flag(norm.centered), f"tilescale::{SCALINGS[norm.scaling]}", flag(norm.power)
        flags = str(each), flag(self.steps == 2), *how
        bounds = self.room.threads, self.room.per_sm
        return HeaderKernel("reduce_norm", form, normalising(self._dtype), self.team.size, flags, bounds)


class _Rows:
    def __init__(self, own: ProgramContext, stand: PlacedCollective, steps: int):
        """Collective."""
        self._own, self._level, self._shape = own, stand.made.level, _Shape(own, stand, steps)
        self._functions = {
            key: functions(own.device_code(kernel.text), kernel, own.device.index)
            for key, kernel in self._shape.kernels.items()
        }
        self._site = stand.site(own)

    def summed(self, tensors: Mapping[str, torch.Tensor | None]) -> StreamWork:
        """A launch that sums and normalizes the rows of contiguous tensors, by their names in `TENSORS`. Collective if
        it needs a new workspace."""
        own, of, source = self._own, self._shape, tensors["source"]
        assert source is not None
        form, rows = of.form(source.nbytes), source.nbytes // of.row
        grid, cluster, part, each = of.spread(form, rows)
        shape = SlotShape(self._level, of.team.size, of.steps, SHORT_SLOTS, of.room.blocks, grid.slot, form)
        exchange = exchange_of(own, of.team, shape, self._site)
        places = {name: 0 if x is None else x.data_ptr() for name, x in tensors.items()}
        for name, place in places.items():
            setattr(exchange, name, place)
        exchange.bytes, exchange.rows, exchange.part, exchange.each = of.row, rows, part, each
        exchange.eps, exchange.weight_offset = of.norm.eps, of.norm.offset
        scales = tensors["scales"]
        if of.norm.packed and scales is not None:
            check_packed(scales.numel(), rows, of.columns)
            exchange.packed = packed_rows(rows)
        units = [of.row, *(place for name, place in places.items() if name != "scales")]
        aligned = all(place % UNIT_BYTES == 0 for place in units)
        function = self._functions[of.kernel(form, each)][aligned]
        return launch(function, grid.blocks, grid.threads, exchange, own.device, True, cluster)
