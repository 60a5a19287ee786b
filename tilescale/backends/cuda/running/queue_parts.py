# SPDX-License-Identifier: MIT
"""Shared parts of operations on a copy queue: parts of tensors, flags as words, waits before a copy, local copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from tilelang_core.formulas import formula
from tilescale.backends.cuda.running import stream_memory
from tilescale.backends.cuda.running.copy_queue import CopyQueue
from tilescale.backends.cuda.running.phases import TensorRegion
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.queue_watch import QueueWait
from tilescale.backends.cuda.running.steps import ProgramCall, StreamWork
from tilescale.backends.cuda.running.stream_memory import WaitCondition, Word, WordWrite
from tilescale.backends.cuda.running.transports import TensorMessage, Transport
from tilescale.backends.tilelang.lowering.arguments import WaitSite
from tilescale.backends.tilelang.lowering.host_step import HostStep
from tilescale.errors import OutOfBoundsError, UnsupportedError
from tilescale.program.asynchronous import PartLayout
from tilescale.program.operations import Copy


def at_home(queue: CopyQueue, out: torch.Tensor, given: torch.Tensor, step: HostStep) -> list[StreamWork]:
    """A copy within the device, on the main stream."""

    def join() -> None:
        if queue.is_held:
            raise to_itself(step)
        queue.join()

    return [join, partial(out.copy_, given)]


def to_itself(step: HostStep) -> UnsupportedError:
    """The error for a copy of a device to itself that would have to wait."""
    return UnsupportedError(
        "a copy of a device to itself that waits for a flag, or for a copy that does, has no CUDA lowering",
        hint="start it before those with after=, or let programs copy what stays",
        where=step.where,
    )


def wait_before(
    context: ProgramContext, queue: CopyQueue, copy: Copy, step: HostStep
) -> Callable[[ProgramCall], StreamWork] | None:
    """The wait of a copy before its start, on its queue."""
    if copy.after is None:
        return None
    condition, flag = copy.after, TensorRegion(context, copy.after.flag)
    value = formula(condition.value)
    context.queue_waits = True
    flag.stays()
    what = f"T.copy(after={flag.name} {condition.compare})"
    context.sites.append(WaitSite(what, step.where, flag.name, condition.compare, queued=True))
    site = len(context.sites) - 1

    def wait(at: ProgramCall) -> StreamWork:
        tensor, index = flag.tensor(at), flag.index(at)
        awaited = WaitCondition(word_of(tensor, index, step), condition.compare, at.evaluate(value))
        place = QueueWait(site, _flat(index, tensor.shape), awaited)
        return partial(queue.add_batch, parts=[lambda: context.guard.watch.wait(place)])

    return wait


def moved_to(
    context: ProgramContext, device: int, queue: CopyQueue, out: torch.Tensor, given: torch.Tensor
) -> list[StreamWork]:
    """A copy to another device, of tensors of one shape: on the queue; where the two share a GPU by the main stream, or
    through the host's memory, if the queue has to wait for a flag first."""
    parts = stream_memory.rows(out, given)
    if not context.world.on_my_gpu(context.team.ranks[device]):
        return [partial(queue.add, partial(stream_memory.copy, queue.stream, part)) for part in parts]
    memory = queue.host_memory(max((part.width * part.height for part in parts), default=0))

    def run() -> None:
        if not queue.is_held:
            queue.join()
            out.copy_(given)
            queue.start()
            return
        for part in parts:
            for half in stream_memory.by_host(part, memory):
                queue.add(partial(stream_memory.copy, queue.stream, half))

    return [run]


def flag_write(queue: CopyQueue, word: Word, value: int) -> StreamWork:
    """A write of a flag on a queue."""
    return partial(queue.add_batch, parts=[lambda: [WordWrite(word, value)]])


def exchange(
    queue: CopyQueue, by: Transport, sends: Sequence[TensorMessage], receives: Sequence[TensorMessage]
) -> StreamWork:
    """Messages on a queue: operations added after them start when they have arrived."""
    def run() -> None:
        with torch.cuda.stream(queue.stream):
            by.exchange(sends, receives)()

    return run


def part_of(whole: torch.Tensor, parts: PartLayout, rank: int, size: int) -> torch.Tensor:
    """A rank's part of a whole, with a leading 1 if it is a slot."""
    count = 1 if parts.slots else whole.shape[parts.lead] // size
    return whole.narrow(parts.lead, rank * count, count)


def shaped(given: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A view of a tensor in the shape of another that differs by dimensions of one element."""
    return given if given.shape == out.shape else given.view(out.shape)


def word_of(flags: torch.Tensor, index: Sequence[int], step: HostStep) -> Word:
    """A flag. Raises OutOfBoundsError."""
    if not all(0 <= i < n for i, n in zip(index, flags.shape, strict=True)):
        raise OutOfBoundsError(
            f"an asynchronous operation signals or waits for element {tuple(index)} of flags {tuple(flags.shape)}",
            hint="correct the index of the flag",
            where=step.where,
        )
    return Word.of(flags, index)


def _flat(index: Sequence[int], shape: Sequence[int]) -> int:
    number = 0
    for i, n in zip(index, shape, strict=True):
        number = number * n + i
    return number
