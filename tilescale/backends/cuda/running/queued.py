# SPDX-License-Identifier: MIT
"""Asynchronous operations on a device's copy queue: copies to peers, each followed by a write of its flag.

What a copy to the device itself moves is copied by a kernel, so the main stream does it, before what follows; as it is
not to overtake what was started before, the main stream waits for the queue first. So such a copy costs nothing where
it is the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from tilescale.backends.cuda.lowering.arguments import Site
from tilescale.backends.cuda.lowering.host_step import HostStep
from tilescale.backends.cuda.lowering.plan import JOIN, QUEUE
from tilescale.backends.cuda.running import stream_memory
from tilescale.backends.cuda.running.copy_queue import CopyQueue, copy_queue
from tilescale.backends.cuda.running.phases import Part, device_of, runs
from tilescale.backends.cuda.running.queue_watch import Place
from tilescale.backends.cuda.running.steps import Call, Step, Work
from tilescale.backends.cuda.running.stream_memory import Condition, Word
from tilescale.errors import OutOfBoundsError, UnsupportedError
from tilescale.program import ops
from tilescale.program.asynchronous import Parts
from tilescale.program.operations import Collective, Copy

if TYPE_CHECKING:
    import torch

    from tilescale.backends.cuda.running.owner import Owner


@runs(None, JOIN)
def _join(own: Owner, step: HostStep) -> Step:
    queue = own.queue = copy_queue(own.device)
    return lambda at: [queue.join]


@runs(ops.COPY.name, QUEUE)
def _copy(own: Owner, step: HostStep) -> Step:
    copy = Copy.of(step.call)
    op = copy.op
    assert op is not None  # it has a flag, else it would not be on the queue
    queue = own.queue = copy_queue(own.device)
    source, target, flag = Part(own, copy.source), Part(own, copy.target), Part(own, copy.signal)
    after = _after(own, queue, copy, step)
    for part in (target, flag):
        part.reached()

    def bind(at: Call) -> list[Work]:
        device = device_of(own, copy.level, at.evaluate(copy.peer))
        out = target.on(device, at)
        given = _shaped(source.local(at), out)
        word = _word(flag.tensor_on(device, at), flag.index(at), step)
        value = own.sums.after(at, word, at.evaluate(copy.value), op)
        told = partial(stream_memory.write, queue.stream, word, value)
        if device == own.team.rank:
            if after is not None:
                raise _to_itself(step)
            return [*_at_home(queue, out, given, step), queue.start, partial(queue.add, told)]
        waits = [queue.hold, queue.start, partial(queue.add, after(at))] if after is not None else [queue.start]
        moves = [partial(stream_memory.copy, queue.stream, rows) for rows in stream_memory.rows(out, given)]
        return [*waits, *(partial(queue.add, launch) for launch in (*moves, told))]

    return bind


def _at_home(queue: CopyQueue, out: torch.Tensor, given: torch.Tensor, step: HostStep) -> list[Work]:
    """A copy of the device to itself, by the main stream."""

    def join() -> None:
        if queue.is_held:
            raise _to_itself(step)
        queue.join()

    return [join, partial(out.copy_, given)]


def _to_itself(step: HostStep) -> UnsupportedError:
    return UnsupportedError(
        "a copy of a device to itself that waits for a flag, or for a copy that does, has no CUDA lowering",
        hint="start it before those with after=, or let programs copy what stays",
        where=step.where,
    )


def _after(own: Owner, queue: CopyQueue, copy: Copy, step: HostStep) -> Callable[[Call], Work] | None:
    """The wait of a copy before it starts."""
    if copy.after is None:
        return None
    condition, flag = copy.after, Part(own, copy.after.flag)
    own.queue_waits = True
    what = f"T.copy(after={flag.name} {condition.compare})"
    own.sites.append(Site(what, step.where, flag.name, condition.compare, queued=True))
    site = len(own.sites) - 1

    def wait(at: Call) -> Work:
        tensor, index = flag.tensor(at), flag.index(at)
        awaited = Condition(_word(tensor, index, step), condition.compare, at.evaluate(condition.value))
        place = Place(site, _flat(index, tensor.shape), awaited)
        return lambda: own.guard.watch.add(queue.stream, place)

    return wait


@runs(ops.ALL_GATHER.name, QUEUE)
@runs(ops.ALL_TO_ALL.name, QUEUE)
def _exchange(own: Owner, step: HostStep) -> Step:
    """Every device writes into all others, chunk by chunk, beginning with the next one: its part, or theirs."""
    made = Collective.of(step.call)
    queue = own.queue = copy_queue(own.device)
    source, target, flags = Part(own, made.source), Part(own, made.target), Part(own, made.flags)
    size, rank = dict(own.sizes)[made.level], own.rank(made.level)
    parts = Parts.moved(made)
    for part in (target, flags):
        part.reached()

    def bind(at: Call) -> list[Work]:
        tensor = source.local(at)

        def given(peer: int) -> torch.Tensor:
            return tensor if made.name == "all_gather" else _part(tensor, parts, peer, size)

        def own_part(device: int) -> torch.Tensor:
            return _shaped(_part(target.on(device, at), parts, rank, size), given(rank))

        def signal(device: int, number: int) -> Work:
            word = _word(flags.tensor_on(device, at), [rank, number], step)
            value = own.sums.after(at, word, 1, "add")
            return partial(queue.add, partial(stream_memory.write, queue.stream, word, value))

        mine, rows = own_part(own.team.rank), given(rank)
        count = rows.shape[parts.rows]
        chunk = made.chunk or count
        is_there = mine.data_ptr() == rows.data_ptr()
        done: list[Work] = [] if is_there else _at_home(queue, mine, rows, step)
        numbers = range(-(-count // chunk))
        done += [queue.start, *(signal(own.team.rank, number) for number in numbers)]
        for peer in range(rank + 1, rank + size):
            device = device_of(own, made.level, peer % size)
            out, rows = own_part(device), given(peer % size)
            for number in numbers:
                begin = number * chunk
                pair = (x.narrow(parts.rows, begin, min(chunk, count - begin)) for x in (out, rows))
                done += [
                    partial(queue.add, partial(stream_memory.copy, queue.stream, r)) for r in stream_memory.rows(*pair)
                ]
                done.append(signal(device, number))
        return done

    return bind


def _part(whole: torch.Tensor, parts: Parts, rank: int, size: int) -> torch.Tensor:
    """A rank's part of a whole, with a leading 1 if it is a slot."""
    count = 1 if parts.slots else whole.shape[0] // size
    return whole.narrow(0, rank * count, count)


def _shaped(given: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """A view of a tensor in the shape of another that differs by dimensions of one element."""
    return given if given.shape == out.shape else given.view(out.shape)


def _word(flags: torch.Tensor, index: Sequence[int], step: HostStep) -> Word:
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
