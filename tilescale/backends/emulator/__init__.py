# SPDX-License-Identifier: MIT
"""The emulator: runs any program for any described machine on the CPU.

    emulate.py      the entry: machine, extents, report; arguments.py binds tensors, progress.py shows a bar
    coverage.py     which of stock TileLang's operations run
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

    def build(self, options: dict[str, Any]) -> Executable:
        from tilescale.backends.emulator.emulate import emulate

        func, machine = self.program.func, self.target.machine
        return Executable(lambda per_unit: emulate(func, per_unit, machine=machine), gathers=True, device="cpu")


BACKEND = Backend("emulator", available=lambda: True, lower=_Emulated, priority=0)
