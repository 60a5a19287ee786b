# SPDX-License-Identifier: MIT
"""Back ends as manifests: what each can run, and how. Shared code asks the manifest, never the name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilescale.errors import UnsupportedError
from tilescale.hda import Machine
from tilescale.program.model import Program


@dataclass(frozen=True)
class Executable:
    """A program ready to run.

    Attributes:
        run: takes, for each tensor-owning unit that this process drives, its list of arguments (changed in place).
        gathers: whether one process runs all units of the job, so that their arguments come to it.
        device: where it wants the tensors, "cpu" or "cuda".
        synchronize: waits until every call has ended, and raises what went wrong in it.
        reset: collective, makes it run again after a call that failed on the device.
    """

    run: Callable[[list[list[Any]]], Any]
    gathers: bool
    device: str
    synchronize: Callable[[], None] = lambda: None
    reset: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Backend:
    """One back end.

    Attributes:
        name: what a person calls it.
        available: whether this computer can run it now.
        accepts: None if it runs the program, else why not.
        build: makes the executable; options are those of `tilelang.compile`.
        priority: the first available one that accepts a program, highest first, runs it.
        source: the text that it generates for a program, on any computer; None if it generates none.
        notes: which implementations it chooses for a program's operations, and why; None if it has no choice.
    """

    name: str
    available: Callable[[], bool]
    accepts: Callable[[Program], str | None]
    build: Callable[[Program, Machine, dict[str, Any]], Executable]
    priority: int
    source: Callable[[Program, Machine, dict[str, Any]], str] | None = None
    notes: Callable[[Program, Machine], list[str]] | None = None


_BACKENDS: list[Backend] = []


def register(backend: Backend) -> None:
    """Add a back end; a second one of the same name is an error."""
    if any(b.name == backend.name for b in _BACKENDS):
        raise ValueError(f"back end {backend.name} is registered twice")
    _BACKENDS.append(backend)
    _BACKENDS.sort(key=lambda b: -b.priority)


def source(program: Program, machine: Machine, options: dict[str, Any]) -> str:
    """The text that the first back end with one generates for a program.

    Raises:
        UnsupportedError: something in the program, or the machine, has no lowering.
    """
    generator = next(b.source for b in _BACKENDS if b.source is not None)
    return generator(program, machine, options)


def notes(program: Program, machine: Machine) -> list[str]:
    """What the first back end that has a choice of implementations chooses for a program; nothing if it has none."""
    chooser = next(b.notes for b in _BACKENDS if b.notes is not None)
    try:
        return chooser(program, machine)
    except UnsupportedError:
        return []


def choose(program: Program) -> Backend:
    """The back end that runs a program on this computer.

    Raises:
        UnsupportedError: none does; says why each does not.
    """
    reasons = []
    for backend in _BACKENDS:
        reason = backend.accepts(program) if backend.available() else "not available on this computer"
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise UnsupportedError(f"no back end runs {program.name!r}: {'; '.join(reasons)}")
