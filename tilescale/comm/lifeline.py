# SPDX-License-Identifier: MIT
"""Who is still alive: every rank holds one idle TCP connection to rank 0.

The kernel closes a dead process's connections at once, whatever killed it and however busy it was, so nobody has to
send heartbeats (which a rank inside a long compilation would miss). Keep-alive probes cover a node that vanishes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import selectors
import socket
import struct
import threading
from collections.abc import Callable

__all__ = ["Lifeline", "LifelineServer"]

_HELLO = struct.Struct("!16sI")  # token, rank
_HELLO_TIMEOUT_S = 5.0
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a silent node is given up after 25 s


class Lifeline:
    """Another rank's end: open as long as both processes live."""

    def __init__(self, host: str, port: int, token: bytes, rank: int, timeout_s: float):
        """Connect to rank 0's `LifelineServer`. Raises OSError."""
        connection = socket.create_connection((host, port), timeout=timeout_s)
        connection.sendall(_HELLO.pack(token, rank))
        _keep_alive(connection)
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def cut(self) -> bool:
        """Whether rank 0 is gone. It never sends, so there is something to read only at the end."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Tell rank 0 that this rank needs nothing more."""
        self._connection.close()


class LifelineServer:
    """Rank 0's end: a thread that calls `on_cut(rank)` when a rank's end is closed, by `close` or by its death."""

    def __init__(self, on_cut: Callable[[int], None]):
        self._on_cut = on_cut
        self._ranks: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)
        os.register_at_fork(after_in_child=self._listener.close)
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_bytes(16)
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="tilescale-lifelines", daemon=True).start()

    def holding(self) -> frozenset[int]:
        """The ranks that are connected now."""
        return frozenset(self._ranks.values())

    def close(self) -> None:
        """Tell the other ranks that this one is about to end."""
        for connection in list(self._ranks):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._cut(key.fileobj)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_HELLO_TIMEOUT_S)
        try:
            token, rank = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
        except (OSError, struct.error):
            token, rank = b"", -1
        if not secrets.compare_digest(token, self.token):  # a stranger on the network, not a rank of this job
            connection.close()
            return
        _keep_alive(connection)
        self._ranks[connection] = rank
        self._selector.register(connection, selectors.EVENT_READ)

    def _cut(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._on_cut(self._ranks[connection])
        del self._ranks[connection]
        connection.close()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # macOS lacks TCP_KEEPIDLE
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    os.register_at_fork(after_in_child=connection.close)  # else a child that lives on keeps the line open
