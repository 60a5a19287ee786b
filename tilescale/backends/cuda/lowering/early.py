# SPDX-License-Identifier: MIT
"""Grids that begin while the one in front of them ends.

Why: the last programs of a grid leave processors idle, and so does the start of the next kernel. Programmatic dependent
launch (CUDA C++ Programming Guide) lets a kernel begin when all programs of the one before have begun, on processors
that they leave; that needs its programs to touch nothing that the others may still touch. Before: the planned parts of
a program. After: which of its grids let the next one begin, and which do begin early; these wait at their end for those
in front, so whatever comes later finds all of them done. Declines grids with anything between them, and in loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tilelang_core import ir
from tilescale.backends.cuda.lowering.phase import Target
from tilescale.program.dependence import Dependence
from tilescale.program.model import Control, DevicePhase, GridPhase, Launch, Part, Program, Sequence

CAPABILITY = "dependent-launch"


@dataclass(frozen=True)
class Early:
    """Grids of a planned program, by `id`.

    Attributes:
        opens: those that let the next one begin when all of their programs have.
        begins: those that begin before the one in front of them has ended.
    """

    opens: frozenset[int] = frozenset()
    begins: frozenset[int] = frozenset()


def find(program: Program, body: Part, target: Target) -> Early:
    """Which grids of `body`, the planned parts of a program, run beside one another."""
    grids, planned = (list(_grids(part, program)) for part in (program.body, body))
    if not target.machine.has(CAPABILITY) or len(grids) != len(planned) or len(grids) < 2:
        return Early()
    original = {id(part): grid for part, grid in zip(planned, grids, strict=True)}
    dependence = Dependence(program, target.machine)
    opens, begins, running = set(), set(), list[GridPhase]()
    for part in _in_order(body):
        if not isinstance(part, GridPhase) or id(part) not in original:
            running = []
        elif running and all(dependence.independent(original[id(r)], original[id(part)]) for r in running):
            opens.add(id(running[-1]))
            begins.add(id(part))
            running.append(part)
        else:
            running = [part]
    return Early(frozenset(opens), frozenset(begins))


def _grids(part: Part, program: Program) -> Iterator[GridPhase]:
    """The grids that a program has itself, in order; those that device phases become are launches of their own."""
    if isinstance(part, GridPhase):
        yield part
    elif isinstance(part, Launch):
        if any(part.grid is launch.grid for launch in program.launches):
            yield from _grids(part.body, program)
    elif isinstance(part, Sequence | Control):
        for inner in part.parts:
            yield from _grids(inner, program)


def _in_order(part: Part) -> Iterator[Part | None]:
    """What is executed one after the other; None where a loop, a branch or a launch begins or ends."""
    if isinstance(part, Sequence):
        for inner in part.parts:
            yield from _in_order(inner)
    elif isinstance(part, Control | Launch):
        yield None
        for inner in part.parts if isinstance(part, Control) else (part.body,):
            yield from _in_order(inner)
            yield None
    elif not (isinstance(part, DevicePhase) and isinstance(part.stmt, ir.Bind)):  # a value of the host's
        yield part
