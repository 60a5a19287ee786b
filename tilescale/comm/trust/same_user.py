# SPDX-License-Identifier: MIT
"""Unix sockets between processes of one user on one host.

Their addresses are abstract: no file is made, so a killed process leaves none. Any process on the host could connect to
one, so each side asks the kernel for the user at the other end.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_TIMEOUT_S = 5.0  # for a local connection to be accepted into the queue


def listen(kind: socket.SocketKind) -> tuple[socket.socket, str]:
    """A listening socket with an unguessable name, and the name."""
    name = f"tilescale-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind("\0" + name)
    listener.listen(1024)
    return listener, name


def connect(name: str, kind: socket.SocketKind) -> socket.socket:
    """A connection to the process of this user that listens under a name.

    Raises OSError if no process does, PermissionError if it is another user's process.
    """
    connection = socket.socket(socket.AF_UNIX, kind)
    try:
        connection.settimeout(_TIMEOUT_S)
        connection.connect("\0" + name)
        if not is_ours(connection):
            raise PermissionError("a process of another user listens there")
    except BaseException:
        connection.close()
        raise
    return connection


def is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end belongs to this process's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.getuid()
