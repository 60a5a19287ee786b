# SPDX-License-Identifier: MIT
"""Any algorithm by its record: one kernel plays the rounds from a table of each rank.

The peers of a ring or tree, fixed in the text of other algorithms, are data here: a rank's table has the messages that
it sends, receives and combines in each round (headers/rounds.cuh). Pieces are cut as the emulator cuts them, so sums
are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from tilelang_core import ir
from tilescale.backends.cuda.running.collectives import dense
from tilescale.backends.cuda.running.collectives.exchanges import UNIT_BYTES, exchange_of, power_of_two
from tilescale.backends.cuda.running.collectives.kernels import (
    THREADS,
    HeaderKernel,
    combining,
    functions,
    launch,
    moving_units,
)
from tilescale.backends.cuda.running.collectives.setting import (
    BoundCollective,
    CollectiveLauncher,
    Operands,
    PlacedCollective,
)
from tilescale.backends.cuda.running.collectives.workspaces import Inbox
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import StreamWork, run
from tilescale.collectives import RoundSchedule, schedule
from tilescale.collectives.estimate import shape_of
from tilescale.collectives.play import arrivals
from tilescale.collectives.select import members, numbering
from tilescale.comm.heap.lasting import lasting

INBOX_BYTES = 64 << 20
"""Maximum bytes of all pieces that a rank receives; larger tensors are processed in several passes."""

OWN = -1
"""A slot number that means the rank's own piece."""


def launcher(algorithm: str) -> CollectiveLauncher:
    """A launcher of an operation by the rounds of an algorithm. Collective."""
    return lambda context, placed: _BOUND[placed.made.name](RoundsKernel(context, placed, algorithm), placed)


# -- tables ------------------------------------------------------------------------------------------------------------


@dataclass
class RankRound:
    """A rank's round: messages to send (receiver, piece, slot), and to combine (piece, slots)."""

    sends: list[tuple[int, int, int]] = field(default_factory=list)
    hears: set[int] = field(default_factory=set)
    takes: list[tuple[int, list[int]]] = field(default_factory=list)

    def words(self) -> Iterator[int]:
        """The round in a table's encoding."""
        yield len(self.sends)
        for send in self.sends:
            yield from send
        for ranks in ({receiver for receiver, *_ in self.sends}, self.hears):
            yield len(ranks)
            yield from sorted(ranks)
        yield len(self.takes)
        for piece, slots in self.takes:
            yield piece
            yield len(slots)
            yield from slots


def tables(plan: RoundSchedule, root: int = 0) -> list[list[int]]:
    """The table of each rank. Unit 0 of the schedule is the rank `root`, and the others follow it."""
    units, slots = plan.units, [0] * plan.units
    by_home = sorted(range(len(plan.home)), key=lambda piece: int(plan.home[piece]))
    places = {piece: place for place, piece in enumerate(by_home)}
    rounds: list[list[RankRound]] = []
    for r in plan.rounds:
        rounds.append(now := [RankRound() for _ in range(units)])
        for (target, piece), (senders, combined) in arrivals(r).items():
            sent = taken = places.get(piece, piece)
            if plan.operation == "all_to_all":
                taken, sent = divmod(piece, units)
            values = sorted([*senders, target]) if combined else senders[-1:]
            slot = {sender: slots[target] + i for i, sender in enumerate(senders)}
            slots[target] += len(senders)
            for sender in senders:
                now[sender].sends.append(((target + root) % units, sent, slot[sender]))
                now[target].hears.add((sender + root) % units)
            takes = [slot.get(unit, OWN) for unit in values]
            now[target].takes.append((taken, takes))
    heads = [len(rounds), max(slots)]
    of_units = [[*heads, *(word for each in rounds for word in each[unit].words())] for unit in range(units)]
    return [of_units[(rank - root) % units] for rank in range(units)]


# -- calls -------------------------------------------------------------------------------------------------------------


class RoundsKernel:
    """A program's use of an algorithm's rounds for one collective."""

    def __init__(self, context: ProgramContext, placed: PlacedCollective, algorithm: str):
        """Collective."""
        made, machine = placed.made, context.target.machine
        self._context, self._level, self.team = context, made.level, placed.team(context)
        size = self.team.size
        if size == 1:
            return
        extents = dict(context.sizes)
        units, sizes = members(extents, made.level), dict(numbering(machine, extents))
        plan = schedule(made.name, algorithm, shape_of(machine, machine.tensor_level.name, units, sizes))
        every = [tables(plan, root)[self.team.rank] for root in (range(size) if made.name == "broadcast" else (0,))]
        self._tables = lasting(
            lambda: [torch.tensor(table, dtype=torch.int32, device=context.device) for table in every]
        )
        self._rounds, self._slots = every[0][:2]
        self._pieces = size if made.name == "all_to_all" else plan.pieces
        self._bytes = ir.bits(placed.dtype) // 8
        adds_up = made.name in ("allreduce", "reduce_scatter")
        element = combining(placed.dtype, made.reduction) if adds_up else moving_units(placed.dtype)
        kernel = HeaderKernel("play", "rounds", element, size)
        self._functions: dict[bool, Any] = functions(context.device_code(kernel.text), kernel, context.device.index)
        sms = machine.program_units
        self._blocks = sms * kernel.blocks_per_sm
        self._site = placed.site(context)

    def between(self, source: torch.Tensor, target: torch.Tensor, root: int = 0) -> list[StreamWork]:
        """A launch that plays the rounds on contiguous tensors of equal bytes. Collective with a new workspace."""
        if self.team.size == 1 or not target.nbytes:
            return []
        elements, pieces = target.nbytes // self._bytes, self._pieces
        piece = -(-elements // pieces) * self._bytes
        most = max(INBOX_BYTES // self._slots // UNIT_BYTES, 1) * UNIT_BYTES
        chunk = min(piece, most)
        units = -(-chunk // UNIT_BYTES)
        blocks = min(self._blocks, -(-units // THREADS))
        slot = power_of_two(-(-units // blocks) * UNIT_BYTES)
        inbox = Inbox(self._level, self.team.size, self._slots, self._rounds, self._blocks, slot)
        even = elements % pieces == 0 and target.nbytes // pieces % UNIT_BYTES == 0
        aligned = even and source.data_ptr() % UNIT_BYTES == 0 and target.data_ptr() % UNIT_BYTES == 0
        works = []
        for offset in range(0, piece, chunk):
            exchange = exchange_of(self._context, self.team, inbox, self._site)
            exchange.source, exchange.target = source.data_ptr(), target.data_ptr()
            exchange.bytes, exchange.total, exchange.root = chunk, target.nbytes, root
            exchange.table = self._tables[root % len(self._tables)].data_ptr()
            exchange.offset, exchange.pieces = offset, pieces
            works.append(launch(self._functions[aligned], blocks, THREADS, exchange, self._context.device))
        return works


def _in_place(played: RoundsKernel, placed: PlacedCollective) -> BoundCollective:
    def bind(given: Operands) -> list[StreamWork]:
        return dense.in_place(given, lambda x: played.between(x, x, given.root))

    return bind


def _all_gather(played: RoundsKernel, placed: PlacedCollective) -> BoundCollective:
    def exchange(source: torch.Tensor, target: torch.Tensor) -> list[StreamWork]:
        own = target.view(played.team.size, -1)[played.team.rank]
        return [partial(own.copy_, source.view(-1)), *played.between(target, target)]

    return lambda given: dense.along(placed.made.axis, given.source, given.target, exchange)


def _all_to_all(played: RoundsKernel, placed: PlacedCollective) -> BoundCollective:
    def exchange(source: torch.Tensor, target: torch.Tensor) -> list[StreamWork]:
        size, rank = played.team.size, played.team.rank
        keep = partial(target.view(size, -1)[rank].copy_, source.view(size, -1)[rank])
        return [keep, *played.between(source, target)]

    return lambda given: dense.along(placed.made.axis, given.source, given.target, exchange)


def _reduce_scatter(played: RoundsKernel, placed: PlacedCollective) -> BoundCollective:
    """Partial sums lie in a copy of the source, which PyTorch allocates from its pool, also in a CUDA graph."""

    def exchange(source: torch.Tensor, target: torch.Tensor) -> list[StreamWork]:
        played.between(source, source)  # makes the workspace: a launch that is captured cannot

        def add_up() -> None:
            sums = source.clone()
            run(played.between(sums, sums))
            target.view(-1).copy_(sums.view(played.team.size, -1)[played.team.rank])

        return [add_up]

    return lambda given: dense.along(placed.made.axis, given.source, given.target, exchange)


_BOUND = {
    "allreduce": _in_place,
    "broadcast": _in_place,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "reduce_scatter": _reduce_scatter,
}
"""Operation -> a function that plays the rounds on its tensors."""
