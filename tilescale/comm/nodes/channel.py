# SPDX-License-Identifier: MIT
"""A connection between two launchers that have proven to each other that they know the job's key.

A message is a JSON object in a signed record (`tilescale/comm/trust/records.py`) after its length. Its name holds both
ends and the number of the message, so none can be repeated, left out, or redirected.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any

from tilescale.comm.liveness import receive
from tilescale.comm.trust.key import JobKey
from tilescale.comm.trust.records import seal, unseal_one
from tilescale.errors import ForgedMessageError

_LENGTH = struct.Struct("!I")
_LONGEST = 1 << 16


class NodeChannel:
    """Messages between node `here` and node `there`, whose launcher is `process`."""

    def __init__(self, connection: socket.socket, key: JobKey, here: int, there: int, process: str):
        self.process = process
        self._connection, self._key = connection, key
        self._here, self._there = here, there
        self._sent = self._received = 0
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send one message. Raises OSError if the other side is gone."""
        with self._sending:
            record = seal(self._key, _name(self._here, self._there, self._sent), self._here, _encoded(message))
            self._sent += 1
            self._connection.sendall(_LENGTH.pack(len(record)) + record)

    def receive(self) -> dict[str, Any]:
        """The next message. Raises OSError if the other side is gone, ForgedMessageError if it is not signed."""
        (length,) = _LENGTH.unpack(receive(self._connection, _LENGTH.size))
        if length > _LONGEST:
            raise ForgedMessageError(f"a launcher announces a message of {length} bytes")
        name = _name(self._there, self._here, self._received)
        payload = unseal_one(self._key, name, receive(self._connection, length), writer=self._there)
        self._received += 1
        return json.loads(bytes(payload))


def _encoded(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    assert len(data) < _LONGEST // 2, "launchers send short messages"
    return data


def _name(writer: int, reader: int, number: int) -> str:
    return f"node {writer} to node {reader}, message {number}"
