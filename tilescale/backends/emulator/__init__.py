# SPDX-License-Identifier: MIT
"""The emulator: runs any program for any described machine on the CPU.

    emulate.py      the entry: machine, extents, report; arguments.py binds tensors, progress.py shows a bar
    run.py          one emulation: units, accounts, deadlock reports
    grid.py         phases, residency, clusters, programs
    compiler.py     statements and expressions to closures; who owns which buffer; registry.py has the tables of rules
    steps.py        closures of whole statements
    statements.py branches.py expr.py access.py slices.py    TIR
    tiles.py multicast.py threads.py barriers.py externs.py  TileLang's operations
    scales.py exchange.py meetings.py collectives.py pieces.py gathers.py     ours
    queues.py       copy queues: what a unit starts beside its phases
    frame.py units.py scheduler.py interleave.py    state, unit tree, coroutines and the orders they run in
    clock.py costs.py loops.py tally.py             what the simulation of the time is told
    flags.py nodata.py                              what is a flag; runs in which tiles have no values
    alike.py takeover.py                            programs that do the same in such runs: one stands for all
    observe.py      what an emulation tells those who watch it
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
