# SPDX-License-Identifier: MIT
"""A collective as one rank calls it: which one, with what root, on which line of the user's program."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from types import FrameType

from tilescale.errors import Location

_BETWEEN = ("tilescale", "torch")
"""Packages whose frames are between the user's line and the call: PyTorch's call the operators."""


@dataclass(frozen=True)
class CollectiveCall:
    """A call of the collective `op`; `root` is a rank of its team, or None where there is none.

    Attributes:
        refusal: the error that the rank raised instead of taking part, as text; empty for a rank that takes part.
        brief: the object that the rank gives, encoded, if it is small; then no message follows.
    """

    op: str
    root: int | None
    where: Location
    refusal: str = ""
    brief: str = field(default="", repr=False)

    @classmethod
    def here(cls, op: str, root: int | None = None) -> CollectiveCall:
        """The call that is being made, placed at the innermost frame of the user."""
        frame = sys._getframe(1)
        while frame.f_back is not None and _package(frame) in _BETWEEN:
            frame = frame.f_back
        return cls(op, root, Location(frame.f_code.co_filename, frame.f_lineno))

    @classmethod
    def from_json(cls, text: bytes | memoryview) -> CollectiveCall:
        """The call that another rank described by `to_json`."""
        op, root, file, line, refusal, brief = json.loads(bytes(text))
        return cls(op, root, Location(file, line), refusal, brief)

    def to_json(self) -> bytes:
        """The call for other ranks."""
        return json.dumps([self.op, self.root, self.where.file, self.where.line, self.refusal, self.brief]).encode()

    def refused(self, error: str) -> CollectiveCall:
        """The call of a rank that raises `error` instead of taking part."""
        return replace(self, refusal=error)

    def agrees_with(self, other: CollectiveCall) -> bool:
        """Whether both are the same collective, from any line of the program."""
        return (self.op, self.root) == (other.op, other.root)

    def at(self, what: str) -> Location:
        """The line of the call, with the part that it plays."""
        return replace(self.where, what=what)

    def __str__(self) -> str:
        return f"{self.op}({'' if self.root is None else f'root={self.root}'})"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
