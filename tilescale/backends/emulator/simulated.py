# SPDX-License-Identifier: MIT
"""How long a call takes on a machine, as the simulation has it; the arguments stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilescale.backends.emulator.emulate import emulate, units_of
from tilescale.errors import NoDataError
from tilescale.hda import Machine
from tilescale.program.model import Program


def simulated_s(program: Program, machine: Machine, values: Sequence[Any]) -> float:
    """Seconds that a call takes in which each unit passes arguments like these.

    Where it depends on values, on copies of them. Raises as `emulate`.
    """
    units = units_of(program, machine)
    try:
        report = emulate(program.func, [list(values)] * units, machine=machine, data=False)
    except NoDataError:
        report = emulate(program.func, [[_copied(v) for v in values] for _ in range(units)], machine=machine)
    return report.time_us * 1e-6


def _copied(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else value
