# SPDX-License-Identifier: MIT
"""Interface of a heap to the team that owns it: exchange of small facts, and waits that end when a rank fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from tilescale.comm.call import CollectiveCall
from tilescale.comm.team import Team
from tilescale.errors import RankFailedError, RankMismatchError
from tilescale.settings import settings

T = TypeVar("T")


class HeapGroup:
    """The ranks of a heap.

    Attributes:
        team: the team that they are.
        rank: this process's rank in it.
        size: number of ranks.
    """

    def __init__(self, team: Team):
        self.team = team
        self.rank, self.size = team.rank, team.size

    @property
    def timeout_s(self) -> float:
        """The longest wait for another rank, in seconds."""
        session = self.team._session
        return settings().timeout_s if session is None else session.timeout_s

    def all_gather(self, call: CollectiveCall, value: T) -> list[T]:
        """The values of all ranks. Raises what a collective of the team raises; errors name `call`."""
        return self.team._all_gather(call, value)

    def wait(self, call: CollectiveCall, ready: Callable[[], T | None], missing: Callable[[], Iterable[int]]) -> T:
        """Poll `ready` until it returns a value; `missing` names the ranks of the team that it depends on.

        Raises RankFailedError if one of them fails or the time is up.
        """
        session = self.team._session
        assert session is not None, "a heap of one rank has no peers"
        return session.wait(ready, lambda: [self.team.ranks[rank] for rank in missing()], call, self.team.ranks)

    def refusal(self, call: CollectiveCall) -> RankMismatchError | None:
        """The error for `call` if another rank refuses to make it; does not wait. Raises RankFailedError."""
        session, others = self.team._session, set(self.team.ranks) - {self.team.ranks[self.rank]}
        return None if session is None else session.refusal(self.team.ranks, lambda: others, call)

    def raise_if_failed(self, call: CollectiveCall, within_s: float) -> None:
        """Raise RankFailedError if the job fails within `within_s` seconds: a death takes a moment to be noticed."""
        session, end = self.team._session, time.monotonic() + within_s
        while session is not None and time.monotonic() < end:
            failure = session.status().failure
            if failure is not None:
                raise RankFailedError(failure.text, where=call.at(f"rank {self.rank} was in {call}"))
            time.sleep(0.02)
