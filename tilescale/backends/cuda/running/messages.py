# SPDX-License-Identifier: MIT
"""Copies and signals between devices that do not all share memory, on this device's stream.

Every device reaches the same place of the program and evaluates the transfers of all others, with their ranks. Its own
sends and receives go to the transport in one batch; copies to devices that share memory are local. A flag is raised by
the device that owns it, when the data it announces has arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilelang_core import ir
from tilescale.backends.cuda.running.phases import TensorRegion, runs
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import CallStep, ProgramCall, StreamWork
from tilescale.backends.cuda.running.transports import TensorMessage, Transport
from tilescale.backends.tilelang.lowering.messages import MessageStep
from tilescale.backends.tilelang.lowering.reach import BY_MESSAGES
from tilescale.errors import OutOfBoundsError
from tilescale.program import ops
from tilescale.program.mesh import Mesh
from tilescale.program.operations import Copy, Signal


@dataclass(frozen=True)
class DeviceTransfer:
    """A transfer of one device: a copy, a signal, or a copy with a signal.

    Attributes:
        sender, receiver: devices, by number.
        by_sender: whether the sender executes it (a put, a signal), else the receiver (a get).
        at: the call with the ranks of the executing device.
    """

    sender: int
    receiver: int
    by_sender: bool
    at: ProgramCall


class DeviceMessages:
    """A copy or signal of a program."""

    def __init__(self, context: ProgramContext, step: MessageStep, transport: Transport):
        """Collective."""
        self.context, self.step, self.transport = context, step, transport
        self.copy = Copy.of(step.call) if ir.op_name(step.call) == ops.COPY.name else None
        signal = None if self.copy is not None else Signal.of(step.call)
        made = self.copy or signal
        assert made is not None and made.level is not None, "the planner has found it to be one"
        self.level, self.peer = made.level, made.peer
        self.source = TensorRegion(context, self.copy.source) if self.copy is not None else None
        self.target = TensorRegion(context, self.copy.target) if self.copy is not None else None
        flag = self.copy.signal if self.copy is not None else signal.flag if signal is not None else None
        self.flag = TensorRegion(context, flag) if flag is not None else None
        self.value, self.op = (made.value, made.op) if self.flag is not None else (None, None)
        self.by_sender = self.copy is None or self.copy.to_peer
        if self.copy is not None and context.peer_group.size > 1:
            (self.target if self.by_sender else self.source).reached()  # type: ignore[union-attr]

    def bind(self, call: ProgramCall) -> list[StreamWork]:
        """The launches of this device in a call."""
        mine = [t for t in self.transfers(call) if self.context.team.rank in (t.sender, t.receiver)]
        if not mine:
            return []
        copies = [work for t in mine for work in self._by_memory(t)]
        return [*copies, lambda: self._exchange(mine)]

    def transfers(self, call: ProgramCall) -> Iterator[DeviceTransfer]:
        mesh = Mesh(self.context.sizes)
        for me in range(mesh.size):
            by_level = mesh.ranks(me)
            known = {**call.variables, **{var: by_level[level] for var, level in self.step.ranks}}
            at = ProgramCall(call.values, known, call.asked)
            if all(bool(at.evaluate(expr)) == value for expr, value in self.step.under):
                peer = mesh.sibling(me, self.level, at.evaluate(self.peer))
                yield DeviceTransfer(*((me, peer) if self.by_sender else (peer, me)), self.by_sender, at)

    def is_near(self, transfer: DeviceTransfer) -> bool:
        """Whether both ends share memory, according to the machine model."""
        near = self.context.target.group_size
        return transfer.sender // near == transfer.receiver // near

    def _by_memory(self, t: DeviceTransfer) -> list[StreamWork]:
        """A copy between devices that share memory, by the executing device."""
        if self.source is None or self.target is None or not self.is_near(t):
            return []
        if self.context.team.rank != (t.sender if t.by_sender else t.receiver):
            return []
        source = self.source.local(t.at) if t.by_sender else self.source.on(t.sender, t.at)
        target = self.target.on(t.receiver, t.at) if t.by_sender else self.target.local(t.at)
        return [lambda: target.copy_(source.reshape(target.shape))]

    def _exchange(self, transfers: list[DeviceTransfer]) -> None:
        """Send and receive, and raise the flags of received data."""
        self.exchange(transfers)
        for t in transfers:
            if t.receiver == self.context.team.rank:
                self._raise_flag(t)

    def exchange(self, transfers: list[DeviceTransfer]) -> None:
        """Send and receive, on the current stream."""
        me = self.context.team.rank
        sends: list[TensorMessage] = []
        receives: list[tuple[DeviceTransfer, TensorMessage]] = []
        for t in transfers:
            if t.sender == t.receiver or (self.is_near(t) and self.flag is None):
                continue
            if t.sender == me:
                sends.append(TensorMessage(self._sent(t), t.receiver))
            else:
                receives.append((t, TensorMessage(self._room(t), t.sender)))
        self.transport.exchange(sends, [message for _, message in receives])()
        for t, message in receives:
            self._store(t, message.tensor)

    def _sent(self, t: DeviceTransfer) -> torch.Tensor:
        """The elements of a message; a dummy element for a pure signal."""
        if self.source is None or self.is_near(t):
            return self._token()
        return self.source.local(t.at).contiguous()

    def _room(self, t: DeviceTransfer) -> torch.Tensor:
        """The buffer in which a message arrives: the target itself, where it is dense and of the same type."""
        if self.source is None or self.target is None or self.is_near(t):
            return self._token()
        target, dtype = self.target.local(t.at), self.source.tensor(t.at).dtype
        same = target.is_contiguous() and target.dtype == dtype
        return target if same else target.new_empty(target.shape, dtype=dtype)

    def _token(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device=self.context.device)

    def _store(self, t: DeviceTransfer, arrived: torch.Tensor) -> None:
        if self.target is None or self.is_near(t):
            return
        target = self.target.local(t.at)
        if target.data_ptr() != arrived.data_ptr():
            target.copy_(arrived)

    def _raise_flag(self, t: DeviceTransfer) -> None:
        """Raise the flag of this device that a transfer names. Raises OutOfBoundsError."""
        if self.flag is None:
            return
        flags, index = self.flag.tensor(t.at), tuple(self.flag.index(t.at))
        if not all(0 <= i < n for i, n in zip(index, flags.shape, strict=True)):
            raise OutOfBoundsError(
                f"a signal to element {index} of flags {self.flag.name!r} {tuple(flags.shape)}",
                hint="correct the index of the flag",
                where=self.step.where,
            )
        value = t.at.evaluate(self.value)
        flags[index].fill_(value) if self.op == "set" else flags[index].add_(value)


@runs(ops.COPY.name, BY_MESSAGES)
@runs(ops.SIGNAL.name, BY_MESSAGES)
def _messages(context: ProgramContext, step: MessageStep) -> CallStep:
    return DeviceMessages(context, step, context.transport).bind
