# SPDX-License-Identifier: MIT
"""Signed records: a value stored under a name, with a proof that a rank of this job stored it there.

    record = struct(rank, length) tag payload
    tag    = HMAC-SHA256(key of the job, name, rank, length, payload)

Several records that were appended to one name follow each other. Nothing of a payload is looked at before its tag has
been checked, and a record that is moved to another name, or to another job, is refused. Names that hold what must not
be repeated carry a number that is used once.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from tilescale.comm.trust.key import TAG_BYTES, JobKey
from tilescale.errors import ForgedMessageError

_HEADER = struct.Struct("!IQ")  # rank, bytes of the payload
_BEGIN = _HEADER.size + TAG_BYTES


class SignedRecord(NamedTuple):
    """A payload, and the rank that signed it."""

    rank: int
    payload: memoryview


def seal(key: JobKey, name: str, rank: int, payload: bytes | memoryview) -> bytes:
    """The record of a payload that `rank` stores under `name`."""
    header = _HEADER.pack(rank, len(payload))
    return b"".join((header, key.tag(name.encode(), header, payload), payload))


def unseal(key: JobKey, name: str, data: bytes) -> list[SignedRecord]:
    """Verify and split the records stored under `name`. Raises ForgedMessageError if no rank of this job has written
    them."""
    view, records = memoryview(data), []
    while view:
        if len(view) < _BEGIN:
            raise _forged(name, f"{len(view)} bytes that are not a record")
        rank, length = _HEADER.unpack_from(view)
        if length > len(view) - _BEGIN:
            raise _forged(name, f"a record of {length} bytes of which {len(view) - _BEGIN} are there")
        payload = view[_BEGIN : _BEGIN + length]
        if not key.accepts(view[_HEADER.size : _BEGIN], name.encode(), view[: _HEADER.size], payload):
            raise _forged(name, "a record that is not signed with the job's key")
        records.append(SignedRecord(rank, payload))
        view = view[_BEGIN + length :]
    return records


def unseal_one(key: JobKey, name: str, data: bytes, writer: int) -> memoryview:
    """The payload that `writer` stored under `name`, alone. Raises ForgedMessageError if anything else is there."""
    records = unseal(key, name, data)
    if [record.rank for record in records] != [writer]:
        raise _forged(name, f"records of ranks {[record.rank for record in records]}, not one of rank {writer},")
    return records[0].payload


def _forged(name: str, found: str) -> ForgedMessageError:
    return ForgedMessageError(
        f"the job's store holds {found} under {name!r}: no rank of this job has written it",
        hint="another program writes to the store at MASTER_ADDR:MASTER_PORT: a second job on the same port, or "
        "an intruder; start the job again on another port",
    )
