# SPDX-License-Identifier: MIT
"""How many programs of a launch a tensor-owning unit holds at once, by the machine model."""

from __future__ import annotations

from tilescale.hda import Machine
from tilescale.program.effects import Surroundings
from tilescale.program.footprint import FRAGMENTS, fullest, tile_bytes
from tilescale.program.model import GridPhase, Launch


def held(phase: GridPhase, launch: Launch, names: Surroundings, machine: Machine) -> int:
    """Programs of a grid that one tensor-owning unit holds at once; 0 if not even one fits."""
    program = machine.program_level
    if program.count is not None and not program.virtual:
        return program.count
    room = machine.capacity(machine.layer_for("shared").name)
    shared = min(fullest(phase, launch, names, machine).nbytes, room)
    registers = machine.capacity(machine.layer_for("fragment").name, launch.thread_count)
    fragments = min(sum(tile_bytes(machine, launch, names, FRAGMENTS).values()), registers)
    per_unit = machine.residency(threads=launch.thread_count, shared_bytes=shared, fragment_bytes=fragments)
    return per_unit * machine.count(program.name, machine.tensor_level.name)
