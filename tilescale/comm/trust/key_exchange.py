# SPDX-License-Identifier: MIT
"""The key of a job on one host whose launcher passes none: rank 0 makes one, and the kernel says which process may have
it.

torchrun is such a launcher. Rank 0 hands the key to processes of its own user alone, over a Unix socket, and the ranks
take it from such processes alone. So no prior secret is needed, and the socket's name may be public.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

from tilescale.comm.trust import same_user
from tilescale.comm.trust.key import KEY_BYTES, JobKey, new_key

_PAUSE_S = 0.1  # when there are no descriptors left


class KeyServer:
    """Rank 0's side: a thread that hands the key over as long as this process lives.

    Attributes:
        key: a new one.
        name: where to `fetch` it.
    """

    def __init__(self) -> None:
        secret = bytes.fromhex(new_key())
        self.key = JobKey(secret)
        listener, self.name = same_user.listen(socket.SOCK_STREAM)
        os.register_at_fork(after_in_child=listener.close)
        threading.Thread(target=_serve, args=(listener, secret), name="tilescale-key", daemon=True).start()


def fetch(name: str) -> JobKey:
    """The key that rank 0 hands out at `name`. Raises OSError if this user's rank 0 is not there."""
    with same_user.connect(name, socket.SOCK_STREAM) as connection:
        secret = connection.recv(KEY_BYTES, socket.MSG_WAITALL)
    if len(secret) < KEY_BYTES:
        raise ConnectionError("rank 0 has ended, or runs as another user")
    return JobKey(secret)


def _serve(listener: socket.socket, secret: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            time.sleep(_PAUSE_S)
            continue
        with connection, contextlib.suppress(OSError):  # it may be gone already
            if same_user.is_ours(connection):
                connection.send(secret)  # fits into the empty buffer of a new connection
