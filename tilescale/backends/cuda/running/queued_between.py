# SPDX-License-Identifier: MIT
"""Asynchronous copies whose data may go to other nodes: by the copy queues of both ends.

A message has two ends, so every device reaches the same place of the program. NCCL sends it, by kernels for which the
device's other work leaves a few SMs; the receiver's queue then raises the flag. Copies and flags to a device that
shares memory are written by the sender's queue alone.
"""

from __future__ import annotations

from functools import partial

import torch

from tilescale.backends.cuda.running.copy_queue import copy_queue
from tilescale.backends.cuda.running.messages import DeviceMessages, DeviceTransfer
from tilescale.backends.cuda.running.phases import runs
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.queue_parts import at_home, moved, shaped, to_itself, told, wait_before, word_of
from tilescale.backends.cuda.running.steps import CallStep, ProgramCall, StreamWork
from tilescale.backends.tilelang.lowering.host_step import QUEUE_BETWEEN
from tilescale.backends.tilelang.lowering.messages import MessageStep
from tilescale.program import ops


class QueuedMessages(DeviceMessages):
    """An asynchronous copy of a program."""

    def __init__(self, context: ProgramContext, step: MessageStep):
        """Collective."""
        super().__init__(context, step)
        assert self.copy is not None and self.flag is not None, "the planner has found it to be one"
        self._queue = context.queue = copy_queue(context.device)
        self._transport = context.queue_transport
        self._after = wait_before(context, self._queue, self.copy, step)
        self.flag.reached()

    def bind(self, call: ProgramCall) -> list[StreamWork]:
        """The launches of this device in a call."""
        me = self.context.team.rank
        mine = [t for t in self._transfers(call) if me in (t.sender, t.receiver)]
        sent = [t for t in mine if t.sender == me]
        if not mine:
            return []
        done: list[StreamWork] = [t for own in sent if own.receiver == me for t in self._kept(own)]
        if self._after is not None:
            done.append(self._queue.hold)  # on receivers, too: the queue waits for the senders
        done.append(self._queue.start)
        if self._after is not None and sent:
            done.append(partial(self._queue.add, self._after(sent[0].at)))
        far = [t for t in mine if not self._is_near(t)]
        done += [work for t in sent if self._is_near(t) and t.receiver != me for work in self._copied(t)]
        if far:
            done.append(partial(self._queue.add, partial(self._carried, far)))
        raised = [t for t in mine if (t.sender if self._is_near(t) else t.receiver) == me]
        return [*done, *(self._told(t, call) for t in raised)]

    def _kept(self, t: DeviceTransfer) -> list[StreamWork]:
        assert self.source is not None and self.target is not None
        if self._after is not None:
            raise to_itself(self.step)
        out = self.target.local(t.at)
        return at_home(self._queue, out, shaped(self.source.local(t.at), out), self.step)

    def _copied(self, t: DeviceTransfer) -> list[StreamWork]:
        assert self.source is not None and self.target is not None
        out = self.target.on(t.receiver, t.at)
        return moved(self._queue, out, shaped(self.source.local(t.at), out))

    def _carried(self, far: list[DeviceTransfer]) -> None:
        """Messages on the queue, which continues when those for this device have arrived."""
        with torch.cuda.stream(self._queue.stream):
            self.exchange(far, self._transport)

    def _told(self, t: DeviceTransfer, call: ProgramCall) -> StreamWork:
        assert self.flag is not None and self.op is not None
        flags = self.flag.tensor_on(t.receiver, t.at)
        word = word_of(flags, self.flag.index(t.at), self.step)
        value = self.context.sums.after(call, word, t.at.evaluate(self.value), self.op)
        return told(self._queue, word, value)


@runs(ops.COPY.name, QUEUE_BETWEEN)
def _copy(context: ProgramContext, step: MessageStep) -> CallStep:
    return QueuedMessages(context, step).bind
