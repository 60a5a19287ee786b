# SPDX-License-Identifier: MIT
"""Asynchronous operations on a device's copy queue: copies to peers, each followed by a write of its flag.

A copy of the device to itself is made by a kernel. So the main stream executes it, before later grids, which may hold
all SMs and wait. To keep start order, the main stream waits for the queue first, which costs nothing for the first
operation. The same holds for devices that share a GPU.
"""

from __future__ import annotations

from functools import partial

from tilescale.backends.cuda.running.copy_queue import copy_queue
from tilescale.backends.cuda.running.phases import TensorRegion, device_of, runs
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.queue_parts import at_home, moved_to, shaped, to_itself, told, wait_before, word_of
from tilescale.backends.cuda.running.steps import CallStep, ProgramCall, StreamWork
from tilescale.backends.tilelang.lowering.host_step import JOIN, QUEUE, HostStep
from tilescale.program import ops
from tilescale.program.operations import Copy


@runs(None, JOIN)
def _join(context: ProgramContext, step: HostStep) -> CallStep:
    queue = context.queue = copy_queue(context.device)
    return lambda at: [queue.join]


@runs(ops.COPY.name, QUEUE)
def _copy(context: ProgramContext, step: HostStep) -> CallStep:
    copy = Copy.of(step.call)
    op = copy.op
    assert op is not None  # without a flag it would not be on the queue
    queue = context.queue = copy_queue(context.device)
    source, target, flag = (
        TensorRegion(context, copy.source),
        TensorRegion(context, copy.target),
        TensorRegion(context, copy.signal),
    )
    after = wait_before(context, queue, copy, step)
    for part in (target, flag):
        part.reached()

    def bind(at: ProgramCall) -> list[StreamWork]:
        device = device_of(context, copy.level, at.evaluate(copy.peer))
        out = target.on(device, at)
        given = shaped(source.local(at), out)
        word = word_of(flag.tensor_on(device, at), flag.index(at), step)
        value = context.sums.after(at, word, at.evaluate(copy.value), op)
        raised = told(queue, word, value)
        if device == context.team.rank:
            if after is not None:
                raise to_itself(step)
            return [*at_home(queue, out, given, step), queue.start, raised]
        waits = [queue.hold, queue.start, partial(queue.add, after(at))] if after is not None else [queue.start]
        return [*waits, *moved_to(context, device, queue, out, given), raised]

    return bind
