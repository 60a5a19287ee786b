# SPDX-License-Identifier: MIT
"""All-reduce in one step, or in two, whose kernel adds the residual and normalises each row of the sum.

One after the other these take two kernels, and the sum goes to memory and back. A cluster of blocks has whole rows, so
that it knows their mean squares: the fewer rows there are the more blocks, as one processor alone sends them slowly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilelang_core import ir
from tilescale.backends.cuda.lowering.arguments import Site
from tilescale.backends.cuda.running.collectives import exchanges
from tilescale.backends.cuda.running.collectives.exchanges import (
    SHARING,
    SHORT_SLOTS,
    UNIT_BYTES,
    Room,
    Spread,
    exchange_of,
    rows_grid,
)
from tilescale.backends.cuda.running.collectives.kernels import Kernel, functions, launch, normalising
from tilescale.backends.cuda.running.collectives.setting import Bound, Operands, Stand
from tilescale.backends.cuda.running.collectives.workspaces import Shape
from tilescale.backends.cuda.running.owner import Owner
from tilescale.backends.cuda.running.steps import Work

if TYPE_CHECKING:
    import torch


def allreduce(own: Owner, stand: Stand, steps: int) -> Bound:
    """`T.allreduce_rms_norm`. Collective."""
    rows = _Rows(own, stand, steps)

    def bind(given: Operands) -> list[Work]:
        assert given.weight is not None and given.normed is not None, "a norm has both"
        read, written = (given.source, given.weight, given.residual), (given.target, given.normed)
        if not given.source.numel():
            return []
        if all(x is None or x.is_contiguous() for x in (*read, *written)):
            return [rows.summed(read, written)]

        def start() -> None:
            source, weight, residual = (None if x is None else x.contiguous() for x in read)
            y, normed = (x.contiguous() for x in written)
            rows.summed((source, weight, residual), (y, normed))()
            for out, made in zip(written, (y, normed), strict=True):
                out.copy_(made)

        return [start]

    return bind


def kernels(own: Owner, stand: Stand, steps: int) -> list[Kernel]:
    """The kernel of each form in which messages may go."""
    rows = _Shape(own, stand, steps)
    return [rows.kernel(form) for form in rows.forms]


WHOLE = 128
"""Elements of a row that no two blocks share."""


class _Shape:
    """Rows of a sum, and how they go in so many steps."""

    def __init__(self, own: Owner, stand: Stand, steps: int):
        norm, machine = stand.made.norm, own.target.machine
        assert norm is not None and norm.columns is not None, "the plan has asked for it"
        self.team, self.eps, self.steps, self._dtype = stand.team(own), norm.eps, steps, stand.dtype
        element = ir.bits(stand.dtype) // 8
        self.row, self._whole = norm.columns * element, WHOLE * element
        processors = machine.count(machine.program_level.name, machine.tensor_level.name)
        cluster = next((level.max_size or 1 for level in machine.levels if level.kind == "cluster"), 1)
        several = exchanges.ROW_BLOCKS.get(self.team.size, 1)
        self.room = (
            Room(processors, several, exchanges.ROW_THREADS, cluster)
            if cluster > 1
            else Room(processors, 1, exchanges.THREADS, 1)
        )
        self._short = exchanges.short(own, stand, self.team.size)
        self.forms = [form for form, _ in self._short]

    def form(self, nbytes: int) -> str:
        """The form of messages for a tensor of so many bytes: of several the first, as far as it goes."""
        part = nbytes if self.steps == 1 else nbytes // self.team.size  # to each peer
        return next((form for form, most in self._short if part <= most), self.forms[-1])

    def spread(self, form: str, rows: int) -> Spread:
        """The grid of a kernel, and what its blocks and threads have of a row."""
        return rows_grid(rows, self.row, self._whole, self.room, SHARING[form])

    def kernel(self, form: str) -> Kernel:
        """The one for a form of messages: its threads have as many units as where rows have the fewest blocks."""
        units = self.spread(form, self.room.blocks).each
        flags = str(units), str(self.steps == 2).lower()
        bounds = self.room.threads, self.room.per_processor
        return Kernel("reduce_norm", form, normalising(self._dtype), self.team.size, flags, bounds)


class _Rows:
    """One such collective of a program."""

    def __init__(self, own: Owner, stand: Stand, steps: int):
        """Collective."""
        self._own, self._level, self._shape = own, stand.made.level, _Shape(own, stand, steps)
        self._functions: dict[str, dict[bool, Any]] = {}
        for form in self._shape.forms:
            kernel = self._shape.kernel(form)
            self._functions[form] = functions(own.device_code(kernel.text), kernel, own.device.index)
        own.sites.append(Site(stand.what, stand.where))
        self._site = len(own.sites) - 1

    def summed(self, read: Sequence[torch.Tensor | None], written: Sequence[torch.Tensor]) -> Work:
        """What sums and normalises the rows of contiguous tensors. Collective if it needs a new workspace.

        Args:
            read: a rank's rows, the weight, the residual.
            written: the sums with the residual, and these normalised.
        """
        own, of, (target, normed) = self._own, self._shape, written
        form, rows = of.form(target.nbytes), target.nbytes // of.row
        grid, cluster, part, _ = of.spread(form, rows)
        shape = Shape(self._level, of.team.size, of.steps, SHORT_SLOTS, of.room.blocks, grid.slot, form)
        exchange = exchange_of(own, of.team, shape, self._site)
        exchange.source, exchange.weight, exchange.residual = (0 if x is None else x.data_ptr() for x in read)
        exchange.target, exchange.normed = target.data_ptr(), normed.data_ptr()
        exchange.bytes, exchange.rows, exchange.part, exchange.eps = of.row, rows, part, of.eps
        places = (exchange.source, exchange.weight, exchange.residual, exchange.target, exchange.normed, of.row)
        aligned = all(place % UNIT_BYTES == 0 for place in places)
        return launch(
            self._functions[form][aligned], grid.blocks, grid.threads, exchange, own.device, True, cluster
        )
