# SPDX-License-Identifier: MIT
"""How many programs of a launch a tensor-owning unit holds at once: at least one, or the launch is refused."""

from __future__ import annotations

from tilescale.errors import LaunchError
from tilescale.hda import Machine
from tilescale.program.model import Launch
from tilescale.program.residency import held


def resident(machine: Machine, launch: Launch, shared_bytes: int, fragment_bytes: int) -> int:
    """As `held`.

    Raises:
        LaunchError: not even one fits.
    """
    count = held(machine, launch, shared_bytes, fragment_bytes)
    if count == 0:
        program = machine.program_level
        raise LaunchError(
            f"a program of {launch.thread_count} threads and {shared_bytes} bytes of shared memory does not fit one "
            f"{program.title or program.name} of {machine.name!r}",
            hint="use fewer threads or smaller tiles",
            where=launch.where,
        )
    return count
