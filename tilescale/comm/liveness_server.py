# SPDX-License-Identifier: MIT
"""Rank 0's ends of the liveness connections: it notices when one is gone."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from tilescale.comm.admission import BACKLOG, Admission
from tilescale.comm.trust.key import JobKey


class LivenessServer:
    """Calls `on_join(rank, process)`, in its thread, when a rank has joined, and `on_cut(rank)` when this rank's end is
    closed, by `close` or by its death. `port`: where it listens."""

    def __init__(
        self,
        host: str,
        key: JobKey,
        job: bytes,
        size: int,
        on_join: Callable[[int, str], None],
        on_cut: Callable[[int], None],
    ):
        """Listen at the address `host` alone, for the ranks of the job with this nonce. Raises OSError."""
        self._on_join = on_join
        self._on_cut, self._lock = on_cut, threading.Lock()
        self._ranks: dict[socket.socket, int] = {}
        listener = _listen(host)
        self.port: int = listener.getsockname()[1]
        self._admission = Admission(listener, key, job, size, self._joined, "tilescale-liveness")
        self._admission.start()

    def renumber(self, numbers: dict[int, int], on_cut: Callable[[int], None]) -> None:
        """Give the connected ranks other numbers, or none, and report their ends to another function from now on."""
        with self._lock:
            self._ranks = {held: numbers[rank] for held, rank in self._ranks.items() if rank in numbers}
            self._on_cut = on_cut

    def holding(self) -> frozenset[int]:
        """The ranks that are connected, or whose ends are being reported."""
        return frozenset(self._ranks.values())

    def close(self) -> None:
        """Notify the other ranks that this one is about to end."""
        for connection in list(self._ranks):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def _joined(self, connection: socket.socket, rank: int, process: str) -> Callable[[], None]:
        self._on_join(rank, process)
        self._ranks[connection] = rank

        def cut() -> None:  # a rank sends nothing, so there is something to read only at the end
            self._report(connection)
            self._admission.forget(connection)

        return cut

    def _report(self, connection: socket.socket) -> None:
        """Report the end of a connection; again if `renumber` has set another function meanwhile."""
        reported: Callable[[int], None] | None = None
        while True:
            with self._lock:
                number, on_cut = self._ranks.get(connection), self._on_cut
                if number is None or on_cut is reported:
                    self._ranks.pop(connection, None)
                    return
            on_cut(number)
            reported = on_cut


def _listen(host: str) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=BACKLOG)
