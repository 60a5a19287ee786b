# SPDX-License-Identifier: MIT
"""Admission to a job: one thread that admits ranks that prove knowledge of the key, and blocks on none.

Any process that reaches the port can connect. Connections that have not proven yet that they belong to the job are few,
short-lived, and hold a few hundred bytes each; where more come, the oldest goes.
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

BACKLOG = 1024
"""Connections that the kernel holds until the thread comes to them."""

_PROVE_WITHIN_S = 5.0
_UNPROVEN = 64  # connections in addition to one for each member
_PAUSE_S = 0.1  # without accepting, when there are no descriptors left


class _Unproven:
    """A connection that has yet to prove that it is a member's: the bytes so far, and the answer to its hello."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + _PROVE_WITHIN_S
        self.received = b""
        self.answer: Answer | None = None

    @property
    def missing(self) -> int:
        """Bytes of the message that is expected."""
        return (HELLO_BYTES if self.answer is None else PROOF_BYTES) - len(self.received)


class Admission:
    """Admits members 1 to size - 1 of a job, each once. `is_over`: no more members are admitted; a later one may try
    again, at the job that follows."""

    def __init__(
        self,
        listener: socket.socket,
        key: JobKey,
        job: bytes,
        size: int,
        joined: Callable[[socket.socket, int, str], Callable[[], None] | None],
        name: str,
    ):
        """Admit members on a listening socket. The socket is handled from `start` on, in a thread called `name`.

        Args:
            job: the nonce of the job.
            joined: called in the thread with a connection, which does not block, the member that it has proven to be,
                and the process of this member. Returns the handler for readable data, or None for a connection that is
                handled elsewhere from now on.
        """
        self._key, self._job, self._size, self._joined = key, job, size, joined
        self._members: set[int] = set()
        self._unproven: dict[socket.socket, _Unproven] = {}
        self._accept_at = 0.0
        self.is_over = self._closing = False
        self._listener = listener
        self._listener.setblocking(False)
        os.register_at_fork(after_in_child=self._listener.close)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Let members in from now on."""
        self._thread.start()

    def forget(self, connection: socket.socket) -> None:
        """Close a connection that is handled here. Called in the thread."""
        self._selector.unregister(connection)
        connection.close()

    def close(self) -> None:
        """Stop listening, and drop connections that have not proven anything yet."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        for connection in [*self._unproven]:
            self._refuse(connection)
        self._listener.close()

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(_PAUSE_S if self._unproven or self._accept_at else None):
                if isinstance(key.fileobj, socket.socket) and key.fileobj.fileno() >= 0:  # else it went meanwhile
                    key.data()
            self._tidy()

    def _tidy(self) -> None:
        now = time.monotonic()
        for connection in [c for c, state in self._unproven.items() if now > state.deadline]:
            self._refuse(connection)
        if self._accept_at and now > self._accept_at:
            self._accept_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # no descriptors are left, or the other side is gone already
            self._selector.unregister(self._listener)
            self._accept_at = time.monotonic() + _PAUSE_S
            return
        connection.setblocking(False)
        self._unproven[connection] = _Unproven()
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(connection))
        if len(self._unproven) > _UNPROVEN + self._size:
            self._refuse(next(iter(self._unproven)))

    def _hear(self, connection: socket.socket) -> None:
        state = self._unproven[connection]
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
        elif self.is_over or not state.answer.proven_by(message):
            self._refuse(connection)
        elif state.answer.rank in self._members:
            connection.sendall(JOINED_BEFORE)
            self._refuse(connection)
        else:
            self._admit(connection, state.answer)

    def _admit(self, connection: socket.socket, member: Answer) -> None:
        keep_alive(connection)
        connection.sendall(WELCOME)
        del self._unproven[connection]
        self._members.add(member.rank)
        served = self._joined(connection, member.rank, member.process)
        if served is None:
            self._selector.unregister(connection)
        else:
            self._selector.modify(connection, selectors.EVENT_READ, served)

    def _refuse(self, connection: socket.socket) -> None:
        del self._unproven[connection]
        self.forget(connection)
