# SPDX-License-Identifier: MIT
"""The job's failure log: which ranks have left, which are gone, and the first failure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tilescale.comm.transport import Transport

_NAME = "failures"
_LONGEST = 16 << 10  # characters of a failure's text


@dataclass(frozen=True)
class RankFailure:
    """The first thing that went wrong in the job: the rank it happened on, and a sentence that names it."""

    rank: int
    text: str


@dataclass(frozen=True)
class JobStatus:
    """Contents of the log.

    Attributes:
        left: ranks whose script has ended, for any reason; they take part in no later call.
        gone: ranks whose connection is cut: the process has died, or has said all it had to say and is about to end.
        failure: the first failure, or None.
    """

    left: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    failure: RankFailure | None = None


class FailureLog:
    """Notes that any rank adds and all ranks read. They are only ever added."""

    def __init__(self, transport: Transport):
        self._transport = transport

    def left(self, rank: int) -> None:
        """Note that the script of `rank` has ended."""
        self._add("left", rank)

    def gone(self, rank: int) -> None:
        """Note that the connection of `rank` is cut."""
        self._add("gone", rank)

    def failed(self, rank: int, text: str) -> None:
        """Note a failure; the first one counts."""
        self._add("failed", rank, text[:_LONGEST])

    def read(self) -> JobStatus:
        """All notes written until now."""
        notes = [json.loads(bytes(record.payload)) for record in self._transport.log(_NAME)]
        failures = [RankFailure(rank, text) for kind, rank, text in notes if kind == "failed"]
        return JobStatus(
            left=frozenset(rank for kind, rank, _ in notes if kind == "left"),
            gone=frozenset(rank for kind, rank, _ in notes if kind == "gone"),
            failure=failures[0] if failures else None,
        )

    def _add(self, kind: str, rank: int, text: str = "") -> None:
        self._transport.append(_NAME, json.dumps([kind, rank, text]).encode())
