# SPDX-License-Identifier: MIT
"""The emulator: runs any program for any described machine on the CPU.

    emulate.py      the entry: machine and extents
    report.py       what it returns: activity, time, pictures
    arguments.py    tensors bound to the program; pairs.py takes those apart that hold two elements in a byte
    assumptions.py  values that a run without data takes for granted
    remedies.py     which statement is missing, found by runs that are made again (again.py) with one more (edits.py)
    run.py          one emulation: units, accounts, deadlock reports
    interpret/      statements and expressions of TIR as closures
    operations/     what operations do, a family a file
    execute/        units that execute: coroutines, waits, what the machine holds at once
    record/         what the simulation of the time is told
    checks/         observers that find mistakes
    numerics/       what operations compute, on numpy arrays
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilescale.backends.base import Backend, Executable, Target
from tilescale.errors import UnsupportedError
from tilescale.program.model import Program


@dataclass(frozen=True)
class _Emulated:
    """Any program on any machine: there is nothing to lower before it is called."""

    program: Program
    target: Target
    notes: tuple[str, ...] = ()

    def source(self, options: dict[str, Any]) -> str:
        raise UnsupportedError("the emulator generates no text")

    def compilations(self, options: dict[str, Any]) -> tuple[()]:
        return ()

    def build(self, options: dict[str, Any]) -> Executable:
        from tilescale.backends.emulator.emulate import emulate_program, simulated_s

        program, machine = self.program, self.target.machine
        return Executable(
            lambda per_unit: emulate_program(program, machine, per_unit),
            gathers=True,
            device="cpu",
            simulated_s=lambda values: simulated_s(program, machine, values),
        )


BACKEND = Backend("emulator", available=lambda: True, lower=_Emulated, priority=0)
