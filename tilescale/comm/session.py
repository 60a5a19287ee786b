# SPDX-License-Identifier: MIT
"""One rank's part in a job of several: synchronized calls, bounded waits, failures of other ranks.

No wait here can hang: it ends when the message arrives, when a failure is logged, when an awaited rank has left, or at
the timeout.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from tilescale.comm.call import CollectiveCall
from tilescale.comm.failure_log import FailureLog, JobStatus, RankFailure
from tilescale.comm.liveness import LivenessConnection
from tilescale.comm.liveness_server import LivenessServer
from tilescale.comm.transport import Transport
from tilescale.errors import ForgedMessageError, RankFailedError, RankMismatchError, UsageError

T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
_LONGEST = 4 << 10  # characters of a refusal
_BRIEF_S = 0.05  # shorter waits cost one request each time they look; others look for failures, too
_SLOW_S = 0.5  # after this long it is worth asking where the missing ranks are instead


class Session:
    """The connection of this rank to its job.

    Attributes:
        rank: this rank.
        size: number of ranks.
        timeout_s: bound of every wait, in seconds.
        names: how to speak of each rank, e.g. "rank 2 (pid 77 on node3)".
        server: rank 0's ends of the liveness connections, None elsewhere.
        liveness: another rank's connection to rank 0, None at rank 0.
        has_left: this rank's script has ended, and the others know.
        one_call: held while this rank is in a call.
        successor: the session of the group in which this rank continued, see survivors.py.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        size: int,
        timeout_s: float,
        liveness: LivenessConnection | None = None,
    ):
        self.transport = transport
        self.failure_log = FailureLog(transport)
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.names = [f"rank {r}" for r in range(size)]
        self.server: LivenessServer | None = None
        self.liveness = liveness
        self._calls: dict[tuple[int, ...], int] = {}
        self._kept: dict[tuple[int, ...], list[str]] = {}
        self.has_left = False
        self.one_call = OneCall(rank)
        self.successor: Session | None = None

    @property
    def latest(self) -> Session:
        """The session of the group that this rank is in now."""
        return self if self.successor is None else self.successor.latest

    def rendezvous(self, ranks: tuple[int, ...], call: CollectiveCall) -> tuple[str, dict[int, CollectiveCall]]:
        """Wait until all `ranks` have made their next call, and check that it is the same; returns a key for its data,
        and the call of each rank.

        Raises RankMismatchError if they call different collectives, RankFailedError if one does not come, UsageError
        while another thread of this rank is in a call.
        """
        with self.one_call:
            return self._rendezvous(ranks, call)

    def _rendezvous(self, ranks: tuple[int, ...], call: CollectiveCall) -> tuple[str, dict[int, CollectiveCall]]:
        if self.has_left:
            raise UsageError(
                f"rank {self.rank} calls {call} after it has left the job: its script has ended",
                hint="functions of atexit run after that if they were registered before tilescale.init()",
                where=call.where,
            )
        key = self._key(ranks)
        calls: dict[int, CollectiveCall] = {}
        try:
            self._arrive(ranks, call)

            def missing() -> list[int]:
                calls.update(self._arrived(key))
                return [rank for rank in ranks if rank not in calls or calls[rank].refusal]

            self.wait(lambda: None if missing() else True, missing, call, ranks)
        finally:
            if self._key(ranks) == key:
                self._calls[ranks] = self._calls.get(ranks, 0) + 1
        if self.rank == ranks[0]:  # all are here, so all have left the calls before
            for old in self._kept[ranks][:-1]:
                self.transport.delete(old)
            self._kept[ranks] = [key]
        different = [rank for rank in ranks if not call.agrees_with(calls[rank])]
        if different:
            raise _mismatch({self.rank: call, different[0]: calls[different[0]]})
        return key, calls

    def refuse(self, ranks: tuple[int, ...], call: CollectiveCall) -> None:
        """Notify the other `ranks` that this one makes no such call, as `call.refusal` says: theirs raises that.

        It stands for this rank's next call, or for the part that it still owes to the last one.

        Raises as `rendezvous`, but does not wait.
        """
        with self.one_call:
            self._arrive(ranks, replace(call, refusal=call.refusal[:_LONGEST]))
            self._calls[ranks] = self._calls.get(ranks, 0) + 1

    def _arrive(self, ranks: tuple[int, ...], call: CollectiveCall) -> None:
        key, number = self._key(ranks), self._calls.get(ranks, 0)
        if self.rank == ranks[0]:
            self._kept.setdefault(ranks, []).append(key)
        self.transport.append(key, call.to_json())
        self.transport.set(f"at/{self.rank}", json.dumps([ranks, number, call.to_json().decode()]).encode())

    def _key(self, ranks: tuple[int, ...]) -> str:
        """Name of the next call of `ranks` in the store; it stays the same until all of them have arrived."""
        return f"call/{','.join(map(str, ranks))}/{self._calls.get(ranks, 0)}"

    def receive(self, key: str, sender: int, call: CollectiveCall, ranks: tuple[int, ...], readers: int = 1) -> Any:
        """Wait for the object that `sender` puts under `key`, in a call of `ranks`. Raises as `wait`."""

        def missing() -> list[int]:
            return [] if self.transport.has(key) else [sender]

        self.wait(lambda: None if missing() else True, missing, call, ranks)
        return self.transport.take(key, sender, readers)

    def wait(
        self,
        ready: Callable[[], T | None],
        missing: Callable[[], Iterable[int]],
        call: CollectiveCall,
        ranks: tuple[int, ...],
    ) -> T:
        """Ask `ready` until it gives something; `missing` names those of `ranks`, which call together, that it needs.

        Raises RankFailedError if the job has failed, a missing rank has left or the time is up; RankMismatchError if a
        missing rank refuses the call, or waits for this one in another call.
        """
        try:
            start, pause = time.monotonic(), _FIRST_PAUSE_S
            while (value := ready()) is None:
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE_S)
                waited = time.monotonic() - start
                if waited < min(_BRIEF_S, self.timeout_s):
                    continue
                status = self.status()
                if (value := ready()) is not None:  # a rank may have done its part just before it left
                    break
                absent = list(missing())
                self._stop_if_hopeless(status, absent, call)
                if (refused := self.refusal(ranks, missing, call)) is not None:
                    raise refused
                if waited > _SLOW_S:
                    self._stop_if_elsewhere(absent, missing, call, ranks)
                if waited > self.timeout_s:
                    raise self._overdue(absent, call)
            return value
        except RankFailedError as error:
            # The frames in here do not help the user; the waiting line does.
            raise error.at(call.at(f"rank {self.rank} waits in {call}")).with_traceback(None) from None

    def refusal(
        self, ranks: tuple[int, ...], missing: Callable[[], Iterable[int]], call: CollectiveCall
    ) -> RankMismatchError | None:
        """The error for `call` if one of the `missing` has refused it; this rank has then left it too."""
        here = self._arrived(self._key(ranks))
        refused = [rank for rank, other in here.items() if other.refusal]
        refused = [rank for rank in missing() if rank in refused] if refused else []  # it may have done its part before
        if not refused:
            return None
        self._calls[ranks] = self._calls.get(ranks, 0) + 1
        return self._refused(refused[0], here[refused[0]], call)

    def status(self) -> JobStatus:
        """The failure log, with the end of rank 0, which only this rank can observe.

        Raises RankFailedError if the store has died or does not answer.
        """
        status = self.failure_log.read()
        if self.liveness is None or not self.liveness.cut():
            return status
        failure = status.failure
        if failure is None and 0 not in status.left:
            failure = RankFailure(0, self._died(0))
            self.failure_log.failed(failure.rank, failure.text)
        return JobStatus(status.left, status.gone | {0}, failure)

    def rank_gone(self, rank: int) -> None:
        """Called at rank 0 when the connection of `rank` is cut: a failure, unless it had said that it leaves."""
        with contextlib.suppress(RankFailedError, ForgedMessageError):  # this rank finds out by itself
            if rank not in self.failure_log.read().left:
                self.failure_log.failed(rank, self._died(rank))
            self.failure_log.gone(rank)

    def introduce(self, rank: int, process: str) -> None:
        """Name a rank by its process, as soon as this is known."""
        self.rename(rank, f"rank {rank} ({process})")

    def rename(self, rank: int, name: str) -> None:
        """Set the name of a rank."""
        self.names[rank] = name
        if rank == 0:
            self.transport.client.root_name = name

    def close(self) -> None:
        """Close this rank's connections: no request or message follows."""
        end = self.server or self.liveness
        if end is not None:
            end.close()

    def _died(self, rank: int) -> str:
        return f"{self.names[rank]} disappeared: it was killed, has crashed, or its host is out of reach"

    def _arrived(self, key: str) -> dict[int, CollectiveCall]:
        return {record.rank: CollectiveCall.from_json(record.payload) for record in self.transport.log(key)}

    def _stop_if_hopeless(self, status: JobStatus, absent: list[int], call: CollectiveCall) -> None:
        if status.failure is not None:
            raise RankFailedError(status.failure.text)
        left = [rank for rank in absent if rank in status.left]
        if left:
            text = f"{self.names[left[0]]} ended before it came to {call}: its script finished or called sys.exit"
            self.failure_log.failed(left[0], text)  # so that all ranks name this one, not those that fail because of it
            raise RankFailedError(text)

    def _last_call(self, rank: int) -> tuple[tuple[int, ...], int, CollectiveCall] | None:
        name = f"at/{rank}"
        if not self.transport.has(name):
            return None
        ranks, number, call = json.loads(bytes(self.transport.value(name, rank)))
        return tuple(ranks), number, CollectiveCall.from_json(call.encode())

    def _stop_if_elsewhere(
        self, absent: list[int], missing: Callable[[], Iterable[int]], call: CollectiveCall, team: tuple[int, ...]
    ) -> None:
        """A missing rank that is in a call which this rank has yet to join waits for us, as we do for it."""
        for rank in absent:
            last = self._last_call(rank)
            if last is None:
                continue
            ranks, number, other = last
            is_ahead = self.rank in ranks and number >= self._calls.get(ranks, 0)
            if is_ahead and rank in missing():  # else it has done its part here meanwhile, and gone on
                if other.refusal:
                    raise self._refused(rank, other, call)
                raise (_ahead if ranks == team else _mismatch)({self.rank: call, rank: other})

    def _refused(self, rank: int, other: CollectiveCall, call: CollectiveCall) -> RankMismatchError:
        error = RankMismatchError(
            f"{self.names[rank]} does not take part in {call}: {other.refusal}",
            hint="the error is that of the other rank; all ranks may go on with the next call",
            where=[other.at(f"rank {rank}: {other.op}"), call.at(f"rank {self.rank}: {call}")],
        )
        error.__tilescale_raised_at__ = rank  # type: ignore[attr-defined]
        return error

    def _overdue(self, absent: list[int], call: CollectiveCall) -> RankFailedError:
        who = ", ".join(self.names[rank] for rank in absent)
        last = {rank: self._last_call(rank) for rank in absent}
        return RankFailedError(
            f"no sign of {who} in {call} for {self.timeout_s:g} s",
            hint="if they only need longer, set TILESCALE_TIMEOUT_S (seconds) or tilescale.init(timeout_s=...)",
            where=[seen[2].at(f"rank {rank} was last seen in {seen[2]}") for rank, seen in last.items() if seen],
        )


def _mismatch(calls: dict[int, CollectiveCall]) -> RankMismatchError:
    said = ", ".join(f"rank {rank} calls {call}" for rank, call in sorted(calls.items()))
    return RankMismatchError(
        f"ranks call different collectives: {said}",
        hint="every rank of a team calls the same collectives, with the same root, in the same order",
        where=[call.at(f"rank {rank}: {call}") for rank, call in sorted(calls.items())],
    )


def _ahead(calls: dict[int, CollectiveCall]) -> RankMismatchError:
    (rank, call), (other, its) = calls.items()
    return RankMismatchError(
        f"rank {other} is a call ahead of rank {rank}: it left {call} undone, and waits in {its}",
        hint="a rank that catches an error in a collective skips that call; the others have to skip it as well",
        where=[call.at(f"rank {rank}: {call}"), its.at(f"rank {other}: {its}")],
    )


class OneCall:
    """Held while a rank is in a call; a call inside of a call is a part of it.

    Of two threads that call at the same time each rank would see another order.
    """

    def __init__(self, rank: int):
        self._rank, self._lock = rank, threading.RLock()

    def __enter__(self) -> None:
        """Raises UsageError while another thread of the rank is in a call."""
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                f"rank {self._rank} makes a call in thread {threading.current_thread().name!r}, while another thread "
                "of it is in one",
                hint="let one thread of each rank call programs over ranks, or teams, at a time, in the same order on "
                "all ranks",
            )

    def __exit__(self, *raised: object) -> None:
        self._lock.release()
