# SPDX-License-Identifier: MIT
"""Protection of a program's callers from hangs: barriers of all ranks, bounded waits, errors, and reset."""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from tilescale.backends.cuda.running import nccl
from tilescale.backends.cuda.running.barrier_kernel import RankBarrier, standings
from tilescale.backends.cuda.running.diagnosis import ReportContext, error_for
from tilescale.backends.cuda.running.queue_watch import QueueWatch
from tilescale.backends.cuda.running.steps import StreamWork
from tilescale.backends.cuda.running.stream_order import IdleWait, noted_failure, wait_idle
from tilescale.backends.cuda.running.timeouts import WaitRecords
from tilescale.backends.tilelang.lowering.arguments import WaitSite
from tilescale.comm import Team, World
from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap import SymmetricHeap
from tilescale.comm.heap.group import HeapGroup
from tilescale.comm.heap.reach import Reach
from tilescale.errors import DeviceError, RankFailedError, RankMismatchError, TileScaleError

_GRACE_S = 5.0
"""Minimum time for other work to end once the waits have ended, in seconds."""
_NOTICE_S, _LOOK_S = 2.0, 0.05
"""Seconds after an error of NCCL in which the job may detect a rank's death; the polling interval meanwhile."""


class WaitGuard:
    """The barriers and the failed waits of one program on one device.

    Attributes:
        sites: the waits and signals of the program, by number.
        records: the device's reports of failed waits.
        barriers: the barriers of ranks.
    """

    def __init__(
        self,
        program: str,
        world: World,
        heap: SymmetricHeap | Reach,
        limit_ns: int,
        sites: list[WaitSite],
        compile: Callable[[Any], Any],
        team: Team,
        moments: int = 0,
    ):
        """Collective. `heap` is the heap of the devices that share memory, `team` the ranks of the program,
        `moments` the number of moments that its blocks record."""
        self._program, self._world, self._device, self._limit_ns = program, world, heap.device, limit_ns
        self._group, self._near = HeapGroup(team), heap.team
        self.sites = sites
        sizes = [WaitRecords.words_of(heap.team.size), RankBarrier.words_of(heap.team.size)]
        records, barriers = heap.zeros(sum(sizes), torch.int64).split(sizes)  # ranks meet for each allocation
        self.records: WaitRecords = WaitRecords(heap, records, moments)
        self.ranks: RankBarrier = RankBarrier(heap, barriers, compile)
        self._error: TileScaleError | None = None
        _watch(self)

    @cached_property
    def watch(self) -> QueueWatch:
        """Timeouts of the copy queue's waits."""
        return QueueWatch(
            self.records, self._limit_ns, self._device, lambda: self.records.read_concurrently(self.ranks.words)
        )

    @property
    def limit_ns(self) -> int:
        """The limit of a wait, in nanoseconds."""
        return self._limit_ns

    def barrier(self, site: int, call: int = 0, patience: int = 3) -> StreamWork:
        """A launch that synchronizes all ranks, in the order of the current stream.

        Args:
            call: a digest that must be the same on all ranks.
            patience: the limit, in multiples of a wait's. A rank that is late because it waits itself, in a kernel or a
                barrier, must fail first, with the cause.
        """
        return self.ranks.barrier(site, call, patience * self._limit_ns, self.records)

    # -- failures ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise if a wait of an earlier call has failed, as far as is known without a query of the device.

        Raises:
            WaitTimeoutError, OutOfBoundsError, RankMismatchError: the failure; again at each call, until `reset`.
            RankFailedError: a rank has died, or failed in another way.
        """
        if self._error is None and self.records.stopped:
            self._error = self._found()
        if self._error is not None:
            raise self._error.with_traceback(None)

    def _found(self) -> TileScaleError:
        error = error_for(self.records.read(), self._scene())
        try:
            failure = self._world.failure()
            refusal = self._refusal()
        except RankFailedError as gone:
            return gone
        if failure is not None and failure.rank != self._world.rank:
            return RankFailedError(f"{failure.text}\n    so: {error.message}", where=error.where)
        return error if refusal is None else refusal

    def _refusal(self) -> RankMismatchError | None:
        """The error that another rank raised instead of making a call that this one has made."""
        return self._group.refusal(CollectiveCall.here("kernel"))

    def _failure(self) -> TileScaleError | None:
        return noted_failure(self._world.failure) or self._refusal()

    def blame(self, error: BaseException) -> None:
        """Raise RankFailedError from an error of NCCL if a rank has died, which NCCL may know first."""
        until = time.monotonic() + _NOTICE_S
        while (gone := noted_failure(self._world.failure)) is None and time.monotonic() < until:
            time.sleep(_LOOK_S)
        if gone is not None:
            raise gone from error

    def _scene(self) -> ReportContext:
        own = standings(self.records.read_concurrently(self.ranks.words))
        numbers = {rank: number for number, rank in enumerate(self._near.ranks)}
        elsewhere = []
        for other in _guards:
            if other is not self:
                known = standings(self.records.read_concurrently(other.ranks.words))
                mine = known[other._near.rank]
                ahead = [rank for rank, at in zip(other._near.ranks, known, strict=True) if mine.behind(at) > 0]
                elsewhere += [(numbers[rank], other._program) for rank in ahead if rank in numbers]
        limit_s = self._limit_ns / 1e9
        first = self._group.rank - self._near.rank
        return ReportContext(self._program, self._near.rank, self.sites, limit_s, own, elsewhere, first)

    def synchronize(self) -> None:
        """Wait until the device is idle. Raises as `check`; a rank's death ends the wait at once."""
        self._wait_idle()
        self.check()

    def _wait_idle(self) -> bool:
        try:
            return wait_idle(
                IdleWait(lambda: torch.cuda.synchronize(self._device)),
                failure=self._failure,
                stopped=lambda: self.records.stopped,
                stop=_stop_all,
                abort=nccl.abort,
                grace_s=max(_GRACE_S, self._limit_ns / 1e9),
            )
        except RankMismatchError as error:
            self._error = error
            raise

    # -- a fresh start -----------------------------------------------------------------------------------------------

    def reset(self, clear: Callable[[], None]) -> None:
        """Collective: forget failed waits. `clear` zeroes the state that the program keeps between calls.

        Raises:
            RankFailedError: a rank has failed, or does not arrive.
            RankMismatchError: ranks reset different programs.
            DeviceError: the device does not become idle.
        """
        call = CollectiveCall.here("kernel.reset")
        self.records.stop()
        if not self._wait_idle():
            raise DeviceError(f"{self._device} does not become idle: it runs other work than {self._program!r}")
        programs = self._group.all_gather(call, (self._program, nccl.aborted()))
        for rank, (program, _) in enumerate(programs):
            if program != programs[0][0]:
                raise RankMismatchError(f"rank 0 resets {programs[0][0]!r}, rank {rank} resets {program!r}")
        # From here on no rank writes to another: all devices are idle.
        if any(aborted for _, aborted in programs):
            nccl.renew()
        clear()
        self.ranks.clear()
        self.records.clear()
        self._error = None
        self._group.all_gather(call, None)

    def leave(self) -> None:
        """At process exit: report unread failures, and end the device's waits."""
        try:
            failed = self._world.failure() is not None
        except RankFailedError:
            failed = True
        if self.records.failed and self._error is None:
            error = self._found()
            sys.excepthook(type(error), error, None)
        elif failed:
            self.records.stop()


_guards: weakref.WeakSet[WaitGuard] = weakref.WeakSet()
_owner: int | None = None


def _watch(guard: WaitGuard) -> None:
    global _owner
    _guards.add(guard)
    if _owner is None:
        _owner = os.getpid()
        atexit.register(_leave)


def _stop_all() -> None:
    for guard in _guards:
        guard.records.stop()


def _leave() -> None:
    if os.getpid() == _owner:
        for guard in list(_guards):
            guard.leave()
