# SPDX-License-Identifier: MIT
"""Liveness of ranks: every rank holds one idle TCP connection to rank 0.

The kernel closes a dead process's connections at once, for any cause of death and any load, so no rank has to send
heartbeats (which a rank inside a long compilation would miss). Keep-alive probes cover a node that vanishes.
"""

from __future__ import annotations

import os
import select
import socket

from tilescale.comm.trust.handshake import CHALLENGE_BYTES, JOINED_BEFORE, WELCOME, Hello
from tilescale.comm.trust.key import JobKey
from tilescale.errors import ForgedMessageError, LaunchError

_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds until the first probe and between probes, and the number of probes."""


class LivenessConnection:
    """A rank's end: open as long as this rank and rank 0 live.

    Attributes:
        job: the nonce that rank 0 drew for the job.
        root_process: the process of rank 0.
    """

    def __init__(self, address: tuple[str, int], key: JobKey, rank: int, timeout_s: float):
        """Connect to rank 0's `LivenessServer`.

        Raises OSError if there is no answer, ForgedMessageError if it is not rank 0 of this job, LaunchError if this
        rank has joined before.
        """
        self._connection = socket.create_connection(address, timeout=timeout_s)
        try:
            self.job, self.root_process = join(self._connection, Hello(key, rank), _joined_before(rank))
        except BaseException:
            self._connection.close()
            raise
        keep_alive(self._connection)
        self._poll = select.poll()
        self._poll.register(self._connection, select.POLLIN)

    def cut(self) -> bool:
        """Whether rank 0 is gone. It sends nothing any more, so there is something to read only at the end."""
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Notify rank 0 that this rank needs nothing more."""
        self._connection.close()


def join(connection: socket.socket, hello: Hello, joined_before: LaunchError) -> tuple[bytes, str]:
    """Prove to the other side that this one knows the job's key; returns the nonce that the other side drew, and its
    process.

    Raises ForgedMessageError if the other side does not know the key, and `joined_before` if it says so.
    """
    connection.sendall(hello.message)
    proof, job, process = hello.prove(receive(connection, CHALLENGE_BYTES))
    connection.sendall(proof)
    verdict = receive(connection, len(WELCOME))
    if verdict == JOINED_BEFORE:
        raise joined_before
    if verdict != WELCOME:
        raise ForgedMessageError("authentication failed: the other side does not know the key of this job")
    return job, process


def _joined_before(rank: int) -> LaunchError:
    return LaunchError(
        f"rank {rank} of this job has joined before (this is process {os.getpid()})",
        hint="a program that a rank starts is not a rank: start it without RANK, WORLD_SIZE and LOCAL_RANK; "
        "two jobs on one host need a MASTER_PORT each",
    )


def receive(connection: socket.socket, nbytes: int) -> bytes:
    """Receive `nbytes` bytes. Raises ConnectionError if the connection ends before."""
    data = b""
    while len(data) < nbytes:  # MSG_WAITALL does not wait where the connection has a timeout
        part = connection.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel detect a vanished peer within 10 + 3 x 5 seconds, and close the connection in forked children."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # macOS lacks TCP_KEEPIDLE
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    os.register_at_fork(after_in_child=connection.close)  # else a child that lives on keeps the line open
