# SPDX-License-Identifier: MIT
"""Messages between ranks: signed values and logs under names in the job's store, and whole objects on top of them.

Nothing here waits: a name is read once it is known to exist. Waiting, with its bounds, is `Session.wait`. Nothing here
is decoded before it is known that a rank of this job has written it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tilescale.comm.store_client import StoreClient
from tilescale.comm.trust.key import JobKey
from tilescale.comm.trust.records import SignedRecord, seal, unseal, unseal_one
from tilescale.comm.wire import decode

_PIECE = 4 << 20  # torch's store refuses values above 8 MiB


class Transport:
    """Names and values that every rank of the job sees, signed by the rank that wrote them.

    Every method raises the errors of a `StoreClient`; those that read raise ForgedMessageError for data that no rank of
    this job has written. `client`: the store, unsigned.
    """

    def __init__(self, client: StoreClient, key: JobKey, rank: int):
        self.client = client
        self._key, self._rank = key, rank

    def successor(self, name: str, rank: int) -> Transport:
        """The transport of a later group, in which this rank has another number: earlier signatures are invalid
        there."""
        return Transport(self.client.under(name), self._key.of_job(name.encode()), rank)

    def set(self, name: str, value: bytes | memoryview) -> None:
        self.client.set(name, seal(self._key, name, self._rank, value))

    def append(self, name: str, value: bytes) -> None:
        """Add a record to a log."""
        self.client.append(name, seal(self._key, name, self._rank, value))

    def has(self, name: str) -> bool:
        """Whether there is a value, or a log."""
        return self.client.has(name)

    def log(self, name: str) -> list[SignedRecord]:
        return unseal(self._key, name, self.client.find(name) or b"")

    def value(self, name: str, writer: int) -> memoryview:
        """The value that rank `writer` stored under a name that exists."""
        return unseal_one(self._key, name, self.client.get(name), writer)

    def delete(self, name: str) -> None:
        self.client.delete(name)

    def put(self, name: str, parts: list[memoryview]) -> None:
        """Store an encoded object. `has(name)` becomes true when all of it is stored."""
        sizes = [part.nbytes for part in parts]
        for piece, part, span in _pieces(name, sizes):
            self.set(piece, parts[part][span])
        self.set(name, json.dumps(sizes).encode())

    def take(self, name: str, writer: int, readers: int = 1) -> Any:
        """The object that `writer` put under a name that exists; the last of its `readers` removes it."""
        sizes = json.loads(bytes(self.value(name, writer)))
        parts = [bytearray(size) for size in sizes]
        for piece, part, span in _pieces(name, sizes):
            parts[part][span] = self.value(piece, writer)
        if readers == 1 or self.client.count(f"{name}/readers") == readers:
            for piece, _, _ in _pieces(name, sizes):
                self.delete(piece)
            self.delete(name)
            if readers > 1:
                self.delete(f"{name}/readers")
        return decode(parts)


def _pieces(name: str, sizes: list[int]) -> Iterator[tuple[str, int, slice]]:
    for part, size in enumerate(sizes):
        for number, start in enumerate(range(0, size, _PIECE)):
            yield f"{name}/{part}/{number}", part, slice(start, min(start + _PIECE, size))
