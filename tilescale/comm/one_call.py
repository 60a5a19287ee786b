# SPDX-License-Identifier: MIT
"""One call at a time: a rank's calls may come from any of its threads, but not from two at once."""

from __future__ import annotations

import threading

from tilescale.errors import UsageError


class OneCall:
    """Held while a rank is in a call; a call inside of a call is a part of it.

    Of two threads that call at the same time each rank would see another order.
    """

    def __init__(self, rank: int):
        """Guard the calls of a rank."""
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
