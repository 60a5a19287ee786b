# SPDX-License-Identifier: MIT
"""The job's notice board: which ranks have left, which are gone, and the first failure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from tilescale.comm.transport import Transport

__all__ = ["Board", "Failure", "Notes"]

_KEY = "board"


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong in the job: the rank it happened on, and a sentence that names it."""

    rank: int
    text: str


@dataclass(frozen=True)
class Notes:
    """What the board says.

    Attributes:
        left: ranks whose script has ended, for whatever reason; they take part in nothing any more.
        gone: ranks whose lifeline is cut: the process has died, or has said all it had to say and is about to end.
        failure: the first failure, or None.
    """

    left: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    failure: Failure | None = None


class Board:
    """Notes that any rank pins and all ranks read. They are only ever added."""

    def __init__(self, transport: Transport):
        self._transport = transport

    def left(self, rank: int) -> None:
        """Note that the script of `rank` has ended."""
        self._pin("left", rank)

    def gone(self, rank: int) -> None:
        """Note that the lifeline of `rank` is cut."""
        self._pin("gone", rank)

    def failed(self, rank: int, text: str) -> None:
        """Note a failure; the first one counts."""
        self._pin("failed", rank, text)

    def read(self) -> Notes:
        """All notes so far."""
        lines = (self._transport.get(_KEY) or b"").decode().splitlines()
        notes = [json.loads(line) for line in lines]
        failures = [Failure(rank, text) for kind, rank, text in notes if kind == "failed"]
        return Notes(
            left=frozenset(rank for kind, rank, _ in notes if kind == "left"),
            gone=frozenset(rank for kind, rank, _ in notes if kind == "gone"),
            failure=failures[0] if failures else None,
        )

    def _pin(self, kind: str, rank: int, text: str = "") -> None:
        self._transport.append(_KEY, json.dumps([kind, rank, text]).encode() + b"\n")
