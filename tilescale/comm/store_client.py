# SPDX-License-Identifier: MIT
"""The job's key-value store (torch's), asked in a way that always ends: with an answer, or because there can be none.

torch's calls block in C until the store answers. A process that is stopped, or a network that drops packets, answers
nothing; so calls are made in a separate thread, while the caller watches the connection to rank 0 and the clock. Rank 0
asks a store that it serves directly: both are stopped together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilescale.comm.worker import Worker
from tilescale.errors import RankFailedError, UsageError

if TYPE_CHECKING:
    from torch.distributed import Store

_PAUSE_S = 0.01


class StoreClient:
    """Keys and bytes that every rank of the job sees. Names and values are unauthenticated: trust neither.

    Every method raises RankFailedError if the store does not answer in time or has died with rank 0, and UsageError in
    a process that a rank has forked.

    Attributes:
        store: torch's.
        limit_s: the longest wait for an answer, in seconds.
        root_name: how to speak of rank 0.
        root_cut: whether the connection to rank 0, which the store would die with, is cut.
    """

    def __init__(self, store: Store, limit_s: float, *, serves: bool = False):
        """`serves`: this process serves the store."""
        self.store, self.limit_s = store, limit_s
        self.root_name = "rank 0"
        self.root_cut: Callable[[], bool] = _never
        self._worker = None if serves else Worker("tilescale-store")
        self._process = os.getpid()
        self._lost = ""

    def under(self, prefix: str) -> StoreClient:
        """The same store, with a prefix before all names."""
        from torch.distributed import PrefixStore

        made = StoreClient(PrefixStore(prefix, self.store), self.limit_s, serves=self._worker is None)
        made.root_name, made.root_cut = self.root_name, self.root_cut
        return made

    def set(self, name: str, value: bytes) -> None:
        self._call(self.store.set, name, value)

    def append(self, name: str, value: bytes) -> None:
        """Add to the end of a value, in one step that no other rank can come between."""
        self._call(self.store.append, name, value)  # type: ignore[attr-defined] # no stub has it

    def get(self, name: str) -> bytes:
        """The value of a name; a name without one is an error of the store."""
        return self._call(self.store.get, name)

    def find(self, name: str) -> bytes | None:
        return self._call(self._find, name)

    def has(self, name: str) -> bool:
        return self._call(self.store.check, [name])

    def has_within(self, name: str, seconds: float) -> bool:
        """Whether the name gets a value within `seconds`."""
        end = time.monotonic() + seconds
        while not self.has(name):
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE_S)
        return True

    def delete(self, name: str) -> None:
        self._call(self.store.delete_key, name)

    def count(self, name: str) -> int:
        """Add one to a counter; returns its new value."""
        return self._call(self.store.add, name, 1)

    def _find(self, name: str) -> bytes | None:
        return self.store.get(name) if self.store.check([name]) else None

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        from torch.distributed import DistError

        if os.getpid() != self._process:
            raise UsageError(
                f"process {os.getpid()} was forked by a rank (process {self._process}) and takes no part in the job",
                hint="leave what ranks do together to the rank itself",
            )
        # Looked at first because torch logs a page of C++ frames when the server does not answer.
        if self._lost or self.root_cut():
            raise RankFailedError(self._lost or self._gone())
        try:
            if self._worker is None:
                return function(*args)
            return self._worker.call(function, *args, limit_s=self.limit_s, hopeless=self.root_cut)
        except TimeoutError:
            self._lost = self._gone() if self.root_cut() else self._silent()
            raise RankFailedError(self._lost) from None
        except DistError as error:
            raise RankFailedError(self._gone()) from error

    def _gone(self) -> str:
        return f"{self.root_name} disappeared: its own output says why, unless it was killed"

    def _silent(self) -> str:
        return (
            f"no answer from {self.root_name}, or the launcher, for {self.limit_s:g} s: "
            "it is stopped, or the network to it is down"
        )


def _never() -> bool:
    return False
