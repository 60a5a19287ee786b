# SPDX-License-Identifier: MIT
"""Earlier accesses, the synchronization since, and what a new access needs before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from tilescale.backends.tilelang.lowering.markers import ExecutingThreads
from tilescale.backends.tilelang.lowering.touches import AccessKey, MemoryAccess

AccessState: TypeAlias = dict[AccessKey, MemoryAccess]
"""Earlier accesses, with the synchronization since."""


@dataclass(frozen=True)
class RequiredOrder:
    """The synchronization needed between two accesses.

    Attributes:
        sync: a barrier; complete: the end of bulk stores before it; fence: an order of bulk copies after it.
        pairs: the accesses.
    """

    sync: bool = False
    complete: bool = False
    fence: bool = False
    pairs: tuple[tuple[MemoryAccess, MemoryAccess], ...] = ()

    @classmethod
    def of(cls, earlier: MemoryAccess, later: MemoryAccess) -> RequiredOrder | None:
        """The need between two accesses of the same element; None if they are in order."""
        complete = earlier.access.writes and earlier.bulk and not earlier.complete
        synced = covers(earlier.synced, later.by) or earlier.is_by_thread_of(later)
        fence = earlier.generic and later.bulk and not earlier.fenced
        if synced and not complete and not fence:
            return None
        return cls(complete or not synced, complete, fence, ((earlier, later),))

    def with_(self, other: RequiredOrder) -> RequiredOrder:
        """A need that satisfies both."""
        flags = self.sync or other.sync, self.complete or other.complete, self.fence or other.fence
        return RequiredOrder(*flags, (*self.pairs, *other.pairs))

    def applied(self, state: AccessState, by: ExecutingThreads) -> AccessState:
        """A state after a need has been satisfied by some threads."""
        done = completed(state) if self.complete else state
        done = synced(done, by) if self.sync else done
        return fenced(done) if self.fence else done


def covers(done: ExecutingThreads | None, by: ExecutingThreads) -> bool:
    return done is not None and done.begin <= by.begin and by.begin + by.threads <= done.begin + done.threads


def apart(a: ExecutingThreads, b: ExecutingThreads) -> bool:
    """Whether two units have no thread in common: then the program orders them."""
    return a.begin + a.threads <= b.begin or b.begin + b.threads <= a.begin


def synced(state: AccessState, by: ExecutingThreads) -> AccessState:
    """A state after a barrier of some threads."""
    return {k: replace(t, synced=by) if covers(by, t.by) else t for k, t in state.items()}


def completed(state: AccessState) -> AccessState:
    """A state after bulk stores are known to be complete, by their issuing threads."""
    return {
        k: replace(t, complete=True, synced=None) if t.bulk and t.access.writes and not t.complete else t
        for k, t in state.items()
    }


def fenced(state: AccessState) -> AccessState:
    """A state in which later bulk copies are ordered after accesses that threads have synchronized for."""
    return {k: replace(t, fenced=True) if t.synced is not None else t for k, t in state.items()}


def merged(one: AccessState, other: AccessState) -> AccessState:
    """The merge of two control-flow paths' states: only synchronization on both counts."""
    both = {k: _weaker(t, other[k]) for k, t in one.items() if k in other}
    return {**one, **other, **both}


def _weaker(a: MemoryAccess, b: MemoryAccess) -> MemoryAccess:
    common = a.synced if b.synced is not None and covers(b.synced, a.synced or b.synced) else b.synced
    common = common if a.synced is not None else None
    complete, fenced = a.complete and b.complete, a.fenced and b.fenced
    return replace(a, synced=common, complete=complete, fenced=fenced, passed=a.passed or b.passed)
