# SPDX-License-Identifier: MIT
"""Mutual proof of a rank and rank 0 that they know the job's key, without showing it.

    rank -> 0   hello       protocol, rank, nonce of the rank
    0 -> rank   challenge   nonce of rank 0, nonce of the job, tag over "rank 0" and all of these
    rank -> 0   proof       tag over "rank" and all of these
    0 -> rank   verdict     one byte

All messages have a fixed length. The nonces are new for every connection, so a recorded one is useless; that of the job
makes the key with which its ranks sign from here on (`JobKey.of_job`).
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass

from tilescale.comm.trust.key import TAG_BYTES, JobKey
from tilescale.errors import ForgedMessageError

_PROTOCOL = b"TSJ1"
_NONCE_BYTES = 32
_HELLO = struct.Struct(f"!4sI{_NONCE_BYTES}s")
_CHALLENGE = struct.Struct(f"!{_NONCE_BYTES}s{_NONCE_BYTES}s{TAG_BYTES}s")

HELLO_BYTES, CHALLENGE_BYTES, PROOF_BYTES = _HELLO.size, _CHALLENGE.size, TAG_BYTES
WELCOME, JOINED_BEFORE = b"\x00", b"\x01"


def new_nonce() -> bytes:
    """Random bytes, drawn anew for each call."""
    return secrets.token_bytes(_NONCE_BYTES)


class Hello:
    """A rank's side: it sends `message`, and `prove`s after the answer."""

    def __init__(self, key: JobKey, rank: int):
        self.message = _HELLO.pack(_PROTOCOL, rank, new_nonce())
        self._key = key

    def prove(self, challenge: bytes) -> tuple[bytes, bytes]:
        """The proof to send, and the nonce of the job. Raises ForgedMessageError if this is not rank 0 of the job."""
        server, job, tag = _CHALLENGE.unpack(challenge)
        if not self._key.accepts(tag, b"rank 0", self.message, server, job):
            raise ForgedMessageError("authentication failed: the other side does not know the key of this job")
        return self._key.tag(b"rank", self.message, server, job), job


@dataclass(frozen=True)
class Answer:
    """Rank 0's answer to a hello.

    Attributes:
        rank: the rank that sent the hello, if its proof is right.
        challenge: what to send.
    """

    rank: int
    challenge: bytes
    _proof_of: tuple[JobKey, bytes, bytes, bytes]

    @classmethod
    def to(cls, hello: bytes, key: JobKey, job: bytes, size: int) -> Answer | None:
        """The answer to a hello; None if no rank of a job of `size` ranks says it."""
        protocol, rank, _ = _HELLO.unpack(hello)
        if protocol != _PROTOCOL or not 0 < rank < size:
            return None
        server = new_nonce()
        challenge = _CHALLENGE.pack(server, job, key.tag(b"rank 0", hello, server, job))
        return cls(rank, challenge, (key, hello, server, job))

    def proven_by(self, proof: bytes) -> bool:
        """Whether the rank knows the key."""
        key, hello, server, job = self._proof_of
        return key.accepts(proof, b"rank", hello, server, job)
