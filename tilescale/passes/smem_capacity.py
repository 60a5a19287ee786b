# SPDX-License-Identifier: MIT
"""Whether the tiles that a program holds at one time fit its shared memory.

It changes nothing. The compiler gives tiles with disjoint lifetimes the same memory, so their sum may exceed the layer;
but a tile that is used before and after a statement is live while the statement runs, and so are the copies that a
pipelined loop keeps. Further memory of the compiler, such as exchange buffers, is not known here: the generated text is
checked once more.
"""

from __future__ import annotations

from tilelang_core import ir
from tilescale.errors import AllocationTooLargeError
from tilescale.hda import Machine
from tilescale.hda.units import format_bytes
from tilescale.program.effects import ProgramNames, names_of, phases
from tilescale.program.footprint import PeakFootprint, bytes_at_most, fullest
from tilescale.program.model import GridPhase, Launch, Program, declaration, location


def check_capacity(program: Program, machine: Machine) -> None:
    """Check all grid phases. Raises AllocationTooLargeError: the tiles that live at one statement, with their stages,
    are larger than the layer."""
    names = names_of(program)
    for phase, launch in phases(program.body):
        if isinstance(phase, GridPhase) and launch is not None:
            _check(phase, launch, names, machine)


def _check(phase: GridPhase, launch: Launch, names: ProgramNames, machine: Machine) -> None:
    layer = machine.layer_for("shared")
    room = machine.capacity(layer.name)
    if bytes_at_most(phase, launch, names, machine) <= room:
        return
    most = fullest(phase, launch, names, machine)
    if most.nbytes <= room:
        return
    buffers = {buffer.data: buffer for buffer in launch.buffers}
    tiles = ", ".join(f"{buffers[data].name!r} {_size(data, most)}" for data in most.tiles)
    places = [location(most.stmt, "all are needed here"), *(declaration(buffers[data]) for data in most.tiles)]
    remedies = ["use smaller tiles", "let the last use of one come before the first use of another"]
    remedies[1:1] = ["fewer pipeline stages (num_stages=)"] if most.stages else []
    raise AllocationTooLargeError(
        f"tiles that live at the same time take {format_bytes(most.nbytes)} of {layer.title or layer.name}, "
        f"{machine.name} has {format_bytes(room)} for one program: {tiles}",
        hint=", or ".join(remedies),
        where=[place for place in places if place],
    )


def _size(data: ir.Var, most: PeakFootprint) -> str:
    """Format the size of a tile, with its number of stages."""
    stages = most.stages.get(data, 1)
    return f"{stages} x " * (stages > 1) + format_bytes(most.tiles[data] // stages)
