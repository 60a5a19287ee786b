# SPDX-License-Identifier: MIT
"""How many programs of a launch a tensor-owning unit holds at once: at least one, or the launch is refused."""

from __future__ import annotations

from tilescale.errors import LaunchError
from tilescale.hda import Machine
from tilescale.program.effects import Surroundings
from tilescale.program.model import GridPhase, Launch
from tilescale.program.residency import held


def resident(phase: GridPhase, launch: Launch, names: Surroundings, machine: Machine) -> int:
    """As `held`.

    Raises:
        LaunchError: not even one fits.
    """
    count = held(phase, launch, names, machine)
    if count == 0:
        program = machine.program_level
        raise LaunchError(
            f"a program of {launch.thread_count} threads does not fit one {program.title or program.name} of "
            f"{machine.name!r}",
            hint="use fewer threads",
            where=launch.where,
        )
    return count
