# SPDX-License-Identifier: MIT
"""File descriptors from process to process of one user on one host, over Unix sockets.

A rank opens a `Mailbox`, announces its name to the others, and each sends its descriptor there. Neither side ever
blocks: a message waits in the socket until its receiver looks.
"""

from __future__ import annotations

import array
import contextlib
import os
import selectors
import socket
import struct
from collections.abc import Iterable

from tilescale.comm.call import CollectiveCall
from tilescale.comm.heap.group import HeapGroup
from tilescale.comm.trust import same_user
from tilescale.errors import DeviceError, LaunchError

_MESSAGE = struct.Struct("!I")  # the sender's rank
_MOST_DESCRIPTORS = 8  # in a message that is not ours; all have to be received to be closed


class Mailbox:
    """A socket where other processes of the same user can leave one descriptor each. `name`: of the socket; for `send`.
    """

    def __init__(self) -> None:
        self._received: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._socket, self.name = same_user.listen(socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._selector.register(self._socket, selectors.EVENT_READ)

    def missing(self, senders: Iterable[int]) -> list[int]:
        """The senders whose descriptors are not here."""
        return [rank for rank in senders if rank not in self._received]

    def take(self, senders: Iterable[int]) -> dict[int, int] | None:
        """The descriptors of all `senders`, which the caller now owns; None as long as one is missing."""
        senders = list(senders)
        if self.missing(senders):
            self._look()
        if self.missing(senders):
            return None
        return {rank: self._received.pop(rank) for rank in senders}

    def close(self) -> None:
        """Close the socket and all descriptors that were not taken."""
        for key in list((self._selector.get_map() or {}).values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        for descriptor in self._received.values():
            os.close(descriptor)
        self._received.clear()

    def _look(self) -> None:
        for key, _ in self._selector.select(0):
            if key.fileobj is self._socket:
                self._accept()
            elif isinstance(key.fileobj, socket.socket):
                self._receive(key.fileobj)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._socket.accept()
                if not same_user.is_ours(connection):
                    connection.close()
                    continue
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ)
                self._receive(connection)  # the message is usually there with the connection

    def _receive(self, connection: socket.socket) -> None:
        try:
            message, descriptors, flags = _receive(connection)
        except BlockingIOError:
            return
        except ConnectionError:
            message, descriptors, flags = b"", [], 0
        self._selector.unregister(connection)
        connection.close()
        whole = len(message) == _MESSAGE.size and len(descriptors) == 1 and not flags & socket.MSG_CTRUNC
        sender = _MESSAGE.unpack(message)[0] if whole else -1
        if not whole or sender in self._received:
            for descriptor in descriptors:
                os.close(descriptor)
            return
        self._received[sender] = descriptors[0]


def send(name: str, sender: int, descriptor: int) -> None:
    """Leave a copy of `descriptor` in the mailbox called `name`, as rank `sender`.

    Raises LaunchError if the mailbox cannot be reached, or belongs to another user.
    """
    try:
        with same_user.connect(name, socket.SOCK_SEQPACKET) as connection:
            socket.send_fds(connection, [_MESSAGE.pack(sender)], [descriptor])
    except OSError as error:
        raise LaunchError(
            f"cannot share memory with the process that listens at {name}: {error}",
            hint="the ranks of one host must run as one user and in one network namespace; or the rank there has just "
            "ended",
        ) from error


def exchange(
    group: HeapGroup, call: CollectiveCall, mailbox: Mailbox, names: list[str], descriptor: int, senders: Iterable[int]
) -> dict[int, int]:
    """Send `descriptor` to `senders` in the mailboxes called `names`, and wait for theirs, which the caller then owns.

    Raises RankFailedError if a rank fails meanwhile or the time is up, LaunchError if one cannot be reached,
    DeviceError if this process can have no more descriptors.
    """
    senders = list(senders)
    for rank in senders:
        try:
            send(names[rank], group.rank, descriptor)
        except LaunchError:
            group.raise_if_failed(call, within_s=1.0)  # its death explains more than its closed mailbox
            raise
    try:
        return group.wait(call, lambda: mailbox.take(senders), lambda: mailbox.missing(senders))
    except OSError as error:
        raise DeviceError(
            f"rank {group.rank} cannot take the descriptors of its peers: {error}",
            hint="raise the limit: ulimit -n 4096",
        ) from error


def _receive(connection: socket.socket) -> tuple[bytes, list[int], int]:
    """A message, the descriptors that came with it, and the kernel's flags."""
    descriptors = array.array("i")
    space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * descriptors.itemsize)
    # Not socket.recv_fds: it drops its flags, and children would inherit the descriptors.
    message, ancillary, flags, _ = connection.recvmsg(64, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return message, list(descriptors), flags
