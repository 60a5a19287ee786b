# SPDX-License-Identifier: MIT
"""All-to-all of unequal parts: each unit has the number of rows for each rank; the last to arrive moves all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tilelang_core import ir
from tilescale.backends.emulator.execute.frame import Frame
from tilescale.backends.emulator.execute.memory import Assumed
from tilescale.backends.emulator.execute.unit_rendezvous import rendezvous
from tilescale.backends.emulator.interpret.closures import Closure
from tilescale.backends.emulator.interpret.compiler import Compiler
from tilescale.backends.emulator.interpret.regions import Block, Region
from tilescale.backends.emulator.interpret.registry import operation
from tilescale.backends.emulator.operations import pieces
from tilescale.backends.emulator.operations.collectives import Chosen
from tilescale.errors import Location, OutOfBoundsError, RankMismatchError
from tilescale.program import ops
from tilescale.program.extents import UNFIT, unfit
from tilescale.program.operations import Collective


class Brought(NamedTuple):
    """A unit's contribution: the part for each rank, and a function that stores the received rows of each rank."""

    parts: list[np.ndarray]
    take: Callable[[np.ndarray, np.ndarray], None]


class _Rows:
    def __init__(self, compiler: Compiler, made: Collective):
        self.made, self.where = made, compiler.where
        self.source, self.target = Region(compiler, made.source), Region(compiler, made.target)
        self.sent = None if made.sent is None else Region(compiler, made.sent)
        self.received = None if made.received is None else Region(compiler, made.received)

    def knows_counts(self, frame: Frame) -> bool:
        """Whether a run without data has the row counts of this unit."""
        return self.sent is None or isinstance(self.sent.home.array(frame), Assumed)

    def counts(self, frame: Frame) -> np.ndarray:
        """Number of rows that this unit sends to each rank. Raises OutOfBoundsError: a negative number, or more rows
        than the tensor has."""
        unit = frame.unit.around(self.made.level)
        known = np.asarray(self.made.counts, np.int32).reshape(-1, unit.siblings)
        counts = known[unit.rank] if self.sent is None else np.array(self.sent.read(frame))
        rows = self.source.block(frame).extents[0]
        if (counts < 0).any() or counts.sum() > rows:
            raise self._outside(unit.rank, unfit(False, counts.tolist(), rows))
        return counts

    def brought(self, frame: Frame) -> Brought:
        """This unit's part."""
        counts = self.counts(frame)
        given = self.source.load(frame, _first_rows(self.source.block(frame), int(counts.sum())))
        return Brought(np.split(given, np.cumsum(counts)[:-1]), lambda rows, by: self._take(frame, rows, by))

    def _take(self, frame: Frame, rows: np.ndarray, counts: np.ndarray) -> None:
        block, rank = self.target.block(frame), frame.unit.around(self.made.level).rank
        if len(rows) > block.extents[0]:
            raise self._outside(rank, unfit(True, counts.tolist(), block.extents[0]))
        self.target.store(frame, _first_rows(block, len(rows)), rows)
        if self.received is not None:
            self.received.write(frame, counts.astype(np.int32))

    def _outside(self, rank: int, found: str) -> OutOfBoundsError:
        return OutOfBoundsError(
            f"T.all_to_all_v: rank {rank} of level {self.made.level!r} {found}", hint=UNFIT, where=self.where
        )


def _first_rows(block: Block, rows: int) -> Block:
    return Block(block.array, block.begins, (rows, *block.extents[1:]))


@operation(ops.ALL_TO_ALL_V.name)
def _all_to_all_v(compiler: Compiler, call: ir.Call) -> Closure:
    made, where, chosen = Collective.of(call), compiler.where, Chosen(compiler, Collective.of(call))
    tensors = _Rows(compiler, made)

    def run(frame: Frame) -> None:
        source = tensors.source.block(frame)
        moves = chosen.moves(frame, source.nbytes)
        knows = compiler.data or tensors.knows_counts(frame)
        counts = tensors.counts(frame) if knows else None
        brought = source.nbytes if counts is None else int(counts.sum()) * _row_bytes(source)
        frame.run.collected(frame.unit, made.name, made.level, brought, moves.algorithm)

        def finish(payloads: list[Brought]) -> tuple[int, ...]:
            _check_alike(payloads, where)
            parts = [each.parts for each in payloads]
            results = pieces.exchanged(chosen.schedule(frame, len(parts)), parts, 0)
            for rank, (each, rows) in enumerate(zip(payloads, results, strict=True)):
                each.take(rows, np.array([len(mine[rank]) for mine in parts]))
            return tuple(part.nbytes for mine in parts for part in mine)

        def time_alone(payloads: list[np.ndarray | None]) -> tuple[int, ...]:
            known = [int(n) for counts in payloads if counts is not None for n in counts]
            return tuple(n * _row_bytes(source) for n in known)

        if compiler.data:
            rendezvous(frame, made.level, made.name, where, tensors.brought(frame), finish, moves)
        else:
            rendezvous(frame, made.level, made.name, where, counts, time_alone, moves)

    return run


def _row_bytes(block: Block) -> int:
    return int(np.prod(block.extents[1:], dtype=np.int64)) * block.array.itemsize


def _check_alike(payloads: list[Brought], where: Location | None) -> None:
    """Raise RankMismatchError where the ranks' rows differ in shape."""
    first = payloads[0].parts[0].shape[1:]
    for rank, other in enumerate(payloads):
        if other.parts[0].shape[1:] != first:
            raise RankMismatchError(
                f"T.all_to_all_v: rank 0 brings rows {first}, rank {rank} rows {other.parts[0].shape[1:]}", where=where
            )
