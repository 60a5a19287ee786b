# SPDX-License-Identifier: MIT
"""Mutual proof of a rank and rank 0 that they know the job's key, without showing it.

    rank -> 0   hello       protocol, rank, nonce and process of the rank
    0 -> rank   challenge   nonce of rank 0, nonce of the job, process of rank 0, tag over "rank 0" and all of these
    rank -> 0   proof       tag over "rank" and all of these
    0 -> rank   verdict     one byte

All messages have a fixed length. The nonces are new for every connection, so a recorded one is useless; that of the job
makes the key with which its ranks sign from here on (`JobKey.of_job`). Both sides name their processes here, so that
errors can name a rank that dies before its first call.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from dataclasses import dataclass

from tilescale.comm.trust.key import TAG_BYTES, JobKey
from tilescale.errors import ForgedMessageError

_PROTOCOL = b"TSJ2"
_NONCE_BYTES = 32
_PROCESS_BYTES = 80  # of `this_process`: names of hosts have at most 64 bytes on Linux; what is longer is cut
_HELLO = struct.Struct(f"!4sI{_NONCE_BYTES}s{_PROCESS_BYTES}s")
_CHALLENGE = struct.Struct(f"!{_NONCE_BYTES}s{_NONCE_BYTES}s{_PROCESS_BYTES}s")  # a tag follows

HELLO_BYTES, CHALLENGE_BYTES, PROOF_BYTES = _HELLO.size, _CHALLENGE.size + TAG_BYTES, TAG_BYTES
WELCOME, JOINED_BEFORE = b"\x00", b"\x01"


def new_nonce() -> bytes:
    """Random bytes, drawn anew for each call."""
    return secrets.token_bytes(_NONCE_BYTES)


def this_process() -> str:
    """The name of this process in errors, e.g. "pid 77 on node3"."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


class Hello:
    """A rank's side: it sends `message`, and `prove`s after the answer."""

    def __init__(self, key: JobKey, rank: int):
        self.message = _HELLO.pack(_PROTOCOL, rank, new_nonce(), this_process().encode())
        self._key = key

    def prove(self, challenge: bytes) -> tuple[bytes, bytes, str]:
        """The proof to send, the nonce of the job, and the process of rank 0. Raises ForgedMessageError if this is not
        rank 0 of the job."""
        facts, tag = challenge[:-TAG_BYTES], challenge[-TAG_BYTES:]
        if not self._key.accepts(tag, b"rank 0", self.message, facts):
            raise ForgedMessageError("authentication failed: the other side does not know the key of this job")
        _, job, process = _CHALLENGE.unpack(facts)
        return self._key.tag(b"rank", self.message, challenge), job, _text(process)


@dataclass(frozen=True)
class Answer:
    """Rank 0's answer to a hello.

    Attributes:
        rank: the rank that sent the hello, if its proof is right.
        process: the process of this rank.
        challenge: what to send.
    """

    rank: int
    process: str
    challenge: bytes
    _key: JobKey
    _hello: bytes

    @classmethod
    def to(cls, hello: bytes, key: JobKey, job: bytes, size: int) -> Answer | None:
        """The answer to a hello; None if no rank of a job of `size` ranks says it."""
        protocol, rank, _, process = _HELLO.unpack(hello)
        if protocol != _PROTOCOL or not 0 < rank < size:
            return None
        facts = _CHALLENGE.pack(new_nonce(), job, this_process().encode())
        return cls(rank, _text(process), facts + key.tag(b"rank 0", hello, facts), key, hello)

    def proven_by(self, proof: bytes) -> bool:
        """Whether the rank knows the key."""
        return self._key.accepts(proof, b"rank", self._hello, self.challenge)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
