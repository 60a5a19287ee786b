# SPDX-License-Identifier: MIT
"""Transports of tensors between devices that do not share memory: an interface, and its implementation by NCCL.

A message has two ends: sender and receiver both put it on their streams, at the same place of the program. The host
starts it, and it is asynchronous until a stream waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist

from tilescale.backends.cuda.running import nccl
from tilescale.backends.cuda.running.program_context import ProgramContext
from tilescale.backends.cuda.running.steps import StreamWork
from tilescale.comm.heap.lasting import lasting
from tilescale.errors import LaunchError


@dataclass(frozen=True)
class TensorMessage:
    """A contiguous tensor on this device, sent to or received from a device, given by its number."""

    tensor: torch.Tensor
    device: int


TransportWait = Callable[[], object]
"""Lets the current stream wait for started messages."""


class Transport(Protocol):
    """Transport between groups of devices that share memory. A device's *rail* has one device of each group."""

    def exchange(self, sends: Sequence[TensorMessage], receives: Sequence[TensorMessage]) -> TransportWait:
        """Start messages, after the current stream's work. Both devices of a pair list theirs in the same order."""

    def barrier(self) -> None:
        """Let the current stream wait until those of all devices of the rail have arrived here."""


QUEUE_SMS = 4
"""SMs that NCCL's kernels of a copy queue may use: other work of the device leaves them free."""


class NcclTransport:
    """NCCL, through torch.distributed."""

    def __init__(self, context: ProgramContext, group: int, sms: int | None):
        """Collective. `group` devices of consecutive numbers share memory; kernels use at most `sms` SMs."""
        devices = context.team.size
        self._context, self._ranks = context, context.team.ranks
        self._all = nccl.group_of(context, (tuple(range(devices)),), sms)
        rails = tuple(tuple(range(place, devices, group)) for place in range(group))
        self._rail = nccl.group_of(context, rails, sms)
        for made in (self._all, self._rail):
            self._connect(made)

    @cached_property
    def _token(self) -> torch.Tensor:
        return lasting(lambda: torch.zeros(1, dtype=torch.int32, device=self._context.device))

    def _connect(self, group: Any) -> None:
        """Connect the group here, where all devices are: PyTorch connects a group in its first call, which may be
        messages of a few."""
        dist.all_reduce(self._token, group=group)

    def exchange(self, sends: Sequence[TensorMessage], receives: Sequence[TensorMessage]) -> TransportWait:
        """See `Transport.exchange`: one batch of sends and receives."""
        all_of = [*((dist.isend, m) for m in sends), *((dist.irecv, m) for m in receives)]
        filled = [(start, nccl.moved(m.tensor), self._ranks[m.device]) for start, m in all_of if m.tensor.numel()]
        made = [dist.P2POp(start, tensor, rank, self._all) for start, tensor, rank in filled]
        started = dist.batch_isend_irecv(made) if made else []
        return lambda: [work.wait() for work in started]

    def barrier(self) -> None:
        """See `Transport.barrier`: by an all-reduce of one number."""
        dist.all_reduce(self._token, dist.ReduceOp.MAX, group=self._rail)


def of(context: ProgramContext, group: int, *, for_queue: bool = False) -> Transport:
    """The transport between groups of `group` devices that share memory; `for_queue` limits it to few SMs, with its own
    order of operations, for use concurrent with the device's other work. Collective. Raises LaunchError: NCCL does not
    join these ranks."""
    if not context.target.nccl:
        raise LaunchError(
            f"{context.program.name!r} runs on several nodes, and NCCL, which joins them, takes neither two ranks on "
            "one GPU nor a part of a job whose ranks have not all joined it",
            hint="give each rank a GPU; before a part of the job runs it, call "
            'torch.distributed.init_process_group("nccl") on all ranks, without device_id',
            where=context.program.launches[0].where,
        )
    return NcclTransport(context, group, QUEUE_SMS if for_queue else None)


def after(first: StreamWork, then: StreamWork) -> StreamWork:
    """One after the other."""

    def both() -> Any:
        first()
        then()

    return both
