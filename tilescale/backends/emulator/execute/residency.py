# SPDX-License-Identifier: MIT
"""How many programs of a launch a tensor-owning unit holds at once."""

from __future__ import annotations

from tilescale.errors import LaunchError
from tilescale.hda import Machine
from tilescale.program.model import Launch


def resident(machine: Machine, launch: Launch, shared_bytes: int, fragment_bytes: int) -> int:
    """Programs that one tensor-owning unit holds at once.

    Args:
        shared_bytes, fragment_bytes: what one program allocates in shared memory and in fragments.

    Raises:
        LaunchError: not even one fits.
    """
    program = machine.program_level
    if not program.virtual:
        return program.count
    room = machine.capacity(machine.layer_for("shared").name)
    # The compiler reuses shared memory between tiles that do not live at the same time: their sum may exceed it.
    shared = min(shared_bytes, room)
    registers = machine.capacity(machine.layer_for("fragment").name, launch.thread_count)
    per_unit = machine.residency(
        threads=launch.thread_count, shared_bytes=shared, fragment_bytes=min(fragment_bytes, registers)
    )
    if per_unit == 0:
        raise LaunchError(
            f"a program of {launch.thread_count} threads and {shared} bytes of shared memory does not fit one "
            f"{program.title or program.name} of {machine.name!r}",
            hint="use fewer threads or smaller tiles",
            where=launch.where,
        )
    return per_unit * machine.count(program.name, machine.tensor_level.name)
