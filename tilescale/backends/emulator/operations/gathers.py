# SPDX-License-Identifier: MIT
"""Gathers that copy queues make: each unit's queue sends its part to all, chunk by chunk, and signals each of them."""

from __future__ import annotations

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.memory import address
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Block, Region
from tilescale.backends.emulator.interpret.scales import instance
from tilescale.backends.emulator.operations.remote import Flag, queued
from tilescale.errors import UsageError
from tilescale.program.asynchronous import Parts
from tilescale.program.operations import Collective


def queued_gather(compiler: Compiler, gather: Collective) -> Closure:
    """Starts a gather on the unit's copy queue."""
    found = _Gather(compiler, gather)

    def part(frame: Frame) -> None:
        frame.run.collected(frame.unit, gather.name, gather.level, found.source.block(frame).nbytes, "copy_engine")

    return queued(compiler, [part, found.run])


class _Gather:
    def __init__(self, compiler: Compiler, gather: Collective):
        self.compiler, self.level, self.chunk = compiler, gather.level, gather.chunk
        self.source, self.target = Region(compiler, gather.source), Region(compiler, gather.target)
        self.flag = Flag(compiler, gather.flags, 1, "add", gather.level)
        self.parts = Parts.of(ir.region_parts(gather.source)[2], ir.region_parts(gather.target)[2])
        watching = compiler.instrumentation
        self.record = watching.chunk(compiler, gather, self.source, self.flag) if watching is not None else None
        compiler.reached |= {self.target.home.root, self.flag.region.home.root}

    def run(self, frame: Frame) -> None:
        """Send the part: to this unit itself first, then to the next rank, and so on."""
        unit = frame.unit.around(self.level)
        rows = self.source.block(frame).extents[self.parts.rows]
        chunk = self.chunk or rows
        for turn in range(unit.siblings):
            peer = frame.unit.counterpart(self.level, (unit.rank + turn) % unit.siblings)
            for number, first in enumerate(range(0, rows, chunk)):
                self._send(frame, peer, unit.rank, number, range(first, min(first + chunk, rows)))
                if self.compiler.preempts:
                    frame.run.scheduler.preempt(True)

    def _send(self, frame: Frame, peer: Unit, rank: int, number: int, rows: range) -> None:
        source, target = self._chunk(frame, peer, rank, rows)
        flags = instance(self.compiler, self.flag.region.home.slot, frame, peer)
        told = Block(flags, (rank, number), (1, 1))
        moves = not (peer is frame.unit and self._is_in_place(source, target))
        if self.record is not None:
            self.record(frame, peer, source if moves else None, told)
        if moves and self.compiler.data:
            tile = self.source.load(frame, source)
            self.target.store(frame, target, tile.reshape(target.extents), peer)
        if moves:
            frame.run.moved(frame.unit, peer, source.nbytes, True)
        self.flag.update_at(frame, told)

    def _chunk(self, frame: Frame, peer: Unit, rank: int, rows: range) -> tuple[Block, Block]:
        """Where some rows of the unit's part lie, and where they go."""
        axis = self.parts.rows
        part = self.source.block(frame)
        whole = self.target.block(frame, instance(self.compiler, self.target.home.slot, frame, peer))
        rest = part.extents[axis + 1 :]
        begins = _moved(part.begins, self.parts.in_part(rows.start))
        source = Block(part.array, begins, (*part.extents[:axis], len(rows), *rest))
        slot = (1,) if self.parts.slots else ()
        places = self.parts.in_whole(rank, part.extents[axis], rows.start)
        return source, Block(whole.array, _moved(whole.begins, places), (*slot, len(rows), *rest))

    def _is_in_place(self, source: Block, target: Block) -> bool:
        """Whether the unit's own part lies where it belongs.

        Raises:
            UsageError: it lies in the result, but elsewhere.
        """
        if address(source.view()) == address(target.view()):
            return True
        if self.compiler.data and np.may_share_memory(source.view(), target.array):
            raise UsageError(
                f"T.all_gather of {self.source.home.name!r}, which lies in the tensor behind "
                f"{self.target.home.name!r}, but not where the part of this unit goes",
                hint="gather in place from the unit's own part, or from another tensor",
            )
        return False


def _moved(begins: tuple[int, ...], offsets: list[int]) -> tuple[int, ...]:
    return tuple(b + (offsets[i] if i < len(offsets) else 0) for i, b in enumerate(begins))
