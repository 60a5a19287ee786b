# SPDX-License-Identifier: MIT
"""Asynchronous copies on devices' copy queues, each followed by a write of its flag.

A copy and the flag to a device that shares memory are written by the sender's queue alone. A copy of the device to
itself is made by a kernel. So the main stream executes it, before later grids, which may hold all SMs and wait. To keep
start order, the main stream waits for the queue first, which costs nothing for the first operation. The same holds for
devices that share a GPU.

A message to another node has two ends, so every device reaches the same place of the program. NCCL sends it, by kernels
for which the device's other work leaves a few SMs; the receiver's queue then raises the flag.
"""

from __future__ import annotations

from functools import partial

import torch

from tilelang_core.formulas import formula
from tilescale.backends.cuda.running.copy_queue import copy_queue
from tilescale.backends.cuda.running.messages import DeviceMessages, DeviceTransfer
from tilescale.backends.cuda.running.phases import TensorRegion, device_of, runs
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.queue_parts import (
    at_home,
    flag_write,
    moved_to,
    shaped,
    to_itself,
    wait_before,
    word_of,
)
from tilescale.backends.cuda.running.steps import CallStep, ProgramCall, StreamWork
from tilescale.backends.tilelang.lowering.host_step import JOIN, QUEUE, QUEUE_BETWEEN, HostStep
from tilescale.backends.tilelang.lowering.messages import MessageStep
from tilescale.program import ops
from tilescale.program.operations import Copy


class QueuedCopy:
    """An asynchronous copy of a program, from each device to another one or to itself."""

    def __init__(self, context: ProgramContext, step: HostStep):
        """Collective."""
        copy = self._copy = Copy.of(step.call)
        assert copy.signal is not None, "without a flag it would not be on the queue"
        self._peer, self._value = formula(copy.peer), formula(copy.value)
        self._context, self._step, self._me = context, step, context.team.rank
        self._queue = context.queue = copy_queue(context.device)
        self._source, self._target = TensorRegion(context, copy.source), TensorRegion(context, copy.target)
        self._flag = TensorRegion(context, copy.signal)
        # Those to other nodes; None where all devices share memory.
        self._messages: DeviceMessages | None = None
        if isinstance(step, MessageStep):
            self._messages = DeviceMessages(context, step, context.queue_transport)
        else:
            self._target.reached()
        self._after = wait_before(context, self._queue, copy, step)
        self._flag.reached()

    def bind(self, call: ProgramCall) -> list[StreamWork]:
        """The launches of this device in a call."""
        transfers = self._transfers(call)
        if not transfers:
            return []
        sent = [t for t in transfers if t.sender == self._me]
        near, far = [t for t in sent if self._is_near(t)], [t for t in transfers if not self._is_near(t)]
        done: list[StreamWork] = [work for t in near if t.receiver == self._me for work in self._kept(t)]
        if self._after is not None:
            done.append(self._queue.hold)  # on receivers, too: the queue waits for the senders
        done.append(self._queue.start)
        if self._after is not None and sent:
            done.append(self._after(sent[0].at))
        done += [work for t in near if t.receiver != self._me for work in self._copied(t)]
        if far:
            done.append(partial(self._queue.add, partial(self._exchanged, far)))
        raised = [t for t in transfers if (t.sender if self._is_near(t) else t.receiver) == self._me]
        return [*done, *(self._flag_write(t, call) for t in raised)]

    def _transfers(self, call: ProgramCall) -> list[DeviceTransfer]:
        """The transfers in which this device takes part."""
        if self._messages is not None:
            return [t for t in self._messages.transfers(call) if self._me in (t.sender, t.receiver)]
        receiver = device_of(self._context, self._copy.level, call.evaluate(self._peer))
        return [DeviceTransfer(self._me, receiver, True, call)]

    def _is_near(self, t: DeviceTransfer) -> bool:
        return self._messages is None or self._messages.is_near(t)

    def _kept(self, t: DeviceTransfer) -> list[StreamWork]:
        """A copy of the device to itself."""
        if self._after is not None:
            raise to_itself(self._step)
        out = self._target.local(t.at)
        return at_home(self._queue, out, shaped(self._source.local(t.at), out), self._step)

    def _copied(self, t: DeviceTransfer) -> list[StreamWork]:
        """A copy to a device that shares memory."""
        out = self._target.on(t.receiver, t.at)
        return moved_to(self._context, t.receiver, self._queue, out, shaped(self._source.local(t.at), out))

    def _exchanged(self, far: list[DeviceTransfer]) -> None:
        """Messages on the queue, which continues when those for this device have arrived."""
        assert self._messages is not None
        with torch.cuda.stream(self._queue.stream):
            self._messages.exchange(far)

    def _flag_write(self, t: DeviceTransfer, call: ProgramCall) -> StreamWork:
        flags = self._flag.tensor_on(t.receiver, t.at)
        word = word_of(flags, self._flag.index(t.at), self._step)
        value = self._context.sums.after(call, word, t.at.evaluate(self._value), self._copy.update)
        return flag_write(self._queue, word, value)


@runs(None, JOIN)
def _join(context: ProgramContext, step: HostStep) -> CallStep:
    queue = context.queue = copy_queue(context.device)
    return lambda at: [queue.join]


@runs(ops.COPY.name, QUEUE)
@runs(ops.COPY.name, QUEUE_BETWEEN)
def _queued_copy(context: ProgramContext, step: HostStep) -> CallStep:
    return QueuedCopy(context, step).bind
