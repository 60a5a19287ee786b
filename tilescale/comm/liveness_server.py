# SPDX-License-Identifier: MIT
"""Rank 0's ends of the liveness connections: one thread that lets ranks in, and notices when one is gone.

Anybody who reaches the port can connect. So nothing here waits for one connection: those that have not proven yet that
they belong to the job are few, short-lived, and hold a hundred bytes each.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from tilescale.comm.liveness import keep_alive
from tilescale.comm.trust.handshake import HELLO_BYTES, JOINED_BEFORE, PROOF_BYTES, WELCOME, Answer
from tilescale.comm.trust.key import JobKey

__all__ = ["LivenessServer"]

_PROVE_WITHIN_S = 5.0
_UNPROVEN = 64  # connections beside one for each rank; the oldest goes when more come
_PAUSE_S = 0.1  # without accepting, when there are no descriptors left


class _Unproven:
    """A connection that has yet to prove that it is a rank's: the bytes so far, and the answer to its hello."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + _PROVE_WITHIN_S
        self.received = b""
        self.answer: Answer | None = None

    @property
    def missing(self) -> int:
        """Bytes of the message that is expected."""
        return (HELLO_BYTES if self.answer is None else PROOF_BYTES) - len(self.received)


class LivenessServer:
    """Calls `on_cut(rank)`, in its thread, when a rank's end is closed, by `close` or by its death.

    Attributes:
        port: where it listens.
    """

    def __init__(self, host: str, key: JobKey, job: bytes, size: int, on_cut: Callable[[int], None]):
        """Listen at the address `host` alone, for the ranks of the job with this nonce. Raises OSError."""
        self._key, self._job, self._size, self._on_cut = key, job, size, on_cut
        self._ranks: dict[socket.socket, int] = {}
        self._joined: set[int] = set()
        self._unproven: dict[socket.socket, _Unproven] = {}
        self._accept_at = 0.0
        self._listener = _listen(host)
        self.port: int = self._listener.getsockname()[1]
        os.register_at_fork(after_in_child=self._listener.close)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="tilescale-liveness", daemon=True).start()

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
            for key, _ in self._selector.select(_PAUSE_S if self._unproven or self._accept_at else None):
                connection = key.fileobj
                if connection is self._listener:
                    self._accept()
                elif connection in self._ranks:
                    self._cut(connection)
                elif connection in self._unproven:
                    self._hear(connection, self._unproven[connection])
            self._tidy()

    def _tidy(self) -> None:
        now = time.monotonic()
        for connection in [c for c, state in self._unproven.items() if now > state.deadline]:
            self._refuse(connection)
        if self._accept_at and now > self._accept_at:
            self._accept_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no descriptors are left, or the other side is gone already
            self._selector.unregister(self._listener)
            self._accept_at = time.monotonic() + _PAUSE_S
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        self._unproven[connection] = _Unproven()
        if len(self._unproven) > _UNPROVEN + self._size:
            self._refuse(next(iter(self._unproven)))

    def _hear(self, connection: socket.socket, state: _Unproven) -> None:
        try:
            data = connection.recv(state.missing)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        state.received += data
        if not data:
            self._refuse(connection)
        elif not state.missing:
            message, state.received = state.received, b""
            try:
                self._respond(connection, state, message)
            except OSError:
                self._refuse(connection)

    def _respond(self, connection: socket.socket, state: _Unproven, message: bytes) -> None:
        if state.answer is None:
            state.answer = Answer.to(message, self._key, self._job, self._size)
            if state.answer is None:
                self._refuse(connection)
            else:
                connection.sendall(state.answer.challenge)  # fits into the empty buffer of a new connection
        elif not state.answer.proven_by(message):
            self._refuse(connection)
        elif state.answer.rank in self._joined:
            connection.sendall(JOINED_BEFORE)
            self._refuse(connection)
        else:
            keep_alive(connection)
            connection.sendall(WELCOME)
            del self._unproven[connection]
            self._joined.add(state.answer.rank)
            self._ranks[connection] = state.answer.rank

    def _refuse(self, connection: socket.socket) -> None:
        del self._unproven[connection]
        self._selector.unregister(connection)
        connection.close()

    def _cut(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._on_cut(self._ranks[connection])
        del self._ranks[connection]
        connection.close()


def _listen(host: str) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=1024)
