# SPDX-License-Identifier: MIT
"""All-gathers and all-to-alls on copy queues, chunk by chunk: into the memory of peers, and by messages to other nodes.

Between nodes each part of a gather is sent once, along the rail of its sender (devices of one position in all nodes),
and the receiver copies it to the others of its node. The parts of an all-to-all are sent directly to their receivers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tilescale.backends.cuda.running.copy_queue import copy_queue
from tilescale.backends.cuda.running.phases import TensorRegion, device_of, runs
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.queue_parts import (
    at_home,
    exchange,
    flag_write,
    moved_to,
    part_of,
    shaped,
    word_of,
)
from tilescale.backends.cuda.running.steps import CallStep, ProgramCall, StreamWork
from tilescale.backends.cuda.running.transports import TensorMessage
from tilescale.backends.tilelang.lowering.host_step import QUEUE, HostStep
from tilescale.backends.tilelang.lowering.reach import reached
from tilescale.errors import UnsupportedError
from tilescale.program import ops
from tilescale.program.asynchronous import PartLayout, flag_of
from tilescale.program.operations import Collective


class QueuedExchange:
    """An asynchronous all-gather or all-to-all of a program."""

    def __init__(self, context: ProgramContext, step: HostStep):
        """Collective."""
        made = self._made = Collective.of(step.call)
        self._context, self._step = context, step
        self._queue = context.queue = copy_queue(context.device)
        self._source, self._target, self._flags = (
            TensorRegion(context, tile) for tile in (made.source, made.target, made.flags)
        )
        self._size, self._rank = dict(context.sizes)[made.level], context.rank(made.level)
        self._near = reached(context.target, made.level)
        self._parts = PartLayout.moved(made)
        self._transport = context.queue_transport if self._near < self._size else None
        for part in (self._target, self._flags):
            part.reached()

    def bind(self, at: ProgramCall) -> list[StreamWork]:
        """The launches of this device in a call: its own part, its peers from the next one on, other nodes."""
        mine, rows = self._part(self._rank, self._rank, at), self._given(self._rank, at)
        is_there = mine.data_ptr() == rows.data_ptr()
        done: list[StreamWork] = [] if is_there else at_home(self._queue, mine, rows, self._step)
        chunks = list(self._chunks(rows.shape[self._parts.rows]))
        done += [self._queue.start, *(self._flag_write(self._rank, self._rank, n, at) for n, _, _ in chunks)]
        for peer in self._peers():
            for chunk in chunks:
                done += self._copied(peer, self._rank, self._given(peer, at), chunk, at)
        for chunk in chunks if self._transport is not None else ():
            done += self._between_nodes(chunk, at)
        return done

    def _chunks(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Number, first row and rows of each chunk of a part."""
        chunk = self._made.chunk or count
        for number in range(-(-count // chunk)):
            yield number, number * chunk, min(chunk, count - number * chunk)

    def _peers(self) -> list[int]:
        """The other devices that share memory with this one, from the next one on."""
        begin, place = self._rank // self._near * self._near, self._rank % self._near
        return [begin + (place + k) % self._near for k in range(1, self._near)]

    def _others(self) -> list[int]:
        """Receivers and senders of messages: ranks on other nodes; for a gather, this one's rail."""
        peers = [(self._rank + k) % self._size for k in range(1, self._size)]
        apart = [r for r in peers if r // self._near != self._rank // self._near]
        gathers = self._made.name == "all_gather"
        return [r for r in apart if not gathers or r % self._near == self._rank % self._near]

    def _given(self, peer: int, at: ProgramCall) -> torch.Tensor:
        """A peer's part of this device's data."""
        tensor = self._source.local(at)
        return tensor if self._made.name == "all_gather" else part_of(tensor, self._parts, peer, self._size)

    def _part(self, on: int, sender: int, at: ProgramCall) -> torch.Tensor:
        """A sender's part on a rank that shares memory."""
        whole = self._target.on(device_of(self._context, self._made.level, on), at)
        return shaped(part_of(whole, self._parts, sender, self._size), self._given(self._rank, at))

    def _rows(self, part: torch.Tensor, chunk: tuple[int, int, int]) -> torch.Tensor:
        _, begin, count = chunk
        return part.narrow(self._parts.rows, begin, count)

    def _copied(
        self, on: int, sender: int, given: torch.Tensor, chunk: tuple[int, int, int], at: ProgramCall
    ) -> list[StreamWork]:
        """A chunk of a sender's part into the memory of a rank, and its flag there."""
        device = device_of(self._context, self._made.level, on)
        pair = self._rows(self._part(on, sender, at), chunk), self._rows(given, chunk)
        return [*moved_to(self._context, device, self._queue, *pair), self._flag_write(on, sender, chunk[0], at)]

    def _flag_write(self, on: int, sender: int, number: int, at: ProgramCall) -> StreamWork:
        """The flag of a chunk on a rank."""
        flags = self._flags.tensor_on(device_of(self._context, self._made.level, on), at)
        word = word_of(flags, flag_of(self._flags.index(at), sender, number), self._step)
        return flag_write(self._queue, word, self._context.sums.after(at, word, 1, "add"))

    def _between_nodes(self, chunk: tuple[int, int, int], at: ProgramCall) -> list[StreamWork]:
        """A chunk to other nodes, and their chunks to this one; each is signalled, and of a gather forwarded, when all
        have arrived."""
        assert self._transport is not None
        others = self._others()
        sends = [self._message(self._given(r, at), r, chunk) for r in others]
        receives = [self._message(self._part(self._rank, r, at), r, chunk) for r in others]
        done: list[StreamWork] = [partial(self._queue.add, exchange(self._queue, self._transport, sends, receives))]
        for sender in others:
            done.append(self._flag_write(self._rank, sender, chunk[0], at))
            if self._made.name == "all_gather":
                here = self._part(self._rank, sender, at)
                for peer in self._peers():
                    done += self._copied(peer, sender, here, chunk, at)
        return done

    def _message(self, part: torch.Tensor, rank: int, chunk: tuple[int, int, int]) -> TensorMessage:
        rows = self._rows(part, chunk)
        if not rows.is_contiguous():
            raise UnsupportedError(
                f"T.{self._made.name}(signal=) between nodes, of rows that are parts of wider ones",
                hint="give it tensors whose rows it moves as a whole",
                where=self._step.where,
            )
        return TensorMessage(rows, device_of(self._context, self._made.level, rank))


@runs(ops.ALL_GATHER.name, QUEUE)
@runs(ops.ALL_TO_ALL.name, QUEUE)
def _exchange(context: ProgramContext, step: HostStep) -> CallStep:
    return QueuedExchange(context, step).bind
