# SPDX-License-Identifier: MIT
"""Asynchronous operations on a device's copy queue: copies to peers, each followed by a write of its flag.

A copy of the device to itself is made by a kernel. So the main stream executes it, before later grids, which may hold
all SMs and wait. To keep start order, the main stream waits for the queue first, which costs nothing for the first
operation. The same holds for devices that share a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tilescale.backends.cuda.lowering.host_step import JOIN, QUEUE, HostStep
from tilescale.backends.cuda.running.copy_queue import copy_queue
from tilescale.backends.cuda.running.phases import Part, device_of, runs
from tilescale.backends.cuda.running.queue_parts import at_home, moved_to, shaped, to_itself, told, wait_before, word_of
from tilescale.backends.cuda.running.steps import Call, Step, Work
from tilescale.program import ops
from tilescale.program.operations import Copy

if TYPE_CHECKING:
    from tilescale.backends.cuda.running.program_context import Owner


@runs(None, JOIN)
def _join(own: Owner, step: HostStep) -> Step:
    queue = own.queue = copy_queue(own.device)
    return lambda at: [queue.join]


@runs(ops.COPY.name, QUEUE)
def _copy(own: Owner, step: HostStep) -> Step:
    copy = Copy.of(step.call)
    op = copy.op
    assert op is not None  # without a flag it would not be on the queue
    queue = own.queue = copy_queue(own.device)
    source, target, flag = Part(own, copy.source), Part(own, copy.target), Part(own, copy.signal)
    after = wait_before(own, queue, copy, step)
    for part in (target, flag):
        part.reached()

    def bind(at: Call) -> list[Work]:
        device = device_of(own, copy.level, at.evaluate(copy.peer))
        out = target.on(device, at)
        given = shaped(source.local(at), out)
        word = word_of(flag.tensor_on(device, at), flag.index(at), step)
        value = own.sums.after(at, word, at.evaluate(copy.value), op)
        raised = told(queue, word, value)
        if device == own.team.rank:
            if after is not None:
                raise to_itself(step)
            return [*at_home(queue, out, given, step), queue.start, raised]
        waits = [queue.hold, queue.start, partial(queue.add, after(at))] if after is not None else [queue.start]
        return [*waits, *moved_to(own, device, queue, out, given), raised]

    return bind
