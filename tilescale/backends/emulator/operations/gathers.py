# SPDX-License-Identifier: MIT
"""Gathers and all-to-alls by copy queues: each unit's queue sends to all, chunk by chunk, and signals each chunk."""

from __future__ import annotations

import numpy as np

from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.memory import address
from tilescale.backends.emulator.execute.units import Unit
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Block, Region
from tilescale.backends.emulator.interpret.scales import instance
from tilescale.backends.emulator.operations.remote import Flag, queued
from tilescale.errors import UsageError
from tilescale.program.asynchronous import PartLayout, flag_of
from tilescale.program.operations import Collective


def queued_collective(compiler: Compiler, made: Collective) -> Closure:
    """Start a gather, or an all-to-all, on the unit's copy queue."""
    found = _Exchange(compiler, made)

    def part(frame: Frame) -> None:
        frame.run.collected(frame.unit, made.name, made.level, found.source.block(frame).nbytes, "copy_engine")

    return queued(compiler, [part, found.run])


class _Exchange:
    def __init__(self, compiler: Compiler, made: Collective):
        self.compiler, self.level, self.chunk = compiler, made.level, made.chunk
        self.source, self.target = Region(compiler, made.source), Region(compiler, made.target)
        self.flag = Flag(compiler, made.flags, 1, "add", made.level)
        self.parts, self.to_all = PartLayout.moved(made), made.name == "all_gather"
        watching = compiler.instrumentation
        self.record = watching.chunk(compiler, made, self.source, self.flag) if watching is not None else None
        compiler.reached |= {self.target.home.root, self.flag.region.home.root}

    def run(self, frame: Frame) -> None:
        """Send a part to this unit itself first, then to the next rank, and so on."""
        unit = frame.unit.around(self.level)
        rows = self._rows(frame, unit.siblings)
        chunk = self.chunk or rows
        for step in range(unit.siblings):
            peer = frame.unit.counterpart(self.level, (unit.rank + step) % unit.siblings)
            for number, first in enumerate(range(0, rows, chunk)):
                self._send(frame, peer, number, range(first, min(first + chunk, rows)), rows)
                frame.run.scheduler.preempt(True)

    def _rows(self, frame: Frame, units: int) -> int:
        count = self.source.block(frame).extents[self.parts.rows]
        return count if self.to_all or self.parts.slots else count // units

    def _send(self, frame: Frame, peer: Unit, number: int, rows: range, count: int) -> None:
        rank = frame.unit.around(self.level).rank
        source, target = self._chunk(frame, peer, rank, rows, count)
        flags = self.flag.region.block(frame, instance(self.compiler, self.flag.region.home.slot, frame, peer))
        chunk_flag = Block(flags.array, tuple(flag_of(flags.begins, rank, number)), (1,) * len(flags.begins))
        moves = not (self.to_all and peer is frame.unit and self._is_in_place(source, target))
        if self.record is not None:
            self.record(frame, peer, source if moves else None, chunk_flag)
        if moves and self.compiler.data:
            tile = self.source.load(frame, source)
            self.target.store(frame, target, tile.reshape(target.extents), peer)
        if moves:
            frame.run.moved(frame.unit, peer, source.nbytes, True)
        self.flag.update_at(frame, chunk_flag)

    def _chunk(self, frame: Frame, peer: Unit, rank: int, rows: range, count: int) -> tuple[Block, Block]:
        """Source and target of a chunk: some rows of a part."""
        lead, axis, given = self.parts.lead, self.parts.rows, self.source.block(frame)
        whole = self.target.block(frame, instance(self.compiler, self.target.home.slot, frame, peer))
        to = peer.around(self.level).rank
        offsets = self.parts.in_part(rows.start) if self.to_all else self.parts.in_whole(to, count, rows.start)
        front, chunk = given.extents[:lead], (len(rows), *given.extents[axis + 1 :])
        source = Block(given.array, _moved(given.begins, offsets), (*front, *[1] * (axis - lead), *chunk))
        places = self.parts.in_whole(rank, count, rows.start)
        return source, Block(whole.array, _moved(whole.begins, places), (*front, *[1] * self.parts.slots, *chunk))

    def _is_in_place(self, source: Block, target: Block) -> bool:
        """Whether the unit's own part is already at its position in the result. Raises UsageError: it lies at another
        position of the result."""
        if address(source.view()) == address(target.view()):
            return True
        if self.compiler.data and np.may_share_memory(source.view(), target.array):
            raise UsageError(
                f"T.all_gather of {self.source.home.name!r}, which lies in the tensor behind "
                f"{self.target.home.name!r}, but not at the position of this unit's part",
                hint="gather in place from the unit's own part, or from another tensor",
            )
        return False


def _moved(begins: tuple[int, ...], offsets: list[int]) -> tuple[int, ...]:
    return tuple(b + (offsets[i] if i < len(offsets) else 0) for i, b in enumerate(begins))
