# SPDX-License-Identifier: MIT
"""Programs of operators, shared by the ranks of all jobs of a run: a trace takes up to a second in each rank."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import pickle
from pathlib import Path

from tilelang_core import records
from tilescale.cost.calibrated import origin
from tilescale.program.builder import ProgramBuilder
from tilescale.program.model import Program
from tilescale.runtime.bound_program import BoundProgram

__all__ = ["share"]

_make = BoundProgram.program.func


def share(folder: Path) -> None:
    """From now on ranks read a builder's program from a folder if one of them has left it there.

    As on computers with GPUs the builder's name and the machine stand for the program. Other processes make their own.
    """

    @functools.wraps(_make)
    def program(own: BoundProgram) -> Program:
        key = _key(own) if "RANK" in os.environ else None
        return _make(own) if key is None else _shared(own, folder / key)

    BoundProgram.program.func = program


def _key(own: BoundProgram) -> str | None:
    """The name of the program's file; None for a program without a named builder, or with a schedule."""
    builder, machine = own._traced, own.machine
    if not isinstance(builder, ProgramBuilder) or not builder.name or own._asked != "sequential":
        return None
    given = builder.name, machine.name, machine.digest, origin(machine), own.options.get("timeline")
    return hashlib.sha256(repr(given).encode()).hexdigest()


def _shared(own: BoundProgram, path: Path) -> Program:
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks that come meanwhile would make it too
        if path.exists():
            own.__dict__["_written"], found = records.loads(path.read_bytes())
            return found
        found = _make(own)
        with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
            path.write_bytes(records.dumps((own._written, found)))
        return found
